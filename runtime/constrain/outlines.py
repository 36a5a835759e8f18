r"""Regexes on outlines-core, compiled inside a fence.

The library's automaton prefers one alternative to another wherever a match can end, and loses the way
on from an ending that is optional: compiled as it stands, `(yes|no)?` would never say yes. So no match
may end early: a pattern is put between two characters that no text can hold, each a token past the
real vocabulary, and taken out of its classes. A sequence starts behind the first of them, and where
the second is allowed the text is complete.

A way through the pattern that the vocabulary cannot spell is not taken; if that leaves a place with no
way on at all, the pattern is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from outlines_core import Guide, Index

from ..errors import ConstraintError
from ..messages import shortened
from .automaton import MAX_ROWS_BYTES, Row, Walk, row_of
from .estimate import BYTES_PER_EDGE, Budget, Estimate, estimate
from .pattern import Pattern, parse
from .vocab import Vocab


@dataclass(frozen=True, slots=True)
class Plan:
    """A pattern that can be compiled, and how large its automaton will be at most."""

    pattern: Pattern
    size: Estimate


def compile_regex(pattern: str, vocab: Vocab, budget: Budget) -> OutlinesConstraint:
    """Compile `pattern` for `vocab`; takes as long as `budget` allows.

    Raises:
        ConstraintError: the pattern is not of the syntax, is over budget, or cannot be spelled.
    """
    return build(plan(pattern, vocab, budget), vocab)


def plan(pattern: str, vocab: Vocab, budget: Budget) -> Plan:
    """Read `pattern` and count its automaton; takes a fraction of what compiling it does.

    Raises:
        ConstraintError: the pattern is not of the syntax.
        OverBudget: its automaton is too large.
    """
    parsed = parse(pattern)
    return Plan(parsed, estimate(parsed.tree, vocab, budget))


def build(planned: Plan, vocab: Vocab) -> OutlinesConstraint:
    """Compile what was planned.

    Raises:
        ConstraintError: `vocab` cannot spell the pattern.
    """
    fenced = planned.pattern.fenced
    try:
        index = Index(fenced, vocab.fenced)
    except ValueError as error:
        if "incompatible" not in str(error):
            reason = shortened(" ".join(str(error).split()), 200)
            raise ConstraintError(f"the pattern cannot be compiled: {reason}") from error
        raise ConstraintError(
            "this vocabulary cannot spell the pattern: somewhere in it no token leads on to a complete text."
        ) from error
    start = index.get_next_state(index.get_initial_state(), vocab.opening)
    assert start is not None, fenced
    return OutlinesConstraint(index, start, vocab, planned.size.edges * BYTES_PER_EDGE)


class OutlinesConstraint:
    """An automaton over tokens, with the rows of the states that were visited; equal masks are one tensor.

    The library fills a mask fast only for a guide that walked to its state. So each place remembers the
    token that first led to it, and a guide is sent along these from the start: a walk is a microsecond.
    """

    exact = True
    warnings: tuple[str, ...] = ()

    def __init__(self, index: Index, start: int, vocab: Vocab, index_nbytes: int) -> None:
        self.vocab = vocab
        self._index = index
        self.first = start
        self._index_nbytes = index_nbytes
        self._reached_by: dict[int, tuple[int, int]] = {}  # a place -> the one before it, and the token between
        self._rows: dict[int, Row] = {}
        self._rows_by_bits: dict[bytes, Row] = {}
        self.ended = self._unpack(torch.zeros(self._num_words, dtype=torch.int32), is_complete=True)

    @property
    def nbytes(self) -> int:
        """About how much memory this holds, rows included."""
        return self._index_nbytes + len(self._rows_by_bits) * self.vocab.size

    @property
    def _num_words(self) -> int:
        return self.vocab.closing // 32 + 1

    def start(self) -> Walk:
        return Walk(self, self.first)

    def violation(self, text: str) -> str:
        return ""

    def next(self, place: int, token: int) -> int | None:
        """The place after `token`, or None where it is not allowed."""
        following: int | None = self._index.get_next_state(place, token)
        if following is not None and following != self.first:
            self._reached_by.setdefault(following, (place, token))
        return following

    def row(self, place: int) -> Row:
        """What is allowed at `place`, which `next` has returned before, or which is the start."""
        if (row := self._rows.get(place)) is None:
            row = self._rows[place] = self._make_row(place)
        return row

    def _make_row(self, place: int) -> Row:
        words = torch.zeros(self._num_words, dtype=torch.int32)
        self._guide_to(place).write_mask_into(words.data_ptr(), words.numel(), words.element_size())
        bits = words.numpy().tobytes()
        if bits not in self._rows_by_bits:
            if (len(self._rows_by_bits) + 1) * self.vocab.size > MAX_ROWS_BYTES:
                self._rows.clear()
                self._rows_by_bits.clear()
            closing = self.vocab.closing
            is_complete = bool(bits[closing // 8] >> closing % 8 & 1)
            self._rows_by_bits[bits] = self._unpack(words, is_complete=is_complete)
        return self._rows_by_bits[bits]

    def _guide_to(self, place: int) -> Guide:
        path = []
        while place != self.first:
            place, token = self._reached_by[place]
            path.append(token)
        guide = Guide(self._index, max_rollback=1)
        for token in (self.vocab.opening, *reversed(path)):
            guide.advance(token, return_tokens=False)
        return guide

    def _unpack(self, words: torch.Tensor, *, is_complete: bool) -> Row:
        """The row of a mask of one bit an id, [ceil(ids / 32)] int32."""
        bits = words.view(torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
        return row_of(bits.flatten()[: self.vocab.size].bool(), self.vocab, is_complete=is_complete)

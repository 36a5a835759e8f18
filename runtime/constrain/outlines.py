r"""Regexes and choices on outlines-core, compiled inside a fence.

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
from .estimate import BYTES_PER_EDGE, Budget, estimate
from .pattern import parse
from .vocab import Vocab

MAX_ROWS_BYTES = 64 << 20


def compile_regex(pattern: str, vocab: Vocab, budget: Budget) -> OutlinesConstraint:
    """Compile `pattern` for `vocab`; takes as long as `budget` allows.

    Raises:
        ConstraintError: the pattern is not of the syntax, is over budget, or cannot be spelled.
    """
    parsed = parse(pattern)
    size = estimate(parsed.tree, vocab, budget)
    try:
        index = Index(parsed.fenced, vocab.fenced)
    except ValueError as error:
        if "incompatible" not in str(error):
            raise ConstraintError(f"the pattern cannot be compiled: {error}") from error
        raise ConstraintError(
            "this vocabulary cannot spell the pattern: somewhere in it no token leads on to a complete text."
        ) from error
    start = index.get_next_state(index.get_initial_state(), vocab.opening)
    assert start is not None, parsed.fenced
    return OutlinesConstraint(index, start, vocab, size.edges * BYTES_PER_EDGE)


@dataclass(frozen=True, slots=True)
class Row:
    """What is allowed in one state of the automaton."""

    mask: torch.Tensor  # [vocab_size] bool, end tokens included; shared and read-only
    is_complete: bool
    is_finished: bool


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
        self._start = start
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

    def start(self) -> OutlinesState:
        return OutlinesState(self, self._start)

    def next(self, place: int, token: int) -> int | None:
        """The place after `token`, or None where it is not allowed."""
        following: int | None = self._index.get_next_state(place, token)
        if following is not None and following != self._start:
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
            if (len(self._rows_by_bits) + 1) * self.vocab.size > MAX_ROWS_BYTES:  # rows are cheap to make again
                self._rows.clear()
                self._rows_by_bits.clear()
            closing = self.vocab.closing
            is_complete = bool(bits[closing // 8] >> closing % 8 & 1)
            self._rows_by_bits[bits] = self._unpack(words, is_complete=is_complete)
        return self._rows_by_bits[bits]

    def _guide_to(self, place: int) -> Guide:
        path = []
        while place != self._start:
            place, token = self._reached_by[place]
            path.append(token)
        guide = Guide(self._index, max_rollback=1)
        for token in (self.vocab.opening, *reversed(path)):
            guide.advance(token, return_tokens=False)
        return guide

    def _unpack(self, words: torch.Tensor, *, is_complete: bool) -> Row:
        """The row of a mask of one bit an id, [ceil(ids / 32)] int32."""
        bits = words.view(torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
        mask = bits.flatten()[: self.vocab.size].bool()
        is_finished = is_complete and not mask.any()
        if is_complete:
            mask[list(self.vocab.eos_ids)] = True
        return Row(mask, is_complete, is_finished)


class OutlinesState:
    """One sequence's place; after an end token it stays at the end."""

    __slots__ = ("_constraint", "_ended", "_place")

    def __init__(self, constraint: OutlinesConstraint, place: int, *, ended: bool = False) -> None:
        self._constraint = constraint
        self._place = place
        self._ended = ended

    @property
    def _row(self) -> Row:
        return self._constraint.ended if self._ended else self._constraint.row(self._place)

    @property
    def is_complete(self) -> bool:
        return self._row.is_complete

    @property
    def is_finished(self) -> bool:
        return self._row.is_finished

    def mask(self) -> torch.Tensor:
        return self._row.mask

    def advance(self, token: int) -> bool:
        if token in self._constraint.vocab.eos_ids:
            self._ended = self._ended or self.is_complete
            return self._ended
        if self._ended or not 0 <= token < self._constraint.vocab.size:
            return False
        following = self._constraint.next(self._place, token)
        if following is None:
            return False
        self._place = following
        return True

    def fork(self) -> OutlinesState:
        return OutlinesState(self._constraint, self._place, ended=self._ended)

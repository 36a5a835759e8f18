"""JSON Schema, grammars and large regexes on llguidance.

Its lexer and parser build what they need as the text grows, so compiling takes a millisecond, and a mask tens of
microseconds. Two things are kept from it: end tokens, which are decided here, and tokens that spell nothing, which
no text needs. It never raises: a matcher that went wrong stays wrong, and says so when it is asked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from ..errors import ConstraintError
from ..messages import shortened
from .automaton import Forced
from .closing import closing_by_preference
from .schema import Checked
from .vocab import Vocab

LONGEST_TOKEN = 255
"""The library's tree of tokens is no deeper; longer ones are never allowed, as shorter ones spell the same."""

OPENINGS = (b'"', b'{"', b"{")
"""What the values of JSON begin with most often, where they may: texts and objects. The first that can follow is it."""

BEFORE_VALUES = (b" ", b"{", b"[")

BYTES_PER_CONSTRAINT = 256 << 10
"""About what one holds beside its text; measured, it is less."""


class _Tokens:
    """The vocabulary as the library asks for it. The id past the last is an end token that nobody ever sees."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self.tokens = [*(data if len(data) <= LONGEST_TOKEN else b"" for data in vocab.token_bytes), b""]
        self.eos_token_id = vocab.size
        self.special_token_ids = [vocab.size]

    def __call__(self, text: str) -> list[int]:
        return self._vocab.spell(text)


def tokenizer_of(vocab: Vocab) -> LLTokenizer:
    """The library's form of `vocab`, which all its constraints share; a tenth of a second to make."""
    tokens: Any = _Tokens(vocab)  # the library names a class of its own, and reads these attributes alone
    return LLTokenizer(tokens, n_vocab=vocab.size + 1, eos_token=vocab.size)


class GuidanceConstraint:
    """A matcher at its start, which is copied for each sequence: a copy is microseconds, and shares what was built."""

    def __init__(self, matcher: LLMatcher, size: int, vocab: Vocab, checked: Checked | None = None) -> None:
        """
        Args:
            matcher: of `vocab`, at its start.
            size: characters of what it was made from.
            checked: how a text is judged whose schema the grammar does not hold in full; None: it does.

        Raises:
            ConstraintError: the library refuses the grammar, or no token can begin a text.
        """
        self.vocab = vocab
        self._checked = checked
        self.warnings: tuple[str, ...] = checked.warnings if checked else ()
        self._nbytes = BYTES_PER_CONSTRAINT + 16 * size
        self._matcher = matcher
        if matcher.is_error():
            raise ConstraintError(_reason(matcher.get_error()))
        if not bool(self.start().mask().any()):
            raise ConstraintError("this vocabulary cannot spell the constraint: no token can begin a text of it.")

    @property
    def exact(self) -> bool:
        return self._checked is None or self._checked.exact

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def start(self) -> GuidanceState:
        return GuidanceState(self, self._matcher.deep_copy())

    def violation(self, text: str) -> str:
        return "" if self.exact or self._checked is None else self._checked.violation(text)


class GuidanceState:
    """One sequence's matcher; after an end token it stays at the end."""

    __slots__ = ("_constraint", "_ended", "_mask", "_matcher")

    def __init__(self, constraint: GuidanceConstraint, matcher: LLMatcher, *, ended: bool = False) -> None:
        self._constraint = constraint
        self._matcher = matcher
        self._ended = ended
        self._mask: torch.Tensor | None = None  # of this place, once it was asked for

    @property
    def is_complete(self) -> bool:
        return self._ended or self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self) -> torch.Tensor:
        if self._mask is None:
            self._mask = self._make_mask()
        return self._mask

    def _make_mask(self) -> torch.Tensor:
        vocab = self._constraint.vocab
        if self.is_finished:
            mask = np.zeros(vocab.size, dtype=bool)
        else:
            words = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                reason = _reason(self._matcher.get_error())
                raise ConstraintError(f"the constraint became too large to follow: {reason}")
            bits = np.unpackbits(np.frombuffer(words, dtype=np.uint8), count=vocab.size, bitorder="little")
            mask = bits.view(bool)
        mask[vocab.spelling_nothing] = False
        if self.is_complete:
            mask[list(vocab.eos_ids)] = True
        return torch.from_numpy(mask)

    def advance(self, token: int) -> bool:
        vocab = self._constraint.vocab
        if token in vocab.eos_ids:
            self._ended = self._ended or self.is_complete
            self._mask = None
            return self._ended
        if self._ended or not 0 <= token < vocab.size or not vocab.token_bytes[token]:
            return False
        if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token]):
            return False
        self._mask = None
        return True

    def forced_tokens(self) -> Forced:
        """What must follow: the text in the model's own tokens, except where the next piece may change the last ones.

        Of a text that nothing can be instead of, all other ways to spell it are left out: the model has hardly ever
        seen them. Those last tokens are the draft.
        """
        if self.is_finished or self._matcher.is_accepting():
            return Forced()
        vocab = self._constraint.vocab
        data = self._matcher.compute_ff_bytes()
        if not data:
            return Forced()
        certain = tuple(self._matcher.compute_ff_tokens())
        spelled = vocab.spelled(certain)
        if not data.startswith(spelled):
            return Forced()
        rest = data[len(spelled) :]
        return Forced(certain, self._guess(certain, rest) if rest else ())

    def _guess(self, certain: tuple[int, ...], rest: bytes) -> tuple[int, ...]:
        """Tokens for the text `rest`, which must follow `certain`, and for what is likely to open behind it.

        A token often holds both: ` {"` where ` {` is sure and only the model knows whether the object stays empty.
        """
        spell = self._constraint.vocab.spell_bytes
        for opening in OPENINGS if rest.endswith(BEFORE_VALUES) else ():
            guess = spell(rest + opening)
            if self._matcher.validate_tokens([*certain, *guess]) == len(certain) + len(guess):
                return tuple(guess)
        return tuple(spell(rest))

    def closing(self, most: int) -> tuple[int, ...] | None:
        return closing_by_preference(self, self._constraint.vocab, most)

    def fork(self) -> GuidanceState:
        return GuidanceState(self._constraint, self._matcher.deep_copy(), ended=self._ended)


def _reason(error: str) -> str:
    """What the library says, without its traceback."""
    said = error.split("<backtrace>")[0].strip()
    if said.startswith("panic"):
        return "the grammar cannot be read; it may name a control token, and those are never part of a text."
    return shortened(" ".join(said.split()), 400)

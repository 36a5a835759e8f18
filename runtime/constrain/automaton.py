"""One sequence's walk through an automaton over tokens, whatever it was made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .closing import MOST_BYTES_A_TOKEN, in_few_tokens
from .vocab import Vocab

MAX_ROWS_BYTES = 64 << 20
"""An automaton forgets the rows it has made when they hold more than this: they are cheap to make again."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is allowed in one place of the automaton."""

    mask: torch.Tensor  # [vocab_size] bool, end tokens included; shared and read-only
    is_complete: bool
    is_finished: bool
    longest: int | None = None  # where all that is allowed begins with one byte: the token that spells the most
    is_only: bool = False       # and nothing else is allowed


@dataclass(frozen=True, slots=True)
class Forced:
    """What comes next in a constraint, whatever the model says.

    certain: tokens in whose places nothing else is allowed, or only other spellings of the same text that the model's
        own tokenizer would not choose.
    draft: where the text after them can go on in one way only, a guess at its tokens; they are to be sampled all the
        same, so that a wrong guess changes nothing.
    """

    certain: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()


class Automaton(Protocol):
    """Places, the first of which is `first`, and the tokens that lead from one to the next."""

    vocab: Vocab
    first: int
    ended: Row  # what is allowed after an end token

    def next(self, place: int, token: int) -> int | None:
        """The place after `token`, or None where it is not allowed."""
        ...

    def row(self, place: int) -> Row:
        """What is allowed at `place`, which is `first` or which `next` has returned before."""
        ...


def row_of(mask: torch.Tensor, vocab: Vocab, *, is_complete: bool) -> Row:
    """The row that allows the tokens of `mask`, which it takes over, and the end if `is_complete`."""
    count = int(mask.sum())
    if is_complete:
        mask[list(vocab.eos_ids)] = True
    elif 0 < count <= MOST_SPELLINGS:
        spelled = {token: vocab.token_bytes[token] for token in mask.nonzero()[:, 0].tolist()}
        if len({data[:1] for data in spelled.values()}) == 1:
            return Row(mask, False, False, max(spelled, key=lambda token: len(spelled[token])), count == 1)
    return Row(mask, is_complete, is_complete and count == 0)


MOST_SPELLINGS = 64
"""Where more tokens are allowed than this, they are not looked at for what they have in common."""

MOST_AHEAD = 32
"""So many tokens are looked ahead at most."""


class Walk:
    """One sequence's place; after an end token it stays at the end."""

    __slots__ = ("_automaton", "_ended", "_place")

    def __init__(self, automaton: Automaton, place: int, *, ended: bool = False) -> None:
        self._automaton = automaton
        self._place = place
        self._ended = ended

    @property
    def _row(self) -> Row:
        return self._automaton.ended if self._ended else self._automaton.row(self._place)

    @property
    def is_complete(self) -> bool:
        return self._row.is_complete

    @property
    def is_finished(self) -> bool:
        return self._row.is_finished

    def mask(self) -> torch.Tensor:
        return self._row.mask

    def advance(self, token: int) -> bool:
        if token in self._automaton.vocab.eos_ids:
            self._ended = self._ended or self.is_complete
            return self._ended
        if self._ended or not 0 <= token < self._automaton.vocab.size:
            return False
        following = self._automaton.next(self._place, token)
        if following is None:
            return False
        self._place = following
        return True

    def forced_tokens(self) -> Forced:
        certain: list[int] = []
        draft: list[int] = []
        place: int | None = self._place
        while not self._ended and place is not None and len(certain) + len(draft) < MOST_AHEAD:
            row = self._automaton.row(place)
            if row.longest is None:
                break
            (draft if draft or not row.is_only else certain).append(row.longest)
            place = self._automaton.next(place, row.longest)
        return Forced(tuple(certain), tuple(draft))

    def closing(self, most: int) -> tuple[int, ...] | None:
        """The way to the nearest place where the text is complete; nearest in bytes."""
        way = self._shortest(most * MOST_BYTES_A_TOKEN)
        return None if way is None else in_few_tokens(self, way, self._automaton.vocab, most)

    def _shortest(self, most: int) -> tuple[int, ...] | None:
        """Level by level from here, in tokens of one byte."""
        came: dict[int, tuple[int, int]] = {}
        level, seen = [self._place], {self._place}
        for _ in range(most + 1):
            following = []
            for place in level:
                row = self._automaton.row(place)
                if self._ended or row.is_complete:
                    return self._path(came, place)
                for token in self._automaton.vocab.single_bytes.values():
                    then = self._automaton.next(place, token) if row.mask[token] else None
                    if then is not None and then not in seen:
                        seen.add(then)
                        came[then] = (place, token)
                        following.append(then)
            level = following
        return None

    def _path(self, came: dict[int, tuple[int, int]], place: int) -> tuple[int, ...]:
        path = []
        while place != self._place:
            place, token = came[place]
            path.append(token)
        return tuple(reversed(path))

    def fork(self) -> Walk:
        return Walk(self._automaton, self._place, ended=self._ended)

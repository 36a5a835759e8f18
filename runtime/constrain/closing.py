"""A short way from a place in a constraint to a complete text: not always the shortest there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .vocab import Vocab

if TYPE_CHECKING:
    from . import State

PREFERRED = b"\"}])>'\n@:/.,;0123456789 aeT-"
"""Bytes that lead to an end in most texts, the best first."""

MOST_BYTES_A_TOKEN = 4
"""A way is looked for in so many single bytes for each token there is room for."""

MOST_TRIES = 4
"""So many ways are followed from one place."""

DEPTHS = (1, 2, 4, 8, 16, 32, 64)
"""Ways with so many choices at most are looked for, one after the other: short ones are found first."""

MOST_PLACES = 128
"""So many places are looked at in each of these rounds."""


def closing_by_preference(state: State, vocab: Vocab, most: int) -> tuple[int, ...] | None:
    """At most `most` tokens that make the text complete, by trying likely bytes first; None if none were found.

    What is forced is followed as it is. Elsewhere a text is closed before it is continued: the quote, then the brace.
    """
    for depth in DEPTHS:
        search = _Search(vocab)
        way = search.from_(state.fork(), most * MOST_BYTES_A_TOKEN, depth)
        if way is not None and (found := in_few_tokens(state, way, vocab, most)) is not None:
            return found
        if search.is_exhausted:
            return None
    return None


class _Search:
    """One round. It is exhausted if it ended for lack of ways, not of depth or of places."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._places = MOST_PLACES
        self.is_exhausted = True

    def from_(self, here: State, room: int, depth: int) -> tuple[int, ...] | None:
        """The way from `here`, which is used up: at most `room` tokens, at most `depth` of them chosen."""
        path: list[int] = []
        while not here.is_complete and (forced := _forced(here)):
            if len(forced) > room or not all(here.advance(token) for token in forced):
                return None
            path += forced
            room -= len(forced)
        if here.is_complete:
            return tuple(path)
        self._places -= 1
        if room == 0:
            return None
        if depth == 0 or self._places < 0:
            self.is_exhausted = False
            return None
        for token in _likely(here, self._vocab):
            following = here.fork()
            if following.advance(token) and (rest := self.from_(following, room - 1, depth - 1)) is not None:
                return (*path, token, *rest)
        return None


def _forced(state: State) -> tuple[int, ...]:
    ahead = state.forced_tokens()
    return ahead.certain or ahead.draft


def in_few_tokens(state: State, way: tuple[int, ...], vocab: Vocab, most: int) -> tuple[int, ...] | None:
    """The text of `way` in the model's own tokens, if the constraint takes them; None if these are more than `most`."""
    spelled, along = vocab.spell_bytes(vocab.spelled(way)), state.fork()
    if len(spelled) < len(way) and all(along.advance(token) for token in spelled) and along.is_complete:
        way = tuple(spelled)
    return way if len(way) <= most else None


def _likely(state: State, vocab: Vocab) -> list[int]:
    """Single-byte tokens that are allowed here, the most promising first."""
    mask = state.mask()
    single = vocab.single_bytes
    tokens = [single[byte] for byte in PREFERRED if byte in single]
    found = [token for token in tokens if mask[token]][:MOST_TRIES]
    return found or [token for token in single.values() if mask[token]][:MOST_TRIES]

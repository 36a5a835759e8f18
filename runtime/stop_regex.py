"""A pattern that is looked for in a text that arrives character by character.

The pattern is a graph of its places, each of which takes one character of a set (Glushkov, 1961). A text
that may become a match stands in one of them; of texts in the same place only the one that began first
counts. So a character costs at most a look at every step of the graph, whose number is limited.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from .constrain import pattern as syntax
from .constrain.charset import Charset
from .errors import ConstraintError
from .messages import shortened

MAX_STEPS = 20_000
"""Steps from place to place that a pattern may have."""


class _Part(NamedTuple):
    """What a part of the pattern can begin and end with, and whether it can be nothing."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    empty: bool


class PatternWatch:
    """One pattern. A state is a tuple of (place, where the text in it began)."""

    def __init__(self, pattern: str) -> None:
        """
        Raises:
            ConstraintError: the pattern cannot be read, is too large, or matches the empty text.
        """
        self.pattern = pattern
        self.start: tuple[tuple[int, int], ...] = ()
        self._sets: list[Charset] = []  # which characters a place takes
        self._next: list[dict[int, None]] = []  # the places after a place, in order
        self._steps = 0
        whole = self._add(syntax.parse(pattern).tree)
        if whole.empty:
            said = f"{shortened(pattern)!r} matches the empty text"
            raise ConstraintError(f"stop_regex: {said}, which is found in every text.")
        self._first, self._last = whole.first, frozenset(whole.last)
        self._takes = lru_cache(maxsize=1024)(self._taking)

    def step(
        self, state: tuple[tuple[int, int], ...], character: str, end: int
    ) -> tuple[tuple[tuple[int, int], ...], int, tuple[int, str] | None]:
        """See `stops.Watch`."""
        takes = self._takes(character)
        starts: dict[int, int] = {}
        for place, began in state:  # in the order in which they began: the first to come to a place stays
            for following in self._next[place]:
                if following in takes:
                    starts.setdefault(following, began)
        for following in self._first:
            if following in takes:
                starts.setdefault(following, end - 1)
        matched = min((began for place, began in starts.items() if place in self._last), default=None)
        found = None if matched is None else (matched, self.pattern)
        alive = sorted(
            ((place, began) for place, began in starts.items() if self._next[place]), key=lambda item: item[1]
        )
        return tuple(alive), alive[0][1] if alive else end, found

    def _taking(self, character: str) -> frozenset[int]:
        code = ord(character)
        return frozenset(
            place for place, chars in enumerate(self._sets) if any(low <= code <= high for low, high in chars)
        )

    def _add(self, node: syntax.Node) -> _Part:
        match node:
            case syntax.OneOf(chars):
                self._sets.append(chars)
                self._next.append({})
                self._count(1)
                place = (len(self._sets) - 1,)
                return _Part(place, place, False)
            case syntax.Sequence(items):
                whole = _Part((), (), True)
                for item in items:
                    whole = self._then(whole, self._add(item))
                return whole
            case syntax.Either(branches):
                parts = [self._add(branch) for branch in branches]
                return _Part(
                    tuple(place for part in parts for place in part.first),
                    tuple(place for part in parts for place in part.last),
                    any(part.empty for part in parts),
                )
            case syntax.Repeat(item, least, most):
                return self._repeat(item, least, most)

    def _repeat(self, item: syntax.Node, least: int, most: int | None) -> _Part:
        whole = _Part((), (), True)
        for number in range(max(least, 1) if most is None else most):
            before = len(self._sets)
            part = self._add(item)
            if len(self._sets) == before:  # it takes no character, however often
                break
            if number >= least:
                part = part._replace(empty=True)
            whole = self._then(whole, part)
            if most is None and number + 1 == max(least, 1):
                self._connect(part.last, part.first)
        return whole

    def _then(self, left: _Part, right: _Part) -> _Part:
        self._connect(left.last, right.first)
        return _Part(
            left.first + right.first if left.empty else left.first,
            left.last + right.last if right.empty else right.last,
            left.empty and right.empty,
        )

    def _connect(self, before: Iterable[int], after: tuple[int, ...]) -> None:
        for place in before:
            self._count(len(after))
            self._next[place].update(dict.fromkeys(after))

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise ConstraintError(
                f"stop_regex: {shortened(self.pattern)!r} has more than {MAX_STEPS:,} steps from character to "
                "character. Repeat less, or look for a shorter text."
            )

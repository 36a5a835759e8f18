"""Where a text that arrives in pieces has to stop, and what of it may be shown before that is certain.

Stops are strings and patterns. Every character is looked at once: strings stand together in one automaton
(Aho and Corasick, 1975), a pattern is in several of its places at a time. So what a token costs depends
on neither the text before it nor, for strings, on how many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from .errors import RequestError
from .stop_regex import PatternWatch


class Seen(NamedTuple):
    """After a character: the state to go on from, where the first text begins that may still become a stop
    (`growing`), and where the first begins that has just become one, and which."""

    state: Any
    growing: int
    found: tuple[int, str] | None


class Watch(Protocol):
    """Looks for stops of one kind. Immutable, and shared: where a text stands in it is a state, immutable too."""

    @property
    def start(self) -> Any: ...
    def step(self, state: Any, character: str, end: int) -> Seen:
        """Look at the character before position `end`."""
        ...


class StringWatch:
    """All stop strings at once."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.start = 0
        self._children: list[dict[str, int]] = [{}]  # of each node, a beginning of a stop
        self._stop: list[str | None] = [None]  # the longest stop that its text ends with
        self._depth = depth = [0]
        for stop in stops:
            node = 0
            for character in stop:
                if character not in self._children[node]:
                    self._children[node][character] = len(depth)
                    self._children.append({})
                    self._stop.append(None)
                    depth.append(depth[node] + 1)
                node = self._children[node][character]
            self._stop[node] = stop
        self._fallback = [0] * len(depth)  # the longest other node that its text ends with
        self._link()

    def _link(self) -> None:
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            fallback = self._fallback[node]
            self._stop[node] = self._stop[node] or self._stop[fallback]
            for character, child in self._children[node].items():
                self._fallback[child] = self._next(fallback, character)
                queue.append(child)

    def _next(self, node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(character, 0)

    def step(self, state: int, character: str, end: int) -> Seen:
        node = self._next(state, character)
        stop = self._stop[node]
        return Seen(node, end - self._depth[node], None if stop is None else (end - len(stop), stop))


class StopMatcher:
    """Finds the first stop in a text that arrives in pieces, however it is cut.

    First is the match that starts earliest; of two that start together, the shorter. A piece of text
    is held back exactly as long as it may be the start of a match. `matched` is the stop that was
    found, a string or a pattern, and None until then.
    """

    def __init__(self, stops: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
        """
        Args:
            patterns: in the syntax of `constrain.pattern`.

        Raises:
            RequestError: a stop is empty, or `stops` is one string instead of several.
            ConstraintError: a pattern cannot be read, is too large, or matches the empty text.
        """
        if isinstance(stops, str):
            raise RequestError(f"stop must be a sequence of strings here, got the string {stops!r}.")
        if "" in stops:
            raise RequestError(f"stop: an empty string is found in every text; leave it out of {list(stops)!r}.")
        self._watches = _watches(tuple(stops), tuple(patterns))
        self._states = [watch.start for watch in self._watches]
        self._held: deque[str] = deque()  # characters
        self._shown = 0
        self._found: tuple[int, str] | None = None  # a stop that is complete, and where it starts
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop, now that `text` follows."""
        if not self._watches:
            return text
        certain = []
        for character in text:
            if self.matched is not None:
                break
            self._held.append(character)
            certain.append(self._release(self._look(character)))
        return "".join(certain)

    def flush(self) -> str:
        """The text held back, now that nothing follows: up to the first stop, if it holds one."""
        return self._release(self._shown + len(self._held))

    def copy(self) -> StopMatcher:
        """One that goes on from here on its own."""
        other = StopMatcher()
        other._watches, other._states = self._watches, [*self._states]
        other._held, other._shown = self._held.copy(), self._shown
        other._found, other.matched = self._found, self.matched
        return other

    def _look(self, character: str) -> int:
        """Where the first text begins that may still become a stop, now that `character` follows."""
        end = growing = self._shown + len(self._held)
        for number, watch in enumerate(self._watches):
            self._states[number], start, found = watch.step(self._states[number], character, end)
            growing = min(growing, start)
            if found is not None and (self._found is None or found[0] < self._found[0]):
                self._found = found
        return growing

    def _release(self, growing: int) -> str:
        """The text before `growing`, or before the stop that was found: that waits for what began before it."""
        until = growing
        if self._found is not None and self._found[0] <= growing:
            until, self.matched = self._found
            self._found = None
        certain = "".join(self._held.popleft() for _ in range(until - self._shown))
        self._shown = until
        if self.matched is not None:
            self._held.clear()
        return certain


@lru_cache(maxsize=256)
def _watches(stops: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[Watch, ...]:
    strings = (StringWatch(stops),) if stops else ()
    return (*strings, *map(PatternWatch, patterns))

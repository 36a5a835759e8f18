"""Texts that were encoded before, and their tokens: a constant of a program is encoded once, not once a run."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock


class Memo:
    """Keeps what was made of a text, up to so many characters in all; what was not asked for the longest goes first.

    Any thread may use it.
    """

    def __init__(self, max_characters: int = 1 << 22) -> None:
        self._max = max_characters
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, tuple[int, array[int]]] = OrderedDict()
        self._characters = 0

    def tokens(self, text: str, how: Hashable, make: Callable[[], Sequence[int]]) -> list[int]:
        """What `make` gives for `text` encoded in this way, now or before."""
        key = text, how
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][1].tolist()
        made = make()  # without the lock: two threads may both make it, and then it is the same
        with self._lock:
            if key not in self._kept and len(text) <= self._max:
                self._kept[key] = len(text), array("i", made)
                self._characters += len(text)
                while self._characters > self._max:
                    self._characters -= self._kept.popitem(last=False)[1][0]
        return list(made)

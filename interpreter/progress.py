"""How far a batch is, on one line of the terminal."""

from __future__ import annotations

import sys
from threading import Lock


class Progress:
    """Counts up to `total`, and shows it on standard error where that is asked for."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._done = 0
        self._lock = Lock()

    def advance(self) -> None:
        """One more is done."""
        with self._lock:
            self._done += 1
            if self._shown:
                end = "\n" if self._done == self._total else ""
                print(f"\rprograms: {self._done} of {self._total}", end=end, file=sys.stderr, flush=True)

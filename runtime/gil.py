"""The interpreter's lock, while a step runs beside Python code of the user's.

Each of torch's operators gives the lock up and takes it again. A thread that does nothing but run Python code keeps it
for the interpreter's switch interval each time, 5 ms unless somebody set it, and a step takes it hundreds of times.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType

INTERVAL_S = 5e-5
"""Long enough that threads that share the lock get on with their work, short enough for a step to get on with its."""


class ShortTurns:
    """A context in which threads keep the interpreter's lock for `INTERVAL_S` at most, if others want it.

    The interval is the process's: it is what it was when nobody is in the context any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, INTERVAL_S))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                sys.setswitchinterval(self._before)


SHORT_TURNS = ShortTurns()

"""What runs on which thread, so that an interrupted batch can stop all that it has set off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, Thread, current_thread
from weakref import WeakSet

from .errors import Cancelled

Stop = Callable[[], None]


class Running:
    """For each thread the runs and batches inside it, outermost first. A stopped thread can begin no more."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stops: dict[Thread, list[Stop]] = {}
        self._stopped: WeakSet[Thread] = WeakSet()

    @contextmanager
    def here(self, stop: Stop) -> Iterator[None]:
        """While this lasts, stopping this thread calls `stop`.

        Raises:
            Cancelled: the thread is stopped.
        """
        thread = current_thread()
        with self._lock:
            if thread in self._stopped:
                raise Cancelled("the batch around this run was interrupted")
            self._stops.setdefault(thread, []).append(stop)
        try:
            yield
        finally:
            with self._lock:
                self._stops[thread].remove(stop)
                if not self._stops[thread]:
                    del self._stops[thread]

    def stop(self, threads: Sequence[Thread]) -> None:
        """Stop all that runs on these threads, and let nothing new begin there."""
        with self._lock:
            stops = [stop for thread in threads for stop in self._stops.get(thread, [])]
            self._stopped.update(threads)
        for stop in stops:
            stop()


RUNNING = Running()

"""Running many programs on a bounded number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock, Semaphore, Thread
from typing import Generic, TypeVar

from .progress import Progress
from .running import Running

T = TypeVar("T")

AUTO_THREADS = 64
"""Threads of all batches together that do not say how many they want."""

GRACE_S = 0.5
"""How long an interrupted batch waits for its threads, which were all told to stop."""


class Batch(Generic[T]):
    """Runs every job once. The calling thread works too, so a batch inside a batch always gets on."""

    def __init__(self, jobs: Sequence[Callable[[], T]], running: Running, progress: Progress) -> None:
        self._jobs = jobs
        self._running = running
        self._progress = progress
        self._lock = Lock()
        self._next = 0
        self._results: dict[int, T | Exception] = {}
        self._stopped = False
        self._threads: list[Thread] = []
        self._fatal: BaseException | None = None

    def run(self, helpers: int) -> list[T | Exception]:
        """The results in the order of the jobs; what a job raised stands in its place."""
        try:
            with self._running.here(self.stop):
                for number in range(helpers):
                    thread = Thread(target=self._help, name=f"branchwise-batch-{number}", daemon=True)
                    self._threads.append(thread)
                    thread.start()
                self._work()
                for thread in self._threads:
                    thread.join()
        except BaseException:
            self.stop()
            self._join_for(GRACE_S)
            raise
        if self._fatal is not None:
            raise self._fatal
        return [self._results[index] for index in range(len(self._jobs))]

    def stop(self) -> None:
        """Begin no more jobs, and stop those that run on the helping threads."""
        with self._lock:
            self._stopped = True
        self._running.stop(self._threads)

    def _help(self) -> None:
        try:
            self._work()
        except BaseException as error:  # SystemExit and the like: the calling thread raises it
            self._fatal = error
            with self._lock:
                self._stopped = True

    def _work(self) -> None:
        while (index := self._take()) is not None:
            try:
                self._results[index] = self._jobs[index]()
            except Exception as error:
                self._results[index] = error
            self._progress.advance()

    def _take(self) -> int | None:
        with self._lock:
            if self._stopped or self._next == len(self._jobs):
                return None
            self._next += 1
            return self._next - 1

    def _join_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))


class Helpers:
    """How many helping threads a batch may have."""

    def __init__(self) -> None:
        self._spare = Semaphore(AUTO_THREADS - 1)

    def take(self, jobs: int, threads: int | None) -> int:
        """As many as were asked for, else as many as other batches leave: perhaps none. `give_back` them."""
        if threads is not None:
            return min(jobs, threads) - 1
        taken = 0
        while taken < jobs - 1 and self._spare.acquire(blocking=False):
            taken += 1
        return taken

    def give_back(self, count: int, threads: int | None) -> None:
        if threads is None and count > 0:
            self._spare.release(count)

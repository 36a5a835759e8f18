"""Running many jobs, several at a time, and giving out their results in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock, Semaphore, Thread
from typing import Any, Generic, TypeVar

from .changes import Changes
from .errors import Cancelled
from .progress import Progress
from .reaper import REAPER
from .running import Running

T = TypeVar("T")

AUTO_THREADS = 64
"""Threads of all batches together that do not say how many they want."""

GRACE_S = 0.5
"""How long an interrupted batch waits for its threads, which were all told to stop."""


class Batch(Generic[T]):
    """Numbered jobs: which are taken, and what came of them. Each is taken once, and each result given out once."""

    def __init__(self, count: int, running: Running, progress: Progress) -> None:
        self.count = count
        self.running = running
        self._progress = progress
        self._lock = Lock()
        self._changed = Changes(self._lock)
        self._next = 0
        self._results: dict[int, T | Exception] = {}
        self._stopped = False
        self._threads: list[Thread] = []
        self._fatal: BaseException | None = None

    def take(self) -> int | None:
        """The number of a job to do; None when there is none left."""
        with self._lock:
            if self._stopped or self._next == self.count:
                return None
            self._next += 1
            return self._next - 1

    def settle(self, index: int, result: T | Exception) -> None:
        """What came of a job that was taken."""
        with self._lock:
            self._results[index] = result
            self._progress.update(1)
            self._changed.happen()

    def wait_for(self, index: int) -> T | Exception:
        """The result of a job.

        Raises:
            Cancelled: the batch was stopped before anybody took it.
            What ended a thread of the batch, if that is no `Exception`.
        """
        while True:
            with self._lock:
                if index in self._results:
                    return self._results.pop(index)
                if self._fatal is not None:
                    raise self._fatal
                if self._stopped and index >= self._next:
                    raise Cancelled("the batch was stopped")
                change = self._changed.next()
            change.block()

    def start(self, crew: Crew[T]) -> None:
        """Let the helping threads begin."""
        for number in range(crew.helpers):
            thread = Thread(target=self._help, args=(crew.work,), name=f"branchwise-batch-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Begin no more jobs, and stop those that run on the helping threads. Does not wait."""
        with self._lock:
            self._stopped = True
            self._changed.happen()
        self.running.stop(self._threads)

    def end(self, wait_s: float | None = None) -> None:
        """Wait for the helping threads, which have nothing left to do, or were told to stop."""
        until = None if wait_s is None else time.monotonic() + wait_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if until is None else max(0.0, until - time.monotonic()))
        with self._lock:
            self._progress.close()

    def _help(self, work: Callable[[Batch[T]], None]) -> None:
        try:
            work(self)
        except BaseException as error:  # SystemExit and the like: the calling thread raises it
            with self._lock:
                self._fatal, self._stopped = error, True
                self._changed.happen()


@dataclass(frozen=True, slots=True)
class Crew(Generic[T]):
    """Who does the jobs of a batch.

    `helpers` threads do `work`; the calling thread does one after the other by `here`, if it is to help.
    """

    work: Callable[[Batch[T]], None]  # takes jobs and settles them until there are none left
    helpers: int
    here: Callable[[Batch[T]], bool] | None = None
    dismiss: Callable[[], None] = lambda: None  # the batch is over; may be called twice

    def then(self, end: Callable[[], None]) -> Crew[T]:
        """The same, and `end` when the batch is over."""

        def both() -> None:
            self.dismiss()
            end()

        return replace(self, dismiss=both)


def on_threads(
    jobs: Sequence[Callable[[], T]], helpers: int, *, here: bool, dismiss: Callable[[], None] = lambda: None
) -> Crew[T]:
    """Each job on the thread that takes it."""

    def do_one(batch: Batch[T]) -> bool:
        if (index := batch.take()) is None:
            return False
        try:
            result: T | Exception = jobs[index]()
        except Exception as error:
            result = error
        batch.settle(index, result)
        return True

    def work(batch: Batch[T]) -> None:
        while do_one(batch):
            pass

    return Crew(work, helpers, do_one if here else None, dismiss)


def all_results(batch: Batch[T], crew: Crew[T]) -> list[T | Exception]:
    """The results of all jobs; what one raised stands in its place."""
    try:
        with batch.running.here(batch.stop):
            batch.start(crew)
            while crew.here is not None and crew.here(batch):
                pass
            results = [batch.wait_for(index) for index in range(batch.count)]
        batch.end()
    except BaseException:
        batch.stop()
        batch.end(GRACE_S)
        raise
    finally:
        crew.dismiss()
    return results


class InOrder(Iterator[T | Exception]):
    """The results one by one, each as soon as it and those before it are there.

    The jobs begin when it is first asked. When nobody holds it any more, what is left is stopped.
    """

    def __init__(self, batch: Batch[T], crew: Crew[T]) -> None:
        self._batch = batch
        self._crew = crew
        self._index = 0
        REAPER.watch(self, partial(_abandon, batch, crew, wait_s=0.0))

    def __next__(self) -> T | Exception:
        batch, here = self._batch, self._crew.here
        if self._index == batch.count:
            raise StopIteration
        try:
            with batch.running.here(batch.stop):
                if self._index == 0:
                    batch.start(self._crew)
                if here is not None:
                    here(batch)
                result = batch.wait_for(self._index)
        except BaseException:
            self.close()
            raise
        self._index += 1
        if self._index == batch.count:
            self.close()
        return result

    def close(self) -> None:
        """Stop what is left."""
        self._index = self._batch.count
        _abandon(self._batch, self._crew, wait_s=GRACE_S)


def _abandon(batch: Batch[Any], crew: Crew[Any], *, wait_s: float) -> None:
    batch.stop()
    batch.end(wait_s)
    crew.dismiss()


class Helpers:
    """How many helping threads a batch may have."""

    def __init__(self) -> None:
        self._spare = Semaphore(AUTO_THREADS - 1)

    def for_list(self, jobs: Sequence[Callable[[], T]], threads: int | None) -> Crew[T]:
        """The calling thread and helpers: as many as were asked for, else as many as other batches leave."""
        if threads is not None:
            return on_threads(jobs, min(len(jobs), threads) - 1, here=True)
        taken = self._take(len(jobs) - 1)
        return on_threads(jobs, taken, here=True, dismiss=self._free_again(taken))

    def for_iterator(self, jobs: Sequence[Callable[[], T]], threads: int | None) -> Crew[T]:
        """Helpers alone, so that no result waits for a job of the calling thread; that one if there are none."""
        if threads is not None:
            return on_threads(jobs, min(len(jobs), threads) if threads > 1 else 0, here=threads == 1)
        taken = self._take(len(jobs))
        return on_threads(jobs, taken, here=not taken, dismiss=self._free_again(taken))

    def _take(self, wanted: int) -> int:
        taken = 0
        while taken < wanted and self._spare.acquire(blocking=False):
            taken += 1
        return taken

    def _free_again(self, count: int) -> Callable[[], None]:
        """What gives them back, the first time it is called."""
        left = [count]

        def free() -> None:
            count, left[0] = left[0], 0
            if count:
                self._spare.release(count)

        return free


HELPERS = Helpers()

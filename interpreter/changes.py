"""Waiting for a change: a thread blocks, a coroutine awaits, and what waits is written once.

Something that has to wait is an iterator of steps. It gives a `Wait` where it cannot go on yet; a thread runs it by
`blocking`, an event loop by `Awaiting`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar

from branchwise.lang import CallError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

LOOK_S = 0.05
"""How often a thread that blocks inside of a task looks whether the task was cancelled."""


class Changes:
    """Counts the changes of something that a lock guards, and wakes who waits for the next one."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._count = 0
        self._watchers: dict[Callable[[], None], None] = {}

    def happen(self) -> None:
        """Something has changed. The lock is held."""
        self._count += 1
        for wake in list(self._watchers):
            wake()

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` at every change, until `unwatch`. The lock is held, then and now."""
        self._watchers[wake] = None

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Takes no lock: a coroutine that nobody holds is closed wherever that is found out."""
        self._watchers.pop(wake, None)

    def next(self) -> Wait:
        """What to wait for by who has seen how it is now. The lock is held."""
        return Wait(self, self._count)


@dataclass(frozen=True, slots=True)
class Wait:
    """Until something changes that had changed `seen` times; over at once if it has by now."""

    changes: Changes
    seen: int

    def block(self) -> None:
        """Wait on this thread.

        An interrupt can come between any two instructions of Python's own conditions, and leave their lock taken; it
        cannot in what is used here.
        """
        woken: SimpleQueue[None] = SimpleQueue()
        wake = partial(woken.put, None)
        with self.changes._lock:
            if self.changes._count != self.seen:
                return
            self.changes.watch(wake)
        try:
            get_in_task(woken)
        finally:
            self.changes.unwatch(wake)

    def __await__(self) -> Generator[Any, None, None]:
        return self._awaited().__await__()

    async def _awaited(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:  # on any thread, with the lock held
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(woken.set)

        with self.changes._lock:
            if self.changes._count != self.seen:
                return
            self.changes.watch(wake)
        try:
            await woken.wait()
        finally:
            self.changes.unwatch(wake)


def get_in_task(queue: SimpleQueue[T]) -> T:
    """What comes out of `queue`. A thread that runs an asyncio task looks now and then whether that was cancelled.

    `asyncio.run` makes a cancellation of the first Ctrl-C, and a thread that blocks would not hear of it.

    Raises:
        asyncio.CancelledError: the task was cancelled meanwhile.
    """
    task = _current_task()
    if task is None:
        return queue.get()
    while not getattr(task, "_must_cancel", False):  # of C and Python; `cancelling()` counts also what it was told of
        with suppress(Empty):
            return queue.get(timeout=LOOK_S)
    from asyncio import CancelledError

    raise CancelledError


def _current_task() -> asyncio.Task[Any] | None:
    """The task that this thread runs. asyncio is not loaded for that."""
    if "asyncio" not in sys.modules:
        return None
    import asyncio

    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None


def blocking(steps: Iterator[T | Wait]) -> Iterator[T]:
    """What `steps` gives; this thread waits where they do."""
    for step in steps:
        if isinstance(step, Wait):
            step.block()
        else:
            yield step


class Awaiting(Generic[T]):
    """What `steps` gives; this task waits where they do. May be left early: there is nothing to close."""

    def __init__(self, steps: Iterator[T | Wait]) -> None:
        self._steps = steps

    def __aiter__(self) -> Awaiting[T]:
        return self

    async def __anext__(self) -> T:
        for step in self._steps:
            if not isinstance(step, Wait):
                return step
            await step
        raise StopAsyncIteration

    if not TYPE_CHECKING:  # a checker shall see that it is not there

        def __iter__(self) -> Never:
            raise CallError("these pieces are awaited. Write async for, or text_iter(...) where a thread may wait.")

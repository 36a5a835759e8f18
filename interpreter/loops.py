"""Event loops for programs that are `async def`: the caller's, one of their own, or one for all that are streamed.

The only file that needs asyncio from the start, so it is loaded with the first such program.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, Generic, TypeVar

from .batch import Batch, Crew
from .changes import get_in_task
from .errors import Cancelled
from .running import Running
from .single import Streamed
from .state import State

T = TypeVar("T")

AUTO_TASKS = 256
"""Programs of a batch that run at a time if nobody says how many: tasks, which cost no thread."""

on_thread = asyncio.to_thread
"""`await` a function that waits."""


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T | Exception]:
    """The results of all, or what they raised; all are cancelled when who awaits this is."""
    results: list[T | Exception] = []
    for result in await asyncio.gather(*coroutines, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
        results.append(result)
    return results


def run_to_end(main: Callable[[], Coroutine[Any, Any, T]], running: Running) -> T:
    """Run `main` on an event loop of its own: on this thread, or if one runs here already, on another."""
    own = _OwnLoop(main, running)
    with running.here(own.stop):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return own.run()
        return own.run_elsewhere()


class _OwnLoop(Generic[T]):
    """One coroutine, on an event loop that is there for it."""

    def __init__(self, main: Callable[[], Coroutine[Any, Any, T]], running: Running) -> None:
        self._main = main
        self._running = running
        self._elsewhere: Thread | None = None
        self._task: asyncio.Task[Any] | None = None
        self._stopped = False

    def run(self) -> T:
        try:
            return asyncio.run(self._run())
        except asyncio.CancelledError:
            if not self._stopped:
                raise  # the program's own
            raise Cancelled("the batch around this run was interrupted") from None

    def run_elsewhere(self) -> T:
        done: Future[T] = Future()
        ended: SimpleQueue[object] = SimpleQueue()
        done.add_done_callback(ended.put)
        context = contextvars.copy_context()
        run = partial(_settle, done, partial(context.run, self.run))
        self._elsewhere = Thread(target=run, name="branchwise-loop", daemon=True)
        self._elsewhere.start()
        try:
            get_in_task(ended)
        except (KeyboardInterrupt, asyncio.CancelledError):
            self.stop()
            raise
        return done.result()

    def stop(self) -> None:
        """Cancel it, from any thread."""
        self._stopped = True
        if self._task is not None:
            with suppress(RuntimeError):  # the loop is closed: it has ended
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        if self._elsewhere is not None:
            self._running.stop([self._elsewhere])

    async def _run(self) -> T:
        self._task = asyncio.current_task()
        if self._stopped:
            raise asyncio.CancelledError
        return await self._main()


def as_tasks(jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], tasks: int | None) -> Crew[T]:
    """All jobs on the event loop of one thread, so many at a time."""
    limit = min(len(jobs), AUTO_TASKS if tasks is None else tasks)

    async def do_jobs(batch: Batch[T]) -> None:
        while (index := batch.take()) is not None:
            try:
                batch.settle(index, await jobs[index]())
            except Exception as error:
                batch.settle(index, error)
            except asyncio.CancelledError:
                batch.settle(index, Cancelled("the batch was stopped"))
                raise

    async def do_all(batch: Batch[T]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(limit):
                group.create_task(do_jobs(batch))

    def work(batch: Batch[T]) -> None:
        run_to_end(lambda: do_all(batch), batch.running)

    return Crew(work, helpers=1)


class StreamLoop:
    """One event loop, on a thread of its own, for all programs that are streamed. A forked child begins anew."""

    def __init__(self) -> None:
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, streamed: Streamed) -> State:
        """Let it run there, and give back the state of its reader.

        A reader on this very thread could not wait for it: then it gets a thread and a loop of its own.
        """
        if current_thread() is self._thread:
            apart = Thread(target=lambda: asyncio.run(streamed.run_on_loop()), name="branchwise-stream", daemon=True)
            state = streamed.state(apart)
            apart.start()
            return state
        loop, thread = self._running_loop()
        state = streamed.state(thread)
        loop.call_soon_threadsafe(self._begin_task, loop, streamed)
        return state

    def _begin_task(self, loop: asyncio.AbstractEventLoop, streamed: Streamed) -> None:
        task = loop.create_task(streamed.run_on_loop())
        self._tasks.add(task)  # the loop itself does not hold it
        task.add_done_callback(self._tasks.discard)

    def _running_loop(self) -> tuple[asyncio.AbstractEventLoop, Thread]:
        with self._lock:
            if self._loop is None or self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._thread = Thread(target=self._loop.run_forever, name="branchwise-streams", daemon=True)
                self._thread.start()
                atexit.register(self._end, self._loop, self._thread)
            return self._loop, self._thread

    def _end(self, loop: asyncio.AbstractEventLoop, thread: Thread) -> None:
        """At exit: what is left is cancelled, so that nothing is told about it when the interpreter goes."""
        if thread is not self._thread:
            return  # that of the process this one was forked from

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1) if tasks else None
            loop.stop()

        asyncio.run_coroutine_threadsafe(cancel_all(), loop)
        thread.join(timeout=2)


STREAMS = StreamLoop()


def _settle(done: Future[T], run: Callable[[], T]) -> None:
    try:
        done.set_result(run())
    except BaseException as error:
        done.set_exception(error)

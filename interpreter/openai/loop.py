"""One event loop on a thread of its own, on which all requests of a backend wait."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import Lock, Thread, current_thread
from typing import Any


class LoopThread:
    """Runs coroutines. Its thread begins with the first one, and ends when this is closed or nobody holds it."""

    def __init__(self, at_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._lock = Lock()
        self._at_end = at_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._end: Callable[[], object] | None = None
        self.closed = False

    def start(self, coroutine: Coroutine[Any, Any, None], on_cancelled: Callable[[], None]) -> Callable[[], None]:
        """Run `coroutine` soon; what comes back cancels it, and `on_cancelled` is called when that is done. Any thread.

        Raises:
            RuntimeError: this is closed.
        """
        work = _Work(coroutine, on_cancelled)
        with self._lock:
            if self.closed:
                coroutine.close()
                raise RuntimeError("the backend is closed")
            loop = self._running()
            loop.call_soon_threadsafe(work.begin)
        return lambda: _soon(loop, work.cancel)

    def close(self) -> None:
        """Cancel what runs and end the thread; waits for it, except on itself."""
        with self._lock:
            self.closed = True
            end, thread = self._end, self._thread
        if end is not None:
            end()
        if thread is not None and thread is not current_thread():
            thread.join()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = loop = asyncio.new_event_loop()
            self._thread = Thread(target=_run, args=(loop, self._at_end), name="branchwise-openai", daemon=True)
            self._thread.start()
            self._end = weakref.finalize(self, _stop, loop)
        return self._loop


def _run(loop: asyncio.AbstractEventLoop, at_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(at_end())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    _soon(loop, loop.stop)


def _soon(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and all that ran on it was cancelled before
        loop.call_soon_threadsafe(action)


class _Work:
    """One coroutine on the loop. Only the loop's thread touches it."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], on_cancelled: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._on_cancelled = on_cancelled
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        assert self._task is not None, "it was begun before"
        self._task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first step runs none of its own code, so this is told from here."""
        if task.cancelled():
            self._on_cancelled()
        else:
            task.result()  # it has told its listener of any error

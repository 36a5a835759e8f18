"""What callers hold while the engine works: something started, a pinned prefix, results to wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from .errors import EngineClosed
from .loop import Ask, Cancel, StepLoop, Submit
from .request import Request, Result
from .tree import Node

T = TypeVar("T")


class Handle:
    """Something that was started. `cancel` may be called from any thread, at any time, any number of times."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._requests: tuple[Request, ...] = ()
        self._cancelled = False

    def cancel(self) -> None:
        """Stop soon; callbacks get what was generated so far, with finish reason "cancelled"."""
        with self._lock:
            self._cancelled = True
            self._post_cancel()

    def submit(self, requests: tuple[Request, ...]) -> None:
        """Give it its requests, which may come later than the first `cancel`."""
        with self._lock:
            self._requests = requests
            self._loop.post(Submit(requests))
            if self._cancelled:
                self._post_cancel()

    def _post_cancel(self) -> None:
        with contextlib.suppress(EngineClosed):  # closing ended the requests already
            self._loop.post(Cancel(self._requests))


class Pin:
    """A prefix that stays cached, also as a context manager."""

    def __init__(self, loop: StepLoop, node: Node, num_tokens: int) -> None:
        self._loop = loop
        self._node: Node | None = node
        self.num_tokens = num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the prefix be evicted again. Twice is fine."""
        node, self._node = self._node, None
        if node is not None:
            with contextlib.suppress(EngineClosed):  # the cache has gone as a whole
                self._loop.post(Ask(lambda scheduler: scheduler.tree.unpin(node), Future()))


class LatePin:
    """A pin of a prompt that is still computed; a failure leaves nothing pinned."""

    def __init__(self, loop: StepLoop, num_tokens: int) -> None:
        self.handle: Handle | None = None
        self._loop = loop
        self._num_tokens = num_tokens
        self._lock = threading.Lock()
        self._pin: Pin | None = None
        self._released = False

    def arrive(self, result: Result | Exception) -> None:
        """The prompt is computed, or could not be."""
        if isinstance(result, Result) and result.pinned is not None:
            pin = Pin(self._loop, result.pinned, self._num_tokens)
            with self._lock:
                self._pin, released = pin, self._released
            if released:
                pin.release()

    def release(self) -> None:
        """Let the prompt be evicted again, or not be computed at all. Twice is fine."""
        with self._lock:
            self._released, pin = True, self._pin
        if pin is not None:
            pin.release()
        elif self.handle is not None:
            self.handle.cancel()


class Gather:
    """Collects the results of several requests; the first failure is the failure of all."""

    def __init__(self, count: int, on_done: Callable[[Any], None]) -> None:
        self._results: list[Any] = [None] * count
        self._missing = count
        self._on_done = on_done

    def __call__(self, index: int, result: Any) -> None:
        """On the completion thread only."""
        self._results[index] = result
        self._missing -= 1
        if self._missing == 0:
            failed = [r for r in self._results if isinstance(r, Exception)]
            self._on_done(failed[0] if failed else self._results)


def for_sample(callback: Callable[[int, Any], None], sample: int) -> Callable[[Any], None]:
    """`callback` with the number of its sample filled in."""
    return lambda value: callback(sample, value)


def settle(future: Future[Any], result: object) -> None:
    """Resolve a future with a result, or with the exception that came instead."""
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def wait_for(waits: Sequence[Future[T]], handle: Handle) -> list[T]:
    """The results of all; if one fails, or the wait is interrupted, what goes on is cancelled."""
    try:
        return [future.result() for future in waits]
    except BaseException:  # an interrupt as well as a failure: nothing goes on unseen
        handle.cancel()
        raise

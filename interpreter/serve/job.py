"""Texts that the engine computes, awaited on an event loop; who leaves early stops them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from branchwise import runtime

from .errors import ClientGone


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is continued, `n` times. `plain_bytes` of its end are text that healing may spell anew."""

    tokens: array[int]
    params: runtime.GenerateParams
    n: int = 1
    plain_bytes: int | None = None
    text: str | None = field(default=None, compare=False)  # as it was asked, for who wants it back


@dataclass(frozen=True, slots=True)
class Piece:
    """More text of the text with this index."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end of the text with this index."""

    index: int
    result: runtime.Result


class Job:
    """All samples of some prompts; that of prompt p and sample s has the index p * n + s. Leaving it cancels the rest.

    As `async with Job(...) as job`, on one event loop.
    """

    def __init__(
        self, engine: runtime.Engine, prompts: Sequence[Prompt], gone: Callable[[], Any] | None = None
    ) -> None:
        """
        Args:
            gone: awaits the moment at which the client has gone.
        """
        self._engine = engine
        self._prompts = prompts
        self._gone = gone
        self._events: asyncio.Queue[Piece | Done | BaseException] = asyncio.Queue()
        self._handles: list[runtime.Handle] = []
        self._watch: asyncio.Task[None] | None = None
        self.count = sum(prompt.n for prompt in prompts)

    async def __aenter__(self) -> Job:
        loop = asyncio.get_running_loop()

        def put(event: Piece | Done | BaseException) -> None:  # on the engine's thread
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        if self._gone is not None:
            self._watch = asyncio.create_task(self._watch_client(self._gone))
        try:
            first = 0
            for prompt in self._prompts:
                self._handles.append(self._start(prompt, first, put))
                first += prompt.n
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stop()

    async def events(self) -> AsyncIterator[Piece | Done]:
        """What happens, until all texts have ended.

        Raises:
            ClientGone: nobody waits for it any more.
            Whatever a text failed with.
        """
        left = self.count
        while left:
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            left -= isinstance(event, Done)
            yield event

    async def results(self) -> list[runtime.Result]:
        """All results, by index; raises as `events` does."""
        results: dict[int, runtime.Result] = {}
        async for event in self.events():
            if isinstance(event, Done):
                results[event.index] = event.result
        return [results[index] for index in range(self.count)]

    def cancel(self) -> None:
        """End all texts with what they have."""
        for handle in self._handles:
            handle.cancel()

    def _start(self, prompt: Prompt, first: int, put: Callable[[Piece | Done | BaseException], None]) -> runtime.Handle:
        def on_done(sample: int, result: runtime.Result | Exception) -> None:
            put(result if isinstance(result, Exception) else Done(first + sample, result))

        return self._engine.start(
            prompt.tokens,
            prompt.params,
            n=prompt.n,
            plain_bytes=prompt.plain_bytes,
            on_delta=lambda sample, delta: put(Piece(first + sample, delta.text)),
            on_done=on_done,
        )

    async def _watch_client(self, gone: Callable[[], Any]) -> None:
        await gone()
        self._events.put_nowait(ClientGone())

    def _stop(self) -> None:
        self.cancel()
        if self._watch is not None:
            self._watch.cancel()

"""Ctrl-C: everything is cancelled, and the next run answers."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from branchwise.interpreter import AsyncState, Cancelled, Scripted, State, function
from branchwise.lang import gen

Make = Callable[..., Scripted]
Eventually = Callable[[Callable[[], bool]], None]


@function
def forever(s: State) -> None:
    s += gen("long") + gen("long")
    branches = s.fork(2)
    branches += gen("long")
    branches.join()


@function
def nested(s: State, backend: Any, inner: Any = forever) -> None:
    inner.run_batch([{}] * 20, num_threads=3, backend=backend)


@function
async def forever_awaited(s: AsyncState) -> None:
    s += gen("long") + gen("long")
    branches = s.fork(2)
    branches += gen("long")
    await branches.join()


def one(backend: Scripted) -> None:
    forever.run(backend=backend)


def batch(backend: Scripted) -> None:
    forever.run_batch([{}] * 500, backend=backend)


def batch_of_batches(backend: Scripted) -> None:
    nested.bind(backend=backend).run_batch([{}] * 20, num_threads=4, backend=backend)


def stream(backend: Scripted) -> None:
    list(forever.run(stream=True, backend=backend).text_iter())


def reading_a_stream(backend: Scripted) -> None:
    forever.run(stream=True, backend=backend)["long"]


def joining(backend: Scripted) -> None:
    state = function(lambda s: None).run(backend=backend)
    branches = state.fork(3)
    branches += gen("long")
    branches.join()


def first_of_branches(backend: Scripted) -> None:
    branches = function(lambda s: None).run(backend=backend).fork(3)
    branches += gen("long")
    branches.first()


def batch_as_it_comes(backend: Scripted) -> None:
    list(forever.run_batch([{}] * 500, num_threads=4, generator_style=True, backend=backend))


def one_awaited(backend: Scripted) -> None:
    forever_awaited.run(backend=backend)


def one_awaited_in_a_loop(backend: Scripted) -> None:
    async def cell() -> None:
        forever_awaited.run(backend=backend)

    with closing(asyncio.new_event_loop()) as loop:  # as a notebook runs it: asyncio.run would handle the signal itself
        loop.run_until_complete(cell())


def awaited(backend: Scripted) -> None:
    async def main() -> None:
        await asyncio.gather(forever_awaited.arun(backend=backend), forever.arun(backend=backend))

    asyncio.run(main())


def inside_of_asyncio_run(work: Callable[[Scripted], None]) -> Callable[[Scripted], None]:
    async def main(backend: Scripted) -> None:
        work(backend)

    def outside(backend: Scripted) -> None:
        asyncio.run(main(backend))  # it makes a cancellation of its task of the first interrupt

    outside.__name__ = f"{work.__name__}_inside_of_asyncio_run"
    return outside


def batch_awaited(backend: Scripted) -> None:
    forever_awaited.run_batch([{}] * 500, backend=backend)


def batch_of_awaited_batches(backend: Scripted) -> None:
    nested.bind(backend=backend, inner=forever_awaited).run_batch([{}] * 20, num_threads=4, backend=backend)


def stream_awaited(backend: Scripted) -> None:
    list(forever_awaited.run(stream=True, backend=backend).text_iter())


def mapping(backend: Scripted) -> None:
    def body(branch: State, item: int) -> None:
        branch += gen("long")

    function(lambda s: s.map(range(8), body)).run(backend=backend)


WORK = [
    one, mapping, batch, batch_of_batches, batch_as_it_comes, stream, reading_a_stream, joining, first_of_branches,
    one_awaited, one_awaited_in_a_loop, awaited, batch_awaited, batch_of_awaited_batches, stream_awaited,
    *map(inside_of_asyncio_run, [one, stream, joining, one_awaited]),
]  # fmt: skip


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A `KeyboardInterrupt` reaches the block, which would go on for a quarter of an hour, and leaves it soon."""
    main = threading.get_ident()
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    began = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - began < seconds + 10
    timer.join()


@pytest.mark.parametrize("work", WORK)
def test_an_interrupt_cancels_everything(
    work: Callable[[Scripted], None], scripted: Make, eventually: Eventually
) -> None:
    backend = scripted({"long": "x" * 1_000_000, "a": "A"}, delay_s=0.001, piece_len=1)
    with interrupted_after(0.2):
        work(backend)
    eventually(lambda: backend.open_sessions == 0)
    eventually(lambda: not any(t.name.startswith("branchwise-batch") for t in threading.enumerate()))
    assert function(lambda s: s.__iadd__(gen("a"))).run(backend=backend)["a"] == "A"


@pytest.mark.parametrize("read", [lambda s: s["long"], lambda s: s.sync(), lambda s: list(s.text_iter("long"))])
def test_an_interrupted_reader_cancels_the_state_that_it_still_holds(
    read: Callable[[State], object], scripted: Make, eventually: Eventually
) -> None:
    backend = scripted({"long": "x" * 1_000_000}, delay_s=0.001, piece_len=1)
    state = forever.stream(backend=backend)
    with interrupted_after(0.1):
        read(state)
    eventually(lambda: backend.open_sessions == 0)
    with pytest.raises(Cancelled):
        state["long"]


def test_an_interrupted_batch_begins_nothing_new_in_programs_that_go_on(scripted: Make, eventually: Eventually) -> None:
    backend = scripted({"long": "x" * 1_000_000}, delay_s=0.001, piece_len=1)

    def stubborn(s: State) -> None:
        for _ in range(3):
            with suppress(Cancelled):
                forever.run(backend=backend)

    with interrupted_after(0.2):
        function(stubborn).run_batch([{}] * 4, num_threads=4, backend=backend)
    eventually(lambda: not any(t.name.startswith("branchwise-batch") for t in threading.enumerate()))

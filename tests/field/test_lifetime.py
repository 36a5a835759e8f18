"""Theme 11: notebooks, event loops, Ctrl-C and the end of Python. Each test is a case, by its number."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from branchwise import AsyncState, Engine, State, function, gen


@function
def ask(s: State, q: str, max_tokens: int = 4) -> None:
    s += q + gen("a", max_tokens=max_tokens, ignore_eos=True)


@function
async def ask_awaited(s: AsyncState, q: str, max_tokens: int = 4) -> str:
    s += q + gen("a", max_tokens=max_tokens, ignore_eos=True)
    return await s["a"]  # type: ignore[no-any-return]


PROGRAMS = pytest.mark.parametrize("program", [ask, ask_awaited], ids=["waits", "awaits"])


def idle(engine: Engine) -> None:
    """Wait until nothing runs and nothing is locked."""
    until = time.monotonic() + 10
    while engine.stats.running or engine.stats.waiting or engine.stats.protected_slots:
        assert time.monotonic() < until, engine.stats
        time.sleep(0.01)


@PROGRAMS
def test_137_programs_run_inside_a_running_event_loop(program: Any, engine: Engine) -> None:
    async def cell() -> list[str]:
        pieces = program.run(stream=True, q="x", backend=engine).text_iter("a")
        batch = program.run_batch([{"q": "x"}, {"q": "x"}], backend=engine)
        awaited = await program.arun(q="x", backend=engine)
        return [program.run(q="x", backend=engine)["a"], "".join(pieces), *(s["a"] for s in batch), awaited["a"]]

    assert len(set(asyncio.run(cell()))) == 1


@PROGRAMS
def test_137_an_event_loop_goes_on_while_text_comes(program: Any, engine: Engine) -> None:
    async def cell() -> tuple[str, float]:
        longest, last = 0.0, time.monotonic()

        async def tick() -> None:
            nonlocal longest, last
            while True:
                await asyncio.sleep(0.01)
                now = time.monotonic()
                longest, last = max(longest, now - last), now

        ticker = asyncio.create_task(tick())
        state = program.stream(q="x", max_tokens=100, backend=engine)
        text = "".join([piece async for piece in state.text_async_iter("a")])
        ticker.cancel()
        return text, longest

    began = time.monotonic()
    text, longest = asyncio.run(cell())
    assert text
    assert longest < max(0.1, (time.monotonic() - began) / 2), "the loop was held up"


def stream_it(program: Any, engine: Engine) -> None:
    list(program.stream(q="x", max_tokens=2000, backend=engine).text_iter())


def batch_it(program: Any, engine: Engine) -> None:
    program.run_batch([{"q": f"{i}", "max_tokens": 2000} for i in range(50)], backend=engine)


def run_it(program: Any, engine: Engine) -> None:
    program.run(q="x", max_tokens=2000, backend=engine)


def run_it_in_a_cell(program: Any, engine: Engine) -> None:
    async def cell() -> None:
        run_it(program, engine)

    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(cell())


@PROGRAMS
@pytest.mark.parametrize("work", [run_it, batch_it, stream_it, run_it_in_a_cell])
def test_139_ctrl_c_ends_what_runs_and_the_next_run_answers(
    work: Callable[[Any, Engine], None], program: Any, engine: Engine
) -> None:
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work(program, engine)
    timer.join()
    idle(engine)
    assert program.run(q="x", backend=engine)["a"]


def test_140_a_stream_that_is_left_early_goes_on_and_tells_nobody(engine: Engine) -> None:
    async def leave(state: State) -> None:
        async for _ in state.text_async_iter():
            raise ValueError("mine")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = ask.stream(q="x", max_tokens=50, backend=engine)
        pieces = state.text_iter()
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        for _ in state.text_iter():
            break
        with pytest.raises(ValueError, match="mine"):
            asyncio.run(leave(state))
        assert state.meta("a").usage.completion_tokens == 50
        gc.collect()


@PROGRAMS
def test_142_an_engine_serves_one_event_loop_after_another_and_several_at_once(program: Any, engine: Engine) -> None:
    found: list[str] = []

    def one() -> None:
        found.append(asyncio.run(program.arun(q="x", backend=engine))["a"])

    for _ in range(3):
        one()
    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1


ENDS = """
import os, sys
from branchwise import AsyncState, Engine, State, function, gen

@function
def ask(s: State):
    s += "x" + gen("a", max_tokens=2000, ignore_eos=True)

@function
async def ask_awaited(s: AsyncState):
    s += "x" + gen("a", max_tokens=2000, ignore_eos=True)

engine = Engine(sys.argv[1], num_slots=4096)
streams = [program.stream(backend=engine) for program in (ask, ask_awaited)]
print(all(next(state.text_iter()) for state in streams))
if sys.argv[2] == "forked" and os.fork() == 0:
    print("child")
    sys.exit()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["streams", "forked"])
def test_143_python_ends_while_programs_run(how: str, tiny_model: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ENDS, str(tiny_model), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.split()) == (["True"] if how == "streams" else ["True", "child"])

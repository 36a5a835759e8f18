"""Programs that are `async def`: no thread each, and nothing that waits for ever."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from branchwise.interpreter import (
    AsyncState,
    Cancelled,
    Completion,
    GenerationError,
    Scripted,
    State,
    UnknownVariable,
    function,
)
from branchwise.lang import CallError, Gen, LangError, gen, user

Make = Callable[..., Scripted]
Eventually = Callable[[Callable[[], bool]], None]


def run(write: Callable[[AsyncState], Any], backend: Scripted, **options: Any) -> State:
    """Run a coroutine function as a program."""

    @function
    async def program(s: AsyncState) -> Any:
        return await write(s)

    return program.run(backend=backend, **options)


def message_of(write: Callable[[AsyncState], Any], backend: Scripted, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        run(write, backend)
    return str(caught.value)


@function
async def ask(s: AsyncState, q: str = "why") -> str:
    s += q + ": " + gen("a")
    return f"<{await s['a']}>"


@function
async def endless(s: AsyncState) -> None:
    while True:
        s += gen("long")
        await s["long"]


def way_run(backend: Scripted) -> State:
    return ask.run("how", backend=backend)


def way_arun(backend: Scripted) -> State:
    return asyncio.run(ask.arun("how", backend=backend))


def way_batch(backend: Scripted) -> State:
    (state,) = ask.run_batch([{"q": "how"}], backend=backend)
    return state  # type: ignore[no-any-return]


def way_stream(backend: Scripted) -> State:
    return ask.stream("how", backend=backend)


def way_in_a_loop(backend: Scripted) -> State:
    async def cell() -> State:
        return ask.run("how", backend=backend)

    return asyncio.run(cell())


WAYS = [way_run, way_arun, way_batch, way_stream, way_in_a_loop]


@pytest.mark.parametrize("delay_s", [None, 0.001], ids=["at once", "from a thread"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_gives_the_same_state(
    way: Callable[[Scripted], State], delay_s: float | None, scripted: Make
) -> None:
    state = way(scripted({"a": "so it is"}, delay_s=delay_s))
    assert state.text() == "how: so it is"
    assert (state.ret_value, state["a"], list(state.text_iter("a"))) == ("<so it is>", "so it is", ["so i", "t is"])


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_raises_what_failed(way: Callable[[Scripted], State], scripted: Make) -> None:
    with pytest.raises(GenerationError, match=r'^gen\("a"\): boom'):
        way(scripted({"a": ValueError("boom")}, delay_s=0.001)).sync()


def test_all_that_can_be_read_can_be_awaited(scripted: Make) -> None:
    async def write(s: AsyncState) -> None:
        s += user("Q: " + gen("a"))
        s["set"] = 3
        meta = await s.meta("a")
        assert isinstance(meta, Completion)
        assert meta.text == "abcdefgh"
        assert await s.messages() == [{"role": "user", "content": "Q: abcdefgh"}]
        assert await s.text() == "Q: abcdefgh"
        assert (await s["set"], await s.get("nope", 5), await s.get("a")) == (3, 5, "abcdefgh")
        assert [piece async for piece in s.text_async_iter()] == ["Q: ", "abcd", "efgh"]
        assert [piece async for piece in s.text_async_iter("a")] == ["abcd", "efgh"]
        with pytest.raises(UnknownVariable):
            s["nope"]
        twice = s["a"]
        assert await twice == await twice
        await s.sync()

    run(write, scripted({"a": "abcdefgh"}, delay_s=0.001))


def test_pieces_come_while_the_text_grows(scripted: Make) -> None:
    async def write(s: AsyncState) -> None:
        s += gen("a")
        async for piece in s.text_async_iter("a"):
            assert piece == "x"
            assert not s._transcript.find("a").done
            break

    run(write, scripted({"a": "x" * 20}, delay_s=0.01, piece_len=1))


def test_branches_of_an_async_program(scripted: Make, eventually: Eventually) -> None:
    async def write(s: AsyncState) -> None:
        branches = s.fork(3)
        branches += lambda i: f"{i}" + gen("tip")
        await branches.join()
        assert (await s["tip"], await branches["tip"]) == (["a", "b", "c"], ["a", "b", "c"])
        assert await branches[1].text() == "1b"
        async with s.fork(2) as pair:
            pair += gen("pair")
        assert await s["pair"] == ["p", "p"]
        eventually(lambda: backend.open_sessions == 4)
        other = s.copy()
        other += gen("tip")
        await other["tip"]

    backend = scripted({"tip": ["a", "b", "c"], "pair": "p"}, delay_s=0.001)
    run(write, backend)


def test_the_first_branch_to_finish_wins_without_a_thread(scripted: Make, eventually: Eventually) -> None:
    def racing(asked: Any) -> str:
        return "quick" if asked.prompt == "1" else "x" * 100_000

    async def write(s: AsyncState) -> Any:
        branches = s.fork(3)
        branches += lambda i: f"{i}" + gen("x")
        winner = await branches.first()
        eventually(lambda: backend.open_sessions == 2)
        with pytest.raises(Cancelled, match="branch 1 was the first to finish"):
            await branches[0]["x"]
        return await winner["x"]

    backend = scripted(racing, delay_s=0.001, piece_len=1)
    assert run(write, backend).ret_value == "quick"


def test_a_join_raises_the_failure_of_the_first_branch_that_failed(scripted: Make) -> None:
    async def write(s: AsyncState) -> str:
        branches = s.fork(3)
        branches += lambda i: f"{i}" + gen("x")
        with pytest.raises(GenerationError) as caught:
            await branches.join()
        assert caught.value.__notes__[-1] == "It was raised by branch 1 of 3."
        return await branches[2]["x"]  # type: ignore[no-any-return]

    backend = scripted(lambda asked: ValueError("boom") if asked.prompt == "1" else asked.prompt, delay_s=0.001)
    assert run(write, backend).ret_value == "2"


def test_a_called_program_goes_on_in_the_same_state(scripted: Make) -> None:
    @function(max_tokens=7)
    async def inner(s: AsyncState, depth: int) -> str:
        s += f"{depth}" + gen("b")
        if depth:
            await inner(s, depth - 1)
        return await s["b"]  # type: ignore[no-any-return]

    async def write(s: AsyncState) -> str:
        value: str = await inner(s, 2)
        s += gen("a")
        return value

    backend = scripted({"a": "A", "b": "B"}, delay_s=0.001)
    state = run(write, backend, max_tokens=None)
    assert (state.text(), state.ret_value) == ("2B1B0BA", "B")
    assert backend.opened == 1
    assert [call.op.options.max_tokens for call in backend.calls if isinstance(call.op, Gen)] == [7, 7, 7, 256]


def test_a_program_that_waits_runs_on_a_thread_when_an_async_one_calls_it(scripted: Make) -> None:
    @function(max_tokens=7)
    def inner(s: State, what: str) -> str:
        assert threading.current_thread() is not loop_thread
        s += what + gen("b")
        with s.fork(2) as branches:
            branches += gen("c")
        return "".join(s["c"]) + s["b"]  # type: ignore[no-any-return]

    async def write(s: AsyncState) -> Any:
        nonlocal loop_thread
        loop_thread = threading.current_thread()
        return await inner(s, "x")

    loop_thread = None
    state = run(write, scripted({"b": "B", "c": "C"}, delay_s=0.001))
    assert (state.text(), state.ret_value) == ("xB", "CCB")


def test_an_async_program_is_not_called_by_one_that_is_not(scripted: Make) -> None:
    with pytest.raises(CallError) as caught:
        function(lambda s: ask(s)).run(backend=scripted({}))
    assert str(caught.value) == (
        "ask(): is async, and the program that calls it is not. Make that one async def and write await ask(s, ...); "
        "on its own it runs by ask.run(...)."
    )


def test_an_async_method_is_a_program(scripted: Make) -> None:
    class Agent:
        name = "ada"

        @function
        async def ask(self, s: AsyncState) -> str:
            s += self.name + gen("a")
            return await s["a"]  # type: ignore[no-any-return]

    assert Agent().ask.run(backend=scripted({"a": "A"})).text() == "adaA"


# Forgotten awaits


MISSING = " is used without await. Write (await "


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s: f"{s['a']}", f's["a"]{MISSING}s["a"]).'),
        (lambda s: str(s["a"]), f's["a"]{MISSING}s["a"]).'),
        (lambda s: s["a"] == "x", f's["a"]{MISSING}s["a"]).'),
        (lambda s: s["a"] + "x", f's["a"]{MISSING}s["a"]).'),
        (lambda s: "x" in s["a"], f's["a"]{MISSING}s["a"]).'),
        (lambda s: bool(s.text()), f"s.text(){MISSING}s.text())."),
        (lambda s: list(s.fork(2).__iadd__(gen("a"))["a"]), f'branches["a"]{MISSING}branches["a"]).'),
        (lambda s: s.__iadd__(s["a"]), f's["a"]{MISSING}s["a"]).'),
        (lambda s: s.__iadd__("x" + s["a"]), f's["a"]{MISSING}s["a"]).'),
        (lambda s: s.__iadd__(gen("b") + s["a"]), f's["a"]{MISSING}s["a"]).'),
        (lambda s: s.__setitem__("b", s["a"]), f's["a"]{MISSING}s["a"]).'),
        (lambda s: s["a"].strip(), f's["a"]{MISSING}s["a"]).strip'),
    ],
)
def test_what_is_used_without_await_says_so(use: Callable[[AsyncState], Any], message: str, scripted: Make) -> None:
    async def write(s: AsyncState) -> None:
        s += gen("a")
        use(s)

    assert message_of(write, scripted({"a": "x", "b": "y"}), Exception) == message


@pytest.mark.parametrize(
    ("forget", "call"),
    [
        (lambda s: s["a"], 's["a"]'),
        (lambda s: s.sync(), "s.sync()"),
        (lambda s: ask(s), "ask(...)"),
        (lambda s: s.fork(2).join(), "branches.join()"),
        (lambda s: s.copy()["a"], 's["a"]'),
    ],
)
def test_what_is_never_awaited_is_an_error_at_the_end(
    forget: Callable[[AsyncState], Any], call: str, scripted: Make
) -> None:
    async def write(s: AsyncState) -> None:
        s += gen("a")
        forget(s)

    assert message_of(write, scripted({"a": "x"}), CallError) == (
        f"{call} was not awaited, so it did nothing. Write await {call}."
    )


def test_what_is_returned_without_await_is_an_error(scripted: Make) -> None:
    async def write(s: AsyncState) -> Any:
        s += gen("a")
        return s["a"]

    assert message_of(write, scripted({"a": "x"}), CallError).startswith('s["a"] was not awaited')


def test_several_reads_can_be_gathered(scripted: Make) -> None:
    async def write(s: AsyncState) -> list[Any]:
        branches = s.fork(3)
        branches += gen("a")
        return await asyncio.gather(*(branch["a"] for branch in branches))

    assert run(write, scripted({"a": ["1", "2", "3"]}, delay_s=0.001)).ret_value == ["1", "2", "3"]


def test_awaiting_what_needs_no_await_says_so(scripted: Make) -> None:
    backend = scripted({"a": "x"})

    async def await_text(s: AsyncState) -> None:
        state = await ask.arun(backend=backend)
        await state["a"]

    async def await_run(s: AsyncState) -> None:
        await ask.run(backend=backend)  # type: ignore[misc]

    with pytest.raises(TypeError) as caught:
        run(await_text, backend)
    assert caught.value.__notes__ == [
        "In an async program s[...], s.text(), s.sync(), branches.join() and programs it calls are awaited; "
        "what is read from a state that has been run, as arun(...) gives it, is there without."
    ]
    assert message_of(await_run, backend, CallError) == (
        "a state is not awaited: run(...) has waited already. Write await program.arun(...)."
    )


def test_an_attribute_of_the_other_state_is_refused_with_the_way_to_write_it(scripted: Make) -> None:
    async def write(s: AsyncState) -> None:
        s.text_iter()  # type: ignore[attr-defined]

    assert message_of(write, scripted({}), AttributeError) == (
        "the state of an async program has no attribute 'text_iter'. Write async for piece in s.text_async_iter(...)."
    )


def test_blocks_and_loops_that_wait_say_that_they_are_async(scripted: Make) -> None:
    async def block(s: AsyncState) -> None:
        with s.fork(2):  # type: ignore[attr-defined]
            pass

    async def loop(s: AsyncState) -> None:
        for _ in s.text_async_iter():  # type: ignore[attr-defined]
            pass

    assert message_of(block, scripted({}), CallError) == (
        "the end of this block waits for the branches. Write async with s.fork(...) as branches:"
    )
    assert message_of(loop, scripted({}), CallError) == (
        "these pieces are awaited. Write async for, or text_iter(...) where a thread may wait."
    )


def test_plus_without_equals_is_refused_in_every_order(scripted: Make) -> None:
    async def write(s: AsyncState) -> None:
        for add in (lambda: s + gen("x"), lambda: gen("x") + s, lambda: "x" + s):
            with pytest.raises(LangError, match=r"a state is not a value to add to\. Write s \+= \.\.\."):
                add()

    run(write, scripted({}))


# Event loops and threads


def test_five_hundred_programs_of_eight_branches_need_no_thread_each(scripted: Make) -> None:
    most = 0

    @function
    async def program(s: AsyncState, i: int) -> Any:
        nonlocal most
        s += f"{i}:" + gen("a")
        branches = s.fork(8)
        branches += gen("b")
        await branches.join()
        most = max(most, threading.active_count())
        return await s["b"]

    def answer(asked: Any) -> str:
        return str(asked.prompt) if asked.op.name == "b" else "A"

    before = threading.active_count()
    backend = scripted(answer, delay_s=0.0001)
    states = program.run_batch([{"i": i} for i in range(500)], num_threads=500, backend=backend)
    assert [state.ret_value for state in states] == [[f"{i}:A"] * 8 for i in range(500)]
    assert most <= before + 3, "the thread of the loop, the backend's clock, the reaper"


def test_so_many_programs_of_a_batch_run_at_a_time_as_were_asked_for(scripted: Make) -> None:
    running, most = 0, 0

    @function
    async def program(s: AsyncState) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        s += gen("a")
        await s["a"]
        running -= 1

    program.run_batch([{}] * 20, num_threads=3, backend=scripted({"a": "x"}, delay_s=0.001))
    assert most == 3


def test_an_event_loop_goes_on_while_programs_run(scripted: Make) -> None:
    @function
    def waits(s: State) -> Any:
        s += gen("a")
        return s["a"]

    async def main() -> tuple[list[Any], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        state = waits.stream(backend=backend)
        pieces = [piece async for piece in state.text_async_iter()]
        states = await asyncio.gather(*(program.arun(backend=backend) for program in (ask, waits)))
        ticker.cancel()
        return ["".join(pieces), *(state["a"] for state in states)], ticks

    backend = scripted({"a": "x" * 20}, delay_s=0.005, piece_len=1)
    values, ticks = asyncio.run(main())
    assert values == ["x" * 20] * 3
    assert ticks > 20, "the loop was held up"


def test_one_backend_serves_one_loop_after_another_and_several_at_once(scripted: Make) -> None:
    backend = scripted({"a": "A"}, delay_s=0.001)
    got: list[Any] = []

    def one() -> None:
        got.append(asyncio.run(ask.arun(backend=backend))["a"])

    for _ in range(3):
        one()
    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == ["A"] * 6


@pytest.mark.timeout(30)
def test_programs_of_both_kinds_run_each_other_three_deep(scripted: Make) -> None:
    backend = scripted({"a": "A"}, delay_s=0.0005)

    @function
    async def asynchronous(s: AsyncState, depth: int) -> int:
        s += gen("a")
        if not depth:
            return 1
        batch = synchronous.run_batch([{"depth": depth - 1}] * 2, num_threads=1, backend=backend)
        one = await synchronous.arun(depth=depth - 1, backend=backend)
        return sum(state.ret_value for state in batch) + one.ret_value  # type: ignore[no-any-return]

    @function
    def synchronous(s: State, depth: int) -> int:
        s += gen("a")
        if not depth:
            return 1
        batch = asynchronous.run_batch([{"depth": depth - 1}] * 2, num_threads=1, backend=backend)
        one = asynchronous.run(depth=depth - 1, backend=backend)
        streamed = asynchronous.stream(depth=depth - 1, backend=backend)
        return sum(state.ret_value for state in [*batch, one, streamed])  # type: ignore[no-any-return]

    assert asynchronous.run(depth=3, backend=backend).ret_value == 3 * 4 * 3
    assert synchronous.run(depth=3, backend=backend).ret_value == 4 * 3 * 4


@pytest.mark.timeout(20)
def test_a_thread_does_not_wait_for_the_program_that_it_runs(scripted: Make) -> None:
    backend = scripted({"a": "A"}, delay_s=0.001)

    @function
    async def outer(s: AsyncState, state: State) -> list[Any]:
        for read in (lambda: state["a"], state.text, state.sync, lambda: list(state.text_iter())):
            with pytest.raises(CallError, match=r"^the program that writes this state runs on this very thread"):
                read()
        pieces = [piece async for piece in state.text_async_iter()]
        return [*pieces, state["a"], state.ret_value]

    slow = scripted({"a": "A"}, delay_s=0.1)
    assert outer.stream(ask.stream(backend=slow), backend=backend).ret_value == ["why: ", "A", "A", "<A>"]
    inside = function(inside_another).stream(on=backend, backend=backend)
    assert inside.ret_value == "A", "it has a thread of its own there"


async def inside_another(s: AsyncState, on: Scripted) -> Any:
    return ask.stream(backend=on)["a"]


@pytest.mark.parametrize("program", [ask, endless])
def test_a_stream_that_nobody_holds_ends(program: Any, scripted: Make, eventually: Eventually) -> None:
    backend = scripted({"a": "x" * 100_000, "long": "x" * 50}, delay_s=0.001, piece_len=1)
    state = program.stream(backend=backend)
    next(iter(state.text_iter()))
    del state
    eventually(lambda: backend.open_sessions == 0)


def test_cancelling_who_awaits_cancels_the_program(scripted: Make, eventually: Eventually) -> None:
    @function
    def waits(s: State) -> None:
        s += gen("long")
        s["long"]

    async def main(program: Any) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(program.arun(backend=backend), 0.05)
        eventually(lambda: backend.open_sessions == 0)

    backend = scripted({"long": "x" * 100_000}, delay_s=0.001, piece_len=1)
    for program in (endless, waits):
        asyncio.run(main(program))


def test_a_read_that_times_out_leaves_its_program_alone(scripted: Make) -> None:
    async def write(s: AsyncState) -> Any:
        s += gen("a")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(s["a"], 0.01)
        return await s["a"]

    assert run(write, scripted({"a": "x" * 20}, delay_s=0.005, piece_len=1)).ret_value == "x" * 20


def test_a_waiting_task_is_woken_by_a_cancel(scripted: Make) -> None:
    async def write(s: AsyncState) -> None:
        s += gen("long")
        asyncio.get_running_loop().call_later(0.02, s.cancel)
        with pytest.raises(Cancelled, match=r"cancel\(\) was called"):
            await s["long"]
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run(write, scripted({"long": "x" * 100_000}, delay_s=0.001, piece_len=1))


def test_leaving_an_iterator_early_tells_nobody(scripted: Make) -> None:
    async def write(s: AsyncState) -> Any:
        s += gen("a")
        async for _ in s.text_async_iter():
            break
        with pytest.raises(ValueError, match="mine"):
            async for _ in s.text_async_iter("a"):
                raise ValueError("mine")
        waiting = asyncio.ensure_future(s["a"])
        await asyncio.sleep(0)
        waiting.cancel()
        return await s["a"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(write, scripted({"a": "abcdefgh"}, delay_s=0.005, piece_len=1)).ret_value == "abcdefgh"
        gc.collect()


def test_states_of_async_programs_are_let_go(scripted: Make) -> None:
    gc.collect()
    gc.disable()
    try:
        backend = scripted({"a": "x"}, delay_s=0.001)
        for way in WAYS:
            state = way(backend)
            state.sync()
            del state
        until = time.monotonic() + 5
        while backend.open_sessions and time.monotonic() < until:
            time.sleep(0.005)
        assert backend.open_sessions == 0, "a state waits for the collector"
    finally:
        gc.enable()


EXIT = """
from branchwise import AsyncState, Scripted, function, gen

@function
async def endless(s: AsyncState):
    while True:
        s += gen("long")
        await s["long"]

state = endless.stream(backend=Scripted({"long": "x" * 50}, delay_s=0.001))
print(next(state.text_iter()))
"""


def test_python_ends_while_an_async_program_is_streamed() -> None:
    ended = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "xxxx\n", "")

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest

from branchwise.interpreter import AsyncState, GenerationError, Scripted, State, function
from branchwise.interpreter.batch import AUTO_THREADS, HELPERS
from branchwise.lang import CallError, gen

Make = Callable[..., Scripted]
Eventually = Callable[[Callable[[], bool]], None]


@function
def count(s: State, i: int) -> int:
    s += f"{i}:" + gen("x")
    return i


def echo(asked: Any) -> str:
    return f"<{asked.prompt}>"


def uneven(asked: Any) -> str:
    """Odd programs take much longer than even ones."""
    prompt: str = asked.prompt
    return prompt * (20 if int(prompt[:-1]) % 2 else 1)


@pytest.mark.parametrize("num_threads", [1, 7, 64, "auto"])
def test_states_come_back_in_the_order_of_the_arguments(num_threads: Any, scripted: Make) -> None:
    backend = scripted(uneven, delay_s=0.0002)
    states = count.run_batch([{"i": i} for i in range(100)], num_threads=num_threads, backend=backend)
    assert [state.ret_value for state in states] == list(range(100))
    assert all(state.text().startswith(f"{i}:") for i, state in enumerate(states))
    assert len(set(map(id, states))) == 100


def test_an_empty_batch_is_an_empty_list() -> None:
    assert count.run_batch([]) == []


def test_one_thread_runs_one_program_at_a_time(scripted: Make) -> None:
    seen = set()
    function(lambda s: seen.add(threading.current_thread())).run_batch([{}] * 5, num_threads=1, backend=scripted({}))
    assert seen == {threading.current_thread()}


def test_the_first_failure_is_raised_when_the_rest_has_finished(scripted: Make) -> None:
    finished = []

    @function
    def program(s: State, i: int) -> None:
        if i in (2, 4):
            raise ValueError(f"item {i}")
        s += gen("x")
        s.sync()
        finished.append(i)

    backend = scripted({"x": "x" * 20}, delay_s=0.002)
    with pytest.raises(ValueError, match=r"^item 2") as caught:
        program.run_batch([{"i": i} for i in range(8)], num_threads=4, backend=backend)
    assert caught.value.__notes__ == ["It was raised by item 2 of the batch."]
    assert sorted(finished) == [0, 1, 3, 5, 6, 7]


def test_errors_can_stand_in_the_place_of_their_states(scripted: Make) -> None:
    backend = scripted(lambda asked: ValueError("boom") if asked.prompt == "1:" else "x")
    first, second, third = count.run_batch([{"i": i} for i in range(3)], return_exceptions=True, backend=backend)
    assert (first["x"], third["x"]) == ("x", "x")
    assert isinstance(second, GenerationError)
    assert str(second) == 'gen("x"): boom'


def test_two_hundred_programs_of_four_branches_on_bounded_threads(scripted: Make) -> None:
    most = 0

    @function
    def program(s: State, i: int) -> None:
        nonlocal most
        s += f"{i}"
        branches = s.fork(4)
        branches += lambda b: f"/{b}" + gen("x")
        branches.join()
        most = max(most, threading.active_count())

    before = threading.active_count()
    states = program.run_batch([{"i": i} for i in range(200)], backend=scripted(echo, delay_s=0.0005))
    assert [state["x"] for state in states] == [[f"<{i}/{b}>" for b in range(4)] for i in range(200)]
    assert most <= before + AUTO_THREADS - 1 + 2, "helping threads, the backend's clock, the reaper"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("num_threads", [1, 2, "auto"])
def test_a_batch_inside_a_batch_inside_a_batch_gets_on(num_threads: Any, scripted: Make) -> None:
    backend = scripted(echo, delay_s=0.0002)
    most = 0

    @function
    def program(s: State, depth: int, i: int) -> Any:
        nonlocal most
        most = max(most, threading.active_count())
        if depth:
            items = [{"depth": depth - 1, "i": 10 * i + k} for k in range(6)]
            return [state.ret_value for state in program.run_batch(items, num_threads=num_threads, backend=backend)]
        s += f"{i}" + gen("x")
        return s["x"]

    def expected(depth: int, i: int) -> Any:
        return [expected(depth - 1, 10 * i + k) for k in range(6)] if depth else f"<{i}>"

    before = threading.active_count()
    assert program.run(depth=3, i=1, backend=backend).ret_value == expected(3, 1)
    if num_threads == "auto":
        assert most <= before + AUTO_THREADS + 1


def test_programs_of_a_batch_run_side_by_side(scripted: Make) -> None:
    meet = threading.Barrier(8, timeout=5)
    function(lambda s: meet.wait()).run_batch([{}] * 8, backend=scripted({}))


def test_the_progress_is_shown_when_it_is_asked_for(scripted: Make) -> None:
    shown, silent = io.StringIO(), io.StringIO()
    backend = scripted(echo)
    with redirect_stderr(shown):
        count.run_batch([{"i": i} for i in range(20)], progress_bar=True, backend=backend)
    with redirect_stderr(silent):
        count.run_batch([{"i": 1}], backend=backend)
    assert "20/20" in shown.getvalue()
    assert shown.getvalue().endswith("\n"), "the bar is closed"
    assert silent.getvalue() == ""


@pytest.mark.parametrize("num_threads", [1, 2, 64, "auto"])
def test_states_can_be_had_as_they_come(num_threads: Any, scripted: Make) -> None:
    backend = scripted(uneven, delay_s=0.0002)
    states = count.run_batch(
        [{"i": i} for i in range(50)], num_threads=num_threads, generator_style=True, backend=backend
    )
    assert backend.calls == [], "nothing begins before it is asked for"
    assert [state.ret_value for state in states] == list(range(50))
    assert list(states) == []


@pytest.mark.parametrize("num_threads", [1, 2, "auto"])
def test_the_first_state_comes_before_the_last_is_done(num_threads: Any, scripted: Make) -> None:
    last = threading.Event()

    @function
    def program(s: State, i: int) -> int:
        if i == 3:
            assert last.wait(5)
        return i

    states = program.run_batch(
        [{"i": i} for i in range(4)], num_threads=num_threads, generator_style=True, backend=scripted({})
    )
    assert next(states).ret_value == 0
    last.set()
    assert [state.ret_value for state in states] == [1, 2, 3]


def test_an_empty_batch_has_no_first_state() -> None:
    assert list(count.run_batch([], generator_style=True)) == []


def test_what_does_not_fit_is_refused_before_a_state_is_asked_for() -> None:
    with pytest.raises(CallError, match=r"item 0: missing a required argument"):
        count.run_batch([{}], generator_style=True)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_stands_in_its_place_or_is_raised_there(num_threads: int, scripted: Make) -> None:
    backend = scripted(lambda asked: ValueError("boom") if asked.prompt == "1:" else "x")
    items = [{"i": i} for i in range(3)]
    kinds = [type(r) for r in count.run_batch(items, generator_style=True, return_exceptions=True, backend=backend)]
    assert kinds == [State, GenerationError, State]
    states = count.run_batch(items, num_threads=num_threads, generator_style=True, backend=backend)
    assert next(states)["x"] == "x"
    with pytest.raises(GenerationError) as caught:
        next(states)
    assert caught.value.__notes__[-1] == "It was raised by item 1 of the batch."


@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "tasks"])
def test_states_that_nobody_wants_any_more_are_stopped(
    asynchronous: bool, scripted: Make, eventually: Eventually
) -> None:
    @function
    def waits(s: State, i: int) -> None:
        s += f"{i}" + gen("x")

    @function
    async def awaits(s: AsyncState, i: int) -> None:
        s += f"{i}" + gen("x")

    backend = scripted(lambda asked: "x" if asked.prompt == "0" else "x" * 100_000, delay_s=0.001, piece_len=1)
    program = awaits if asynchronous else waits
    items = [{"i": i} for i in range(500)]
    for first in program.run_batch(items, num_threads=8, generator_style=True, backend=backend):
        del first
        break
    eventually(lambda: backend.open_sessions == 0)
    eventually(lambda: not any(t.name.startswith("branchwise-batch") for t in threading.enumerate()))
    assert len(backend.calls) < 20


def test_a_dropped_iterator_gives_its_threads_back(scripted: Make, eventually: Eventually) -> None:
    backend = scripted(lambda asked: "x" if asked.prompt == "0:" else "x" * 100_000, delay_s=0.001, piece_len=1)
    spare = HELPERS._spare
    before = spare._value
    states = count.run_batch([{"i": i} for i in range(10)], generator_style=True, backend=backend)
    next(states)
    assert spare._value == before - 10
    del states
    eventually(lambda: spare._value == before)


def test_an_exit_on_a_helping_thread_ends_the_batch(scripted: Make) -> None:
    main = threading.current_thread()

    @function
    def program(s: State) -> None:
        if threading.current_thread() is not main:
            raise SystemExit(3)
        time.sleep(0.01)

    with pytest.raises(SystemExit):
        program.run_batch([{}] * 50, num_threads=2, backend=scripted({}))

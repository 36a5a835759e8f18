from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from branchwise.interpreter import AsyncState, Cancelled, GenerationError, Scripted, State, function
from branchwise.lang import OptionError, gen
from branchwise.parallel import beam_search, best_of, vote

Make = Callable[..., Scripted]
Eventually = Callable[[Callable[[], bool]], None]


def run(write: Callable[[State], Any], backend: Scripted) -> Any:
    return function(lambda s: write(s)).run(backend=backend).ret_value


def echo(asked: Any) -> str:
    """What is asked for, in pieces, so that it takes its time."""
    return f"<{asked.prompt}>"


# vote


@pytest.mark.parametrize(
    ("values", "winner"),
    [
        (["a"], "a"),
        (["a", "b", "b"], "b"),
        (["a", "b", "b", "a"], "a"),
        (["c", "b", "a", "a", "b"], "b"),
        ([{"x": 1}, {"x": 2}, {"x": 2}], {"x": 2}),
        ([None, None, "a"], None),
    ],
)
def test_most_win_and_of_equally_many_the_first(values: list[Any], winner: Any) -> None:
    assert vote(values) == winner


def test_nobody_wins_a_vote_without_values() -> None:
    with pytest.raises(ValueError, match=r"^vote\(\): there are no values to choose from\.$"):
        vote([])


# best_of


def test_the_best_branch_goes_on_and_the_others_are_given_back(scripted: Make, eventually: Eventually) -> None:
    def write(s: State) -> str:
        branches = s.fork(4)
        branches += gen("x")
        best = best_of(branches, lambda branch: len(branch["x"]))
        assert best is branches[1]
        eventually(lambda: backend.open_sessions == 2)
        branches[0] += gen("x")
        with pytest.raises(Cancelled, match="another branch had a higher score"):
            branches[0].sync()
        best += "!"
        return best.text()

    backend = scripted({"x": ["1", "333", "333", "22"]}, delay_s=0.001)
    assert run(write, backend) == "333!"


def test_a_score_that_cannot_be_told_is_raised(scripted: Make) -> None:
    def write(s: State) -> None:
        branches = s.fork(2)
        branches += gen("x")
        with pytest.raises(GenerationError, match=r'^gen\("x"\): boom'):
            best_of(branches, lambda branch: len(branch["x"]))
        with pytest.raises(ValueError, match="there are no branches"):
            best_of([], len)  # type: ignore[arg-type]

    run(write, scripted({"x": ValueError("boom")}, delay_s=0.001))


# beam_search


def digits(asked: Any) -> str:
    """The number of the branch, as it was told just before."""
    return str(asked.prompt[-2])


def step(s: State, index: int) -> None:
    s += f"{index}:" + gen("x") + " "


def value(s: State) -> float:
    """The digits that were written, as a number."""
    return float("".join(part[-1] for part in s.text().split()))


@pytest.mark.parametrize(
    ("width", "fork", "depth", "found"),
    [
        (1, 3, 2, [22]),
        (2, 3, 2, [22, 21]),
        (4, 2, 2, [11, 10, 1, 0]),
        (9, 3, 1, [2, 1, 0]),
    ],
)
def test_a_beam_keeps_the_best_of_each_level(
    width: int, fork: int, depth: int, found: list[int], scripted: Make, eventually: Eventually
) -> None:
    def write(s: State) -> list[State]:
        return beam_search(s, step, value, width=width, fork=fork, depth=depth)

    backend = scripted(digits, delay_s=0.0005)
    kept = run(write, backend)
    assert [value(s) for s in kept] == found
    eventually(lambda: backend.open_sessions <= len(kept) + 1)
    kept[0] += gen("x")
    kept[0].sync()


def test_a_beam_is_at_least_one_wide(scripted: Make) -> None:
    with pytest.raises(OptionError, match=r"^beam_search\(\): width must be at least 1, got 0\."):
        run(lambda s: beam_search(s, step, value, width=0, fork=1, depth=1), scripted({}))


# s.map


def test_a_branch_for_each_item_side_by_side(scripted: Make) -> None:
    meet = threading.Barrier(3, timeout=5)

    def body(branch: State, item: str) -> str:
        branch += f"{item}" + gen("x")
        meet.wait()
        branch += branch["x"] + gen("y")
        return branch["y"]  # type: ignore[no-any-return]

    def write(s: State) -> Any:
        s += "All: "
        return s.map(iter("abc"), body)

    backend = scripted(echo, delay_s=0.0005)
    assert run(write, backend) == [f"<All: {i}<All: {i}><All: {i}>>" for i in "abc"]
    assert backend.opened == 4


def test_a_map_of_nothing_is_nothing(scripted: Make) -> None:
    assert run(lambda s: s.map([], lambda branch, item: 1), scripted({})) == []


def test_a_branch_that_was_mapped_can_go_on(scripted: Make) -> None:
    def body(branch: State, item: int) -> State:
        branch += f"{item}" + gen("x")
        return branch

    def write(s: State) -> list[str]:
        branches = s.map([1, 2], body)
        for branch in branches:
            branch += "!"
        return [branch.text() for branch in branches]

    assert run(write, scripted({"x": "x"}, delay_s=0.001)) == ["1x!", "2x!"]


def test_a_map_waits_for_all_and_raises_the_first_that_failed(scripted: Make, eventually: Eventually) -> None:
    done = []

    def body(branch: State, item: int) -> None:
        branch += f"{item}" + gen("x")
        if item == 1:
            raise ValueError("mine")
        branch.sync()
        done.append(item)

    def write(s: State) -> None:
        with pytest.raises(ValueError, match="mine") as caught:
            s.map(range(4), body)
        assert caught.value.__notes__ == ["It was raised by item 1 of s.map()."]
        assert sorted(done) == [0, 2, 3]
        eventually(lambda: backend.open_sessions == 1)

    backend = scripted({"x": "x" * 20}, delay_s=0.001)
    run(write, backend)


def test_what_a_body_does_not_read_is_waited_for(scripted: Make) -> None:
    def body(branch: State, item: int) -> State:
        branch += gen("x")
        return branch

    def write(s: State) -> list[bool]:
        return [branch._transcript.find("x").done for branch in s.map(range(3), body)]

    assert run(write, scripted({"x": "x" * 20}, delay_s=0.001)) == [True] * 3


@pytest.mark.timeout(30)
def test_a_map_inside_a_map_inside_a_batch_gets_on(scripted: Make) -> None:
    def body(branch: State, item: int) -> Any:
        branch += f"{item}" + gen("x")
        return branch.map([10 * item, 10 * item + 1], body) if item < 20 else branch["x"]

    program = function(lambda s, i: s.map([i, i + 1], body))
    states = program.run_batch([{"i": 1}] * 20, backend=scripted({"x": "x"}, delay_s=0.0005))
    assert [state.ret_value for state in states] == [[[["x", "x"], ["x", "x"]], ["x", "x"]]] * 20


def test_a_map_of_an_async_program_needs_no_thread(scripted: Make, eventually: Eventually) -> None:
    @function
    async def program(s: AsyncState) -> list[str]:
        async def body(branch: AsyncState, item: int) -> str:
            branch += f"{item}" + gen("x")
            return await branch["x"] + threading.current_thread().name  # type: ignore[no-any-return]

        async def failing(branch: AsyncState, item: int) -> None:
            branch += gen("x")
            raise ValueError("mine")

        assert await s.map([], body) == []
        with pytest.raises(ValueError, match="mine"):
            await s.map([1, 2], failing)
        eventually(lambda: backend.open_sessions == 1)
        return await s.map([1, 2], body)

    backend = scripted({"x": ["a", "b", "c", "d"]}, delay_s=0.001)
    name = threading.current_thread().name
    found = program.run(backend=backend).ret_value
    assert len(found) == 2
    assert all(text.endswith(name) for text in found)

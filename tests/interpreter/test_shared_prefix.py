from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branchwise import Engine
from branchwise.interpreter import AsyncState, Scripted, State, function
from branchwise.interpreter.shared_prefix import common_prefix
from branchwise.lang import RoleBegin, RoleEnd, Text, gen, user

Make = Callable[..., Scripted]


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ([], [Text("a")], []),
        ([Text("abc")], [Text("abc")], [Text("abc")]),
        ([Text("ab1"), Text("x")], [Text("ab2"), Text("x")], [Text("ab")]),
        ([Text("a"), Text("1")], [Text("a"), Text("2")], [Text("a")]),
        ([Text("a")], [Text("a", control=False)], []),
        ([RoleBegin("user"), Text("Q: 1")], [RoleBegin("user"), Text("Q: 2")], [RoleBegin("user"), Text("Q: ")]),
        ([RoleBegin("user"), RoleEnd("user")], [RoleBegin("system")], []),
    ],
)
def test_the_common_prefix_ends_where_the_first_difference_begins(one: Any, other: Any, shared: Any) -> None:
    assert common_prefix(one, other) == common_prefix(other, one) == shared


@function
def waits(s: State, q: str) -> list[str]:
    s += user(f"Answer: {q}" + gen("a"))
    s["a"]
    return held()


@function
async def awaits(s: AsyncState, q: str) -> list[str]:
    s += user(f"Answer: {q}" + gen("a"))
    await s["a"]
    return held()


backends: list[Scripted] = []


def held() -> list[str]:
    return list(backends[-1].held)


@pytest.mark.parametrize("program", [waits, awaits])
@pytest.mark.parametrize("generator_style", [False, True])
def test_what_the_first_two_runs_share_is_held_until_the_batch_is_over(
    program: Any, generator_style: bool, scripted: Make
) -> None:
    backends.append(scripted({"a": "A"}, delay_s=0.0005))
    items = [{"q": q} for q in ("why", "what", "when", "how")]
    states = program.run_batch(items, num_threads=1, generator_style=generator_style, backend=backends[-1])
    assert [state.ret_value for state in states] == [[], [], ["Answer: wh"], ["Answer: wh"]]
    assert held() == []
    assert backends[-1].opened == 5


def test_nothing_is_held_when_every_run_has_begun(scripted: Make) -> None:
    backends.append(scripted({"a": "A"}, delay_s=0.0005))
    waits.run_batch([{"q": "why"}] * 2, num_threads=1, backend=backends[-1])
    meet = threading.Barrier(3, timeout=5)

    def together(s: State) -> None:
        s += "x"
        meet.wait()

    function(together).run_batch([{}] * 3, num_threads=3, backend=backends[-1])
    assert backends[-1].opened == 5


def test_a_failed_batch_holds_nothing(scripted: Make) -> None:
    backends.append(scripted(lambda asked: ValueError("boom") if "bad" in asked.prompt else "A"))
    with pytest.raises(Exception, match="boom"):
        waits.run_batch([{"q": q} for q in ("a", "b", "c", "bad")], num_threads=1, backend=backends[-1])
    assert held() == []


LONG = "The river runs past the old mill and under the bridge. " * 3


@function(temperature=0, max_tokens=2)
def squeezed(s: State, q: str, engine: Engine) -> int:
    s += LONG + q + gen("a")
    s["a"]
    pinned = engine.stats.pinned_slots
    engine.generate(f"{q} something else, " * (engine.num_slots // 20), max_tokens=1)
    return pinned


def run_squeezed(engine: Engine, count: int) -> list[Any]:
    return squeezed.bind(engine=engine).run_batch([{"q": f"{i}"} for i in range(count)], num_threads=1, backend=engine)


def test_a_prefix_is_computed_once_though_others_want_its_place(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=720) as engine:
        prefix_len = len(engine.prompt_tokens(LONG))
        assert 50 < prefix_len <= engine.num_slots // 8
        states = run_squeezed(engine, 6)
        assert [state.ret_value > 0 for state in states] == [False, False, True, True, True, True]
        hits: list[int] = [state.meta("a").usage.hit_tokens for state in states]
        assert all(hit >= prefix_len - 2 for hit in hits[3:]), hits
        engine.check()
        assert engine.stats.pinned_slots == 0


def test_a_prefix_that_takes_much_of_the_room_is_not_held(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=400) as engine:
        assert [state.ret_value for state in run_squeezed(engine, 3)] == [0, 0, 0]

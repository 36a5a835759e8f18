"""Theme 5: forks, joins, batches and errors of programs. Each test is a case, by its number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from branchwise import (
    AsyncState,
    Engine,
    EngineError,
    GenerationError,
    State,
    UnknownVariable,
    function,
    gen,
    set_default_backend,
)


def run(engine: Engine, write: Callable[[State], Any], **options: Any) -> State:
    return function(lambda s: write(s)).run(backend=engine, **options)


def test_074_a_fork_before_any_text_works(engine: Engine) -> None:
    def write(s: State) -> None:
        s += ""
        branches = s.fork(3)
        branches += lambda i: f"Tip {i}: " + gen("t", max_tokens=4)
        branches.join()
        s += "|".join(s["t"])

    state = run(engine, write)
    assert state.text() == "|".join(state["t"])
    assert len(state["t"]) == 3


def test_076_branches_start_from_all_that_their_parent_was_still_to_write(engine: Engine) -> None:
    def write(s: State) -> None:
        s += "A:" + gen("a", max_tokens=8)
        branches = s.fork(4)
        branches += " B:" + gen("b", max_tokens=3)
        for branch in branches:
            assert branch.text().startswith(f"A:{s['a']} B:")
            assert branch["a"] == s["a"]
        assert len(set(branches["b"])) == 1, "greedy twins are equal"

    for _ in range(10):
        run(engine, write)


def test_077_what_a_branch_sets_is_its_own_until_the_join(engine: Engine) -> None:
    def write(s: State) -> None:
        s += "x"
        s["k"] = "parent"
        branches = s.fork(2)
        branches[0]["k"] = "zero"
        branches[0] += gen("only0", max_tokens=2)
        s["late"] = 1
        assert (branches[1]["k"], s["k"]) == ("parent", "parent")
        assert "only0" not in s
        assert "only0" not in branches[1]
        assert "late" not in branches[0]
        branches.join()
        assert s["only0"] == [branches[0]["only0"], None]
        with pytest.raises(KeyError, match="nope"):
            s["nope"]

    run(engine, write)


BAD = "start: nothing_of_this_name"  # no grammar: it is found out where it is compiled


def unmakeable(s: State) -> None:
    s += "x"
    s += gen("a", grammar=BAD)
    s += gen("b")


@pytest.mark.parametrize(
    "way",
    [
        lambda p, e: p.run(backend=e),
        lambda p, e: p.run_batch([{}, {}], backend=e),
        lambda p, e: list(p.run_batch([{}, {}], generator_style=True, backend=e)),
        lambda p, e: list(p.run(stream=True, backend=e).text_iter()),
        lambda p, e: asyncio.run(p.arun(backend=e)),
    ],
    ids=["run", "run_batch", "generator", "stream", "arun"],
)
def test_079_an_error_inside_a_gen_is_raised_by_every_way_to_run(way: Callable[..., Any], engine: Engine) -> None:
    with pytest.raises(GenerationError, match=r'^gen\("a"\): .*nothing_of_this_name') as caught:
        way(function(unmakeable), engine)
    assert isinstance(caught.value.__cause__, EngineError)
    line = unmakeable.__code__.co_firstlineno + 2
    assert f"The call stands at {__file__}:{line}." in caught.value.__notes__


def test_080_a_branch_that_fails_leaves_the_others_their_values(engine: Engine) -> None:
    def write(s: State) -> None:
        branches = s.fork(3)
        branches += lambda i: f"{i}" + (gen("x", grammar=BAD) if i == 1 else gen("x", max_tokens=3))
        with pytest.raises(GenerationError):
            branches.join()
        assert branches[0]["x"]
        assert branches[2]["x"]
        with pytest.raises(GenerationError, match=r'^gen\("x"\): '):
            branches[1]["x"]

    run(engine, write)


@function
def numbered(s: State, i: int, n: int) -> None:
    s += f"{i}:" + gen("x", max_tokens=n, ignore_eos=True)


@function
async def numbered_awaited(s: AsyncState, i: int, n: int) -> None:
    s += f"{i}:" + gen("x", max_tokens=n, ignore_eos=True)
    await s["x"]


@pytest.mark.parametrize("program", [numbered, numbered_awaited], ids=["threads", "tasks"])
@pytest.mark.parametrize("num_threads", [1, 64])
def test_082_states_of_a_batch_come_back_in_order(program: Any, num_threads: int, engine: Engine) -> None:
    items = [{"i": i, "n": 12 if i % 2 else 1} for i in range(60)]
    states = program.run_batch(items, num_threads=num_threads, backend=engine)
    came = list(program.run_batch(items, num_threads=num_threads, generator_style=True, backend=engine))
    for found in (states, came):
        assert [state.text()[: len(f"{i}:")] for i, state in enumerate(found)] == [f"{i}:" for i in range(60)]
        assert len(set(map(id, found))) == 60
    assert [state["x"] for state in states] == [state["x"] for state in came]


def test_083_without_a_limit_a_text_may_have_256_tokens(engine: Engine) -> None:
    state = run(engine, lambda s: s.__iadd__("x" + gen("x", ignore_eos=True)))
    meta: Any = state.meta("x")
    assert (meta.usage.completion_tokens, meta.finish_reason, meta.detail) == (256, "length", "max_tokens")


def test_085_a_variable_that_comes_later_can_be_streamed(engine: Engine) -> None:
    def write(s: State) -> None:
        s += "Pick: " + gen("kind", choices=["cat", "fish"])
        s += (" furry " if s["kind"] == "cat" else " wet ") + gen("v", max_tokens=5, ignore_eos=True)

    state = function(lambda s: write(s)).run(stream=True, backend=engine)
    first, second = state.text_iter(), state.text_iter()
    assert "".join(state.text_iter("kind")) in ("cat", "fish")
    assert "".join(state.text_iter("v")) == state["v"]
    assert "".join(first) == "".join(second) == state.text()
    with pytest.raises(UnknownVariable):
        list(state.text_iter("nope"))


def test_086_a_stream_begins_though_nobody_reads_it_and_ends_when_nobody_holds_it(engine: Engine) -> None:
    program = function(lambda s: s.__iadd__("x" + gen("x", max_tokens=4000, ignore_eos=True)))
    assert function(lambda s: s.__iadd__("x" + gen("x", max_tokens=3))).run(stream=True, backend=engine)["x"]
    state = program.run(stream=True, backend=engine)
    del state
    until = time.monotonic() + 10
    while engine.stats.running or engine.stats.waiting:
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.01)


@pytest.fixture
def two_engines(tiny_model: Path) -> Iterator[tuple[Engine, Engine]]:
    with Engine(tiny_model, num_slots=512, seed=0) as one, Engine(tiny_model, num_slots=512, seed=0) as two:
        yield one, two


def test_several_engines_serve_one_program(two_engines: tuple[Engine, Engine]) -> None:
    one, two = two_engines

    @function(temperature=0, max_tokens=4)
    def inner(s: State) -> str:
        s += "Why? " + gen("a")
        return s["a"]  # type: ignore[no-any-return]

    @function(temperature=0, max_tokens=4)
    def outer(s: State) -> list[str]:
        s += "Why? " + gen("a")
        return [s["a"], inner.run(backend=two).ret_value, inner.run().ret_value]

    set_default_backend(one)
    try:
        assert len(set(outer.run().ret_value)) == 1
    finally:
        set_default_backend(None)
    assert (one.stats.requests, two.stats.requests) == (2, 1)


@pytest.mark.parametrize("way", ["first", "join", "close"])
def test_branches_that_lost_free_their_slots(way: str, engine: Engine) -> None:
    def write(s: State) -> str:
        s += "Go: "
        branches = s.fork(4)
        branches += lambda i: f"{i}" + gen("x", max_tokens=3 if i == 2 else 3000, ignore_eos=True)
        if way == "first":
            assert branches.first() is branches[2]
        elif way == "join":
            branches.join("first")
        else:
            assert branches[2]["x"]
            branches.close()
        until = time.monotonic() + 10
        while engine.stats.running or engine.stats.protected_slots:
            assert time.monotonic() < until, "the losers still run"
            time.sleep(0.01)
        return branches[2]["x"]  # type: ignore[no-any-return]

    assert run(engine, write).ret_value

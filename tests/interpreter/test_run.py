from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from branchwise.interpreter import (
    Cancelled,
    GenerationError,
    NoBackend,
    Scripted,
    State,
    UnknownVariable,
    function,
    set_default_backend,
)
from branchwise.lang import CallError, Gen, GenOptions, LangError, OptionError, gen, select

Make = Callable[..., Scripted]
Eventually = Callable[[Callable[[], bool]], None]


@function
def ask(s: State, q: str = "why") -> str:
    s += q + ": " + gen("a")
    return str(s["a"])


def options_of(backend: Scripted) -> list[GenOptions]:
    return [call.op.options for call in backend.calls if isinstance(call.op, Gen)]


def test_a_run_gives_the_state_and_what_the_function_returned(scripted: Make) -> None:
    state = ask.run(q="how", backend=scripted({"a": "so"}))
    assert (state.ret_value, state["a"], state.text()) == ("so", "so", "how: so")


def test_a_run_needs_a_backend() -> None:
    with pytest.raises(NoBackend) as caught:
        ask.run()
    assert str(caught.value) == (
        'ask: there is no backend to run on. Call set_default_backend(Engine("smollm2-135m")) once, '
        "or run it with backend=..."
    )


def test_the_default_backend_is_used_unless_the_run_names_another(scripted: Make) -> None:
    default, other = scripted({"a": "default"}), scripted({"a": "other"})
    set_default_backend(default)
    try:
        assert ask.run().ret_value == "default"
        assert ask.run(backend=other).ret_value == "other"
    finally:
        set_default_backend(None)


def test_what_is_no_backend_is_refused() -> None:
    with pytest.raises(OptionError) as caught:
        ask.run(backend="cpu")
    assert str(caught.value) == "ask: the backend must be an Engine or another Backend, got 'cpu' (str)."
    with pytest.raises(OptionError, match=r"^set_default_backend\(\): the backend must be"):
        set_default_backend(3)  # type: ignore[arg-type]


def test_options_come_from_the_call_then_the_run_then_the_function_then_the_backend(scripted: Make) -> None:
    @function(max_tokens=30, seed=3, top_p=0.3)
    def program(s: State) -> None:
        s += gen("a", max_tokens=10)
        s += gen("a")

    backend = scripted({"a": "x"}, defaults=GenOptions(max_tokens=40, seed=4, top_p=0.4, temperature=0.4, top_k=4))
    program.run(backend=backend, max_tokens=20, seed=2)
    assert options_of(backend) == [
        GenOptions(
            max_tokens=tokens, seed=2, top_p=0.3, temperature=0.4, top_k=4, n=1, stop=(), stop_regex=(),
            ignore_eos=False, heal=True, on_truncate="keep",
        )
        for tokens in (10, 20)
    ]


def test_branches_have_the_defaults_of_their_run(scripted: Make) -> None:
    backend = scripted({"a": "x"})
    function(lambda s: s.fork(2).__iadd__(gen("a")).join()).run(backend=backend, seed=5)
    assert [options.seed for options in options_of(backend)] == [5, 5]


def test_a_program_goes_on_in_the_state_of_the_one_that_calls_it(scripted: Make) -> None:
    @function(max_tokens=7)
    def inner(s: State, what: str) -> Any:
        s += what + gen("b") + gen("c", max_tokens=8)
        return s["b"]

    @function(max_tokens=5, top_k=2)
    def outer(s: State) -> Any:
        s += gen("a")
        value = inner(s, " and ")
        s += gen("d")
        assert s["c"] == "C"
        return value

    backend = scripted({"a": "A", "b": "B", "c": "C", "d": "D"})
    state = outer.run(backend=backend)
    assert (state.text(), state.ret_value) == ("A and BCD", "B")
    assert [(o.max_tokens, o.top_k) for o in options_of(backend)] == [(5, 2), (7, 2), (8, 2), (5, 2)]
    assert backend.opened == 1


def test_a_branch_that_a_called_program_makes_outlives_the_call(scripted: Make) -> None:
    @function
    def inner(s: State) -> State:
        s += gen("a")
        branch = s.copy()
        branch += gen("b")
        return branch

    state = function(lambda s: inner(s)["b"]).run(backend=scripted({"a": "A", "b": "B"}, delay_s=0.005))
    assert state.ret_value == "B"


def test_a_program_called_without_a_state_says_how_to_run_it() -> None:
    with pytest.raises(CallError) as caught:
        ask("why")
    assert str(caught.value) == (
        "ask(): the first argument must be the state of the program that calls it, got 'why' (str). "
        "To run it on its own, write ask.run(...)."
    )


@pytest.mark.parametrize("kind", [ValueError, LangError, SystemExit])
def test_an_error_of_the_function_goes_through_unchanged_and_cancels_its_work(
    kind: type[BaseException], scripted: Make, eventually: Eventually
) -> None:
    backend = scripted({"long": "x" * 100_000}, delay_s=0.001, piece_len=1)
    error = kind("mine")
    kept: list[State] = []

    def write(s: State) -> None:
        s += gen("long")
        with_branches = s.fork(2).__iadd__(gen("long"))
        kept.extend([s, *with_branches])
        raise error

    with pytest.raises(kind) as caught:
        function(lambda s: write(s)).run(backend=backend)
    assert caught.value is error
    eventually(lambda: backend.open_sessions == 0)
    for state in kept:
        with pytest.raises(Cancelled, match=f"<lambda> raised {kind.__name__}"):
            state["long"]


def test_the_run_waits_for_what_is_queued(scripted: Make) -> None:
    state = function(lambda s: s.__iadd__(gen("a"))).run(backend=scripted({"a": "A" * 40}, delay_s=0.005))
    assert state._transcript.find("a").done


def test_it_runs_inside_a_running_event_loop(scripted: Make) -> None:
    backend = scripted({"a": "A"}, delay_s=0.001)

    async def main() -> tuple[Any, list[str], list[Any]]:
        return (
            ask.run(q="x", backend=backend)["a"],
            list(ask.run(q="x", stream=True, backend=backend).text_iter()),
            [state["a"] for state in ask.run_batch([{"q": "1"}, {"q": "2"}], backend=backend)],
        )

    for _ in range(2):
        assert asyncio.run(main()) == ("A", ["x: ", "A"], ["A", "A"])


def test_a_stream_gives_text_while_the_program_runs(scripted: Make) -> None:
    @function
    def pick(s: State) -> str:
        s += "Pick: " + select("kind", choices=["cat", "fish"])
        s += (" furry " if s["kind"] == "cat" else " wet ") + gen("v")
        return "done"

    backend = scripted({"kind": "cat", "v": "abcdefgh"}, delay_s=0.005)
    state = pick.run(stream=True, backend=backend)
    assert list(state.text_iter("v")) == ["abcd", "efgh"], "it waits for a variable that comes later"
    assert list(state.text_iter("kind")) == ["cat"]
    assert list(state.text_iter()) == ["Pick: ", "cat", " furry ", "abcd", "efgh"]
    assert state.text() == "Pick: cat furry abcdefgh"
    assert state.ret_value == "done"
    message = 'there is no variable "nope". Known: "kind", "v".'
    with pytest.raises(UnknownVariable, match=message):
        list(state.text_iter("nope"))
    with pytest.raises(KeyError, match=message):
        state["nope"]


def test_a_variable_of_a_stream_can_be_read_before_it_is_written(scripted: Make) -> None:
    def write(s: State) -> None:
        time.sleep(0.05)
        s += gen("x")

    state = function(lambda s: write(s)).stream(backend=scripted({"x": "X"}, delay_s=0.01))
    assert state["x"] == "X"


def test_reading_what_a_stream_never_writes_ends_with_the_program(scripted: Make) -> None:
    def write(s: State) -> None:
        time.sleep(0.05)
        s += gen("x")

    state = function(lambda s: write(s)).stream(backend=scripted({"x": "X"}, delay_s=0.01))
    with pytest.raises(UnknownVariable):
        state["nope"]


def test_a_stream_ends_with_the_error_of_its_program(scripted: Make) -> None:
    error = ValueError("mine")

    def write(s: State) -> None:
        s += "so far " + gen("a")
        s.sync()
        raise error

    state = function(lambda s: write(s)).stream(backend=scripted({"a": "A"}, delay_s=0.001))
    got = []
    with pytest.raises(ValueError, match="mine") as caught:
        for piece in state.text_iter():
            got.append(piece)
    assert caught.value is error
    assert got == ["so far ", "A"]
    for read in (lambda: state["nope"], state.text, state.sync, lambda: state.ret_value):
        with pytest.raises(ValueError, match="mine"):
            read()
    assert state["a"] == "A"


def test_what_a_stream_was_still_to_write_fails_with_the_error_of_its_program(
    scripted: Make, eventually: Eventually
) -> None:
    error = ValueError("mine")

    def write(s: State) -> None:
        s += "so far " + gen("a")
        raise error

    state = function(write).stream(backend=scripted({"a": "x" * 100_000}, delay_s=0.001))
    with pytest.raises(ValueError, match="mine") as caught:
        list(state.text_iter())
    assert caught.value is error
    for read in (lambda: state["a"], lambda: state.meta("a"), lambda: list(state.text_iter("a"))):
        with pytest.raises(Cancelled, match=r"^write raised ValueError: mine$") as stopped:
            read()
        assert stopped.value.__cause__ is error
    assert state.error is error


def test_a_stream_ends_with_a_failure_that_its_program_did_not_read(scripted: Make) -> None:
    state = function(lambda s: s.__iadd__("x" + gen("bad"))).stream(backend=scripted({"bad": ValueError("boom")}))
    with pytest.raises(GenerationError, match=r'^gen\("bad"\): boom'):
        list(state.text_iter())
    with pytest.raises(GenerationError, match=r'^gen\("bad"\): boom'):
        state.sync()


def endless(s: State) -> None:
    while True:
        s += gen("a")
        s["a"]


@pytest.mark.parametrize("read", [False, True])
def test_a_stream_that_nobody_holds_ends(read: bool, scripted: Make, eventually: Eventually) -> None:
    backend = scripted({"a": "x" * 50}, delay_s=0.001, piece_len=1)
    state = function(endless).stream(backend=backend)
    if read:
        next(iter(state.text_iter()))
    del state
    eventually(lambda: backend.open_sessions == 0)
    eventually(lambda: not any(thread.name == "branchwise-endless" for thread in threading.enumerate()))


def test_a_stream_that_nobody_holds_ends_also_while_it_waits_for_a_branch(
    scripted: Make, eventually: Eventually
) -> None:
    def wait(s: State) -> None:
        branch = s.copy()
        branch += gen("long")
        branch.sync()

    backend = scripted({"long": "x" * 1_000_000}, delay_s=0.001, piece_len=1)
    state = function(wait).stream(backend=backend)
    eventually(lambda: len(backend.calls) == 1)
    del state
    eventually(lambda: not any(thread.name == "branchwise-wait" for thread in threading.enumerate()))


def test_a_failed_stream_is_not_kept_by_its_error(scripted: Make, eventually: Eventually) -> None:
    def fail(s: State) -> None:
        raise ValueError("mine")

    def read() -> weakref.ref[State]:
        state = function(fail).stream(backend=scripted({}))
        with pytest.raises(ValueError, match="mine"):
            state.sync()
        return weakref.ref(state)

    state = read()
    eventually(lambda: state() is None)


def test_cancelling_a_stream_ends_its_program(scripted: Make, eventually: Eventually) -> None:
    backend = scripted({"a": "x" * 50}, delay_s=0.001, piece_len=1)
    state = function(endless).stream(backend=backend)
    next(iter(state.text_iter()))
    state.cancel()
    with pytest.raises(Cancelled, match=r"cancel\(\) was called"):
        state.sync()
    with pytest.raises(Cancelled):
        list(state.text_iter())


def test_the_decorator_is_used_with_options_or_without() -> None:
    with pytest.raises(LangError, match=r"@function takes one function\. Its options are given by name"):
        function(ask, 3)  # type: ignore[call-overload]
    with pytest.raises(LangError, match=r"@function needs a function, got 3 \(int\)"):
        function(3)  # type: ignore[call-overload]

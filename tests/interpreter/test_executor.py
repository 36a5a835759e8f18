from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from branchwise.interpreter import Cancelled, Completion, Delta, GenerationError, Scripted, State, function
from branchwise.interpreter.executor import Executor
from branchwise.interpreter.outcome import Outcome
from branchwise.interpreter.session import Cancel, Listener, Selection, Session
from branchwise.interpreter.transcript import Ask
from branchwise.lang import Concat, ConstraintError, Gen, GenOptions, Select, Text, gen, select

Make = Callable[..., Scripted]
Eventually = Callable[[Callable[[], bool]], None]


def run(write: Callable[[State], Any], backend: Scripted, **options: Any) -> State:
    return function(lambda s: write(s)).run(backend=backend, **options)


@pytest.fixture(params=[None, 0.001], ids=["at once", "from a thread"])
def delay_s(request: pytest.FixtureRequest) -> float | None:
    """Both ways in which a backend may answer."""
    delay: float | None = request.param
    return delay


def test_operations_are_done_in_order(scripted: Make, delay_s: float | None) -> None:
    backend = scripted({"a": "A", "b": "B", "c": "C"}, delay_s=delay_s)
    run(lambda s: s.__iadd__("1" + gen("a") + "2" + select("b", ["B"]) + "3" + gen("c")), backend)
    assert [call.prompt for call in backend.calls] == ["1", "1A2", "1A2B3"]


def test_the_first_failure_is_raised_at_the_end_of_the_run(scripted: Make, delay_s: float | None) -> None:
    backend = scripted({"a": "A", "bad": ValueError("boom"), "c": "C"}, delay_s=delay_s)
    with pytest.raises(GenerationError) as caught:
        run(lambda s: s.__iadd__("x" + gen("a") + gen("bad") + gen("c")), backend)
    assert str(caught.value) == 'gen("bad"): boom'
    assert isinstance(caught.value.__cause__, ValueError)
    assert [call.op.name for call in backend.calls] == ["a", "bad"], "what comes after the failure is skipped"


def test_a_failure_shows_the_line_of_the_program(scripted: Make) -> None:
    def write(s: State) -> None:
        s += "x"
        s += gen("bad")
        s += gen("other")

    with pytest.raises(GenerationError) as caught:
        run(write, scripted({"bad": ValueError("boom")}))
    line = write.__code__.co_firstlineno + 2
    assert f"The call stands at {__file__}:{line}." in "".join(traceback.format_exception(caught.value))


def test_a_failure_is_raised_at_every_place_that_reads_it(scripted: Make, delay_s: float | None) -> None:
    def write(s: State) -> None:
        s += gen("a") + gen("bad") + gen("c")
        assert s["a"] == "A", "what was done before the failure is there"
        reads: list[Callable[[], object]] = [
            lambda: s["bad"],
            lambda: s["c"],
            lambda: s.get("c"),
            lambda: s.meta("c"),
            s.text,
            s.messages,
            s.sync,
            lambda: list(s.text_iter()),
            lambda: list(s.text_iter("c")),
        ]
        raised = []
        for read in reads * 2:
            with pytest.raises(GenerationError, match=r'^gen\("bad"\): boom') as caught:
                read()
            raised.append(caught.value)
        assert len(set(map(id, raised))) == len(raised), "a fresh exception for each reader"
        assert str(s.error) == 'gen("bad"): boom'
        s += gen("later")
        with pytest.raises(GenerationError, match="boom"):
            s["later"]

    with pytest.raises(GenerationError):
        run(write, scripted({"a": "A", "bad": ValueError("boom"), "later": "x"}, delay_s=delay_s))


def test_an_iterator_gives_what_was_there_before_the_failure(scripted: Make) -> None:
    def write(s: State) -> None:
        s += "start " + gen("a") + gen("bad")
        got = []
        with pytest.raises(GenerationError, match="boom"):
            for piece in s.text_iter():
                got.append(piece)
        assert "".join(got) == "start A"

    with pytest.raises(GenerationError):
        run(write, scripted({"a": "A", "bad": ValueError("boom")}))


def test_an_error_of_the_language_keeps_its_kind(scripted: Make) -> None:
    error = ConstraintError("needs 9000000 states, at most 1000000 are allowed.")
    with pytest.raises(ConstraintError) as caught:
        run(lambda s: s.__iadd__(gen("a", regex="a")), scripted({"a": error}))
    assert str(caught.value) == 'gen("a"): needs 9000000 states, at most 1000000 are allowed.'
    assert caught.value.__cause__ is error


def test_a_state_without_a_failure_has_no_error(scripted: Make) -> None:
    assert run(lambda s: s.__iadd__(gen("a")), scripted({"a": "A"})).error is None


@pytest.mark.timeout(20)
def test_ten_thousand_queued_operations_cost_no_stack(scripted: Make) -> None:
    calls = Concat(tuple(Gen("a", GenOptions()) for _ in range(10_000)))

    def write(s: State) -> None:
        branch = s.copy()
        s += calls
        branch += calls
        assert branch["a"] == "x"

    backend = scripted({"a": "x"})
    assert run(write, backend).text() == "x" * 10_000
    assert len(backend.calls) == 20_000


@pytest.mark.parametrize("last", ["x", ValueError("boom")], ids=["done", "failed"])
def test_two_thousand_forks_of_forks_cost_no_stack(last: str | Exception, scripted: Make) -> None:
    def write(s: State) -> None:
        s += gen("slow")
        state = s
        for _ in range(2_000):
            state = state.copy()
        state += gen("end")
        if isinstance(last, Exception):
            with pytest.raises(GenerationError, match=r'^gen\("slow"\): boom'):
                state["end"]
            raise last
        assert state["end"] == "E"

    backend = scripted({"slow": last, "end": "E"}, delay_s=0.2)
    if isinstance(last, Exception):
        with pytest.raises(ValueError, match="boom"):
            run(write, backend)
    else:
        run(write, backend)


def test_cancel_stops_what_runs_and_what_is_queued(scripted: Make, eventually: Eventually) -> None:
    backend = scripted({"long": "x" * 100_000, "next": "y"}, delay_s=0.001, piece_len=1)

    def write(s: State) -> None:
        s += gen("long") + gen("next")
        branch = s.copy()
        branch += gen("next")
        next(iter(s.text_iter()))
        s.cancel()
        began = time.monotonic()
        for read in (lambda: s["long"], lambda: s["next"], lambda: branch["next"], s.text, s.sync, branch.sync):
            with pytest.raises(Cancelled) as caught:
                read()
            assert str(caught.value) == "cancel() was called"
        assert time.monotonic() - began < 0.5
        eventually(lambda: backend.open_sessions == 0)
        assert isinstance(s.error, Cancelled)

    with pytest.raises(Cancelled):
        run(write, backend)
    assert [call.op.name for call in backend.calls] == ["long"]


def test_cancel_of_an_idle_state_changes_nothing(scripted: Make) -> None:
    def write(s: State) -> None:
        s += gen("a")
        s.sync()
        s.cancel()
        s += gen("a")

    assert run(write, scripted({"a": "x"})).text() == "xx"


def test_a_waiting_reader_is_woken_by_a_cancel(scripted: Make) -> None:
    def write(s: State) -> None:
        s += gen("long")
        threading.Timer(0.05, s.cancel).start()
        with pytest.raises(Cancelled):
            s["long"]

    with pytest.raises(Cancelled):
        run(write, scripted({"long": "x" * 100_000}, delay_s=0.001, piece_len=1))


def test_a_dropped_state_cancels_its_work(scripted: Make, eventually: Eventually) -> None:
    backend = scripted({"long": "x" * 100_000}, delay_s=0.001, piece_len=1)
    state = run(lambda s: None, backend)
    state += gen("long")
    del state
    eventually(lambda: backend.open_sessions == 0)
    assert len(backend.calls) == 1


def test_branches_go_on_when_the_state_they_came_from_is_dropped(scripted: Make) -> None:
    def write(s: State) -> None:
        def make() -> State:
            middle = s.copy()
            middle += gen("a")
            return middle.copy()

        branch = make()
        branch += gen("b")
        assert branch["a"] == "A" * 20
        assert branch["b"] == "B"

    run(write, scripted({"a": "A" * 20, "b": "B"}, delay_s=0.005))


class Faulty:
    """A session that breaks, and counts whether it was closed."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.closed = 0

    def append(self, segment: object) -> None:
        raise self.error

    def prepare(self, gen: Gen) -> None:
        pass

    def generate(self, gen: Gen, listener: Listener[Completion]) -> Cancel:
        raise self.error

    def select(self, select: Select, listener: Listener[Selection]) -> Cancel:
        raise self.error

    def fork(self, count: int) -> list[Session]:
        raise self.error

    def close(self) -> None:
        self.closed += 1


def test_a_session_that_raises_fails_the_operation_and_is_closed() -> None:
    session = Faulty(RuntimeError("broken"))
    executor = Executor(session)
    outcome = Outcome()
    executor.add([Ask(Gen("a", GenOptions()), outcome, "here:1")])
    with pytest.raises(GenerationError, match=r'^gen\("a"\): broken'):
        outcome.value()
    assert session.closed == 1


def test_a_session_that_cannot_append_fails_what_comes_after() -> None:
    session = Faulty(RuntimeError("broken"))
    executor = Executor(session)
    executor.add([Text("x")])
    with pytest.raises(GenerationError, match=r"^appending text: broken"):
        executor.wait()
    assert session.closed == 1


def test_an_answer_that_contradicts_its_pieces_is_a_failure_and_no_hang() -> None:
    class Liar(Faulty):
        def generate(self, gen: Gen, listener: Listener[Completion]) -> Cancel:
            listener.on_delta(Delta("one"))
            listener.on_done(Completion("two", "stop"))
            return lambda: None

    outcome = Outcome()
    Executor(Liar(ValueError())).add([Ask(Gen("a", GenOptions()), outcome, "here:1")])
    with pytest.raises(GenerationError, match="pieces 'one' are not the beginning of the text 'two'"):
        outcome.value()


def test_what_is_cancelled_while_it_is_being_asked_is_stopped() -> None:
    stopped: list[str | None] = []

    class Slow(Faulty):
        def generate(self, gen: Gen, listener: Listener[Completion]) -> Cancel:
            executor.stop("the test says so")

            def stop() -> None:
                stopped.append(gen.name)
                listener.on_done(Completion("", "cancelled"))

            return stop

    session, outcome = Slow(ValueError()), Outcome()
    executor = Executor(session)
    executor.add([Ask(Gen("a", GenOptions()), outcome, "here:1")])
    assert stopped == ["a"]
    assert session.closed == 1
    with pytest.raises(Cancelled, match="the test says so"):
        outcome.value()

"""Faults at every seam of the step loop: nobody hangs, nobody gets a wrong answer, no slot, lock or thread is lost.

Each row of the table names a call, by the object that has it. It raises once, at its first, fifth or twentieth call
while requests of many kinds run; then all is asked for again.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from branchwise import Engine, EngineError, GenerationError, State, function, gen
from branchwise.runtime import EngineClosed, GenerateParams, Result
from branchwise.runtime import loop as loop_module
from branchwise.runtime import runner as runner_module
from branchwise.runtime import scheduler as scheduler_module
from branchwise.runtime.constrain.automaton import Walk
from branchwise.runtime.constrain.guidance import GuidanceState
from branchwise.runtime.request import Request
from branchwise.runtime.stops import StopMatcher
from branchwise.runtime.text import Detokenizer

WAIT_S = 30.0
HEAD = list(range(10, 30))
SCHEMA = '{"type": "object", "properties": {"a": {"const": "xy"}}, "required": ["a"], "additionalProperties": false}'
ASKED: list[tuple[list[int], dict[str, Any]]] = [
    ([*HEAD, 50], {}),
    ([*HEAD, 51, 52], {"n": 3, "temperature": 1.0, "seed": 3}),
    ([*HEAD[:7], 60], {"stop": ("a", "\n")}),
    ([*range(100, 145)], {"temperature": 0.8, "seed": 4, "return_logprob": True}),
    ([5], {"regex": "(yes|no) [0-9]{4}"}),
    ([6, 7], {"json_schema": SCHEMA}),
    ([*HEAD, 50, 51], {"cache_salt": "s"}),
]


class Panic(BaseException):
    """What compiled code raises when it panics: no `Exception`."""


@dataclass(frozen=True)
class Fault:
    """`owner` has `call`, which raises `error`. At most `lost` requests may fail by it; all if it `ends` the engine."""

    call: str
    owner: Callable[[Engine], Any]
    lost: int = 0
    error: type[BaseException] = RuntimeError
    ends: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.call}-{self.error.__name__}"


def scheduler(engine: Engine) -> Any:
    return engine._loop._scheduler


def tree(engine: Engine) -> Any:
    return engine._loop._scheduler.tree


TIERS = (("num_slots", 80), ("host_cache_bytes", 1 << 20))
PAGES = (("page_size", 16),)
FAULTS = [
    # planning: the tree is left by all, checked, and all try again
    Fault("plan", scheduler),
    Fault("_admit", scheduler),
    Fault("_continue", scheduler),
    Fault("_place", scheduler),
    Fault("_place_draft", scheduler),
    Fault("_seal_prompt", scheduler),
    Fault("_finish_plan", scheduler),
    Fault("_restore", scheduler, options=TIERS),
    Fault("build_layout", lambda _: scheduler_module),
    Fault("fresh_nodes", tree),
    Fault("match", tree, lost=1),  # it comes while a request is queued, before there is a step
    Fault("reserve", tree),
    Fault("append", tree),
    Fault("append", tree, options=PAGES),
    Fault("allocate", lambda engine: tree(engine).pool),
    Fault("allocate", lambda engine: tree(engine).pool, error=MemoryError),
    Fault("fetch", lambda engine: engine._tiers, options=TIERS),
    Fault("restore", lambda engine: engine._tiers, options=TIERS),
    Fault("on_evict", tree, options=TIERS),
    # the pass: it is taken back, and each tries alone
    Fault("attn_batch", lambda _: runner_module),
    Fault("plan", lambda engine: engine._loop._runner._attention),
    Fault("forward", lambda engine: engine.model),
    Fault("forward", lambda engine: engine.model, error=torch.OutOfMemoryError),
    Fault("rows_without_numbers", lambda _: loop_module),
    # drawing, constraints, text: of one request
    Fault("draw", lambda engine: engine._loop._drawer),
    Fault("_adjust", lambda engine: engine._loop._drawer, lost=1),
    Fault("_adjust", lambda engine: engine._loop._drawer, lost=1, error=Panic),
    Fault("mask", lambda _: Walk, lost=1, error=Panic),
    Fault("advance", lambda _: Walk, lost=1),
    Fault("advance", lambda _: GuidanceState, lost=1, error=Panic),
    Fault("forced_tokens", lambda _: GuidanceState, lost=1, error=Panic),
    Fault("take", lambda _: Request, lost=1),
    Fault("take_rest", lambda _: Request, lost=1),
    Fault("result", lambda _: Request, lost=1),
    Fault("push", lambda _: Detokenizer, lost=1),
    Fault("push", lambda _: StopMatcher, lost=1),
    Fault("flush", lambda _: StopMatcher, lost=1),
    Fault("_record", lambda engine: engine._loop, lost=1),
    # compiling and encoding: what is asked with one call fails together
    Fault("_compile", lambda engine: engine._compiler, lost=1),
    Fault("_compile", lambda engine: engine._compiler, lost=1, error=Panic),
    Fault("detokenizer", lambda engine: engine.tokenizer, lost=3),
    # bookkeeping after the pass: nothing is known to be right any more, the engine ends and says so
    Fault("commit", tree, ends=True),
]


class Once:
    """A call that raises, once, the `at`-th time."""

    def __init__(self, real: Callable[..., Any], error: BaseException, at: int) -> None:
        self.real, self.error, self.left = real, error, at

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.real(*args, **options)


def ask_for_all(engine: Engine) -> list[list[Result | Exception]]:
    """Each as it ended, an error too. Nobody waits for longer than `WAIT_S`."""
    waits: list[list[Future[Result | Exception]]] = []
    for prompt, options in ASKED:
        n = options.get("n", 1)
        own: list[Future[Result | Exception]] = [Future() for _ in range(n)]
        waits.append(own)
        params = {"temperature": 0, "max_tokens": 24, "ignore_eos": True} | options
        params.pop("n", None)
        try:
            engine.start(
                array("i", prompt),
                GenerateParams(**params),
                n=n,
                on_delta=lambda *_: None,
                on_done=lambda sample, result, own=own: own[sample].set_result(result),
            )
        except BaseException as error:
            for wait in own:
                if not wait.done():
                    wait.set_result(error if isinstance(error, Exception) else EngineError(repr(error)))
    return [[wait.result(WAIT_S) for wait in own] for own in waits]


def texts(results: list[list[Result | Exception]]) -> list[list[tuple[str, tuple[int, ...]] | None]]:
    return [[(r.text, r.tokens) if isinstance(r, Result) else None for r in own] for own in results]


def assert_idle(engine: Engine) -> None:
    until = time.monotonic() + WAIT_S
    while engine.stats.running or engine.stats.waiting:
        assert time.monotonic() < until, engine.stats
        time.sleep(0.005)
    engine.check()
    stats = engine.stats
    assert (stats.protected_slots, stats.held_slots, stats.pinned_slots) == (0, 0, 0)
    assert stats.free_slots + stats.evictable_slots == stats.num_slots


def make(folder: Path, **options: Any) -> Engine:
    return Engine(folder, **{"num_slots": 512, "max_step_tokens": 16, "max_running": 8, "seed": 0, **options})


@pytest.fixture(scope="module")
def wanted(tiny_model: Path) -> list[list[tuple[str, tuple[int, ...]] | None]]:
    with make(tiny_model) as engine:
        found = texts(ask_for_all(engine))
    assert all(one is not None for own in found for one in own), found
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_is_survived(
    fault: Fault, tiny_model: Path, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = 0
    for at in (1, 5, 20):
        engine = make(tiny_model, **dict(fault.options))
        owner = fault.owner(engine)
        once = Once(getattr(owner, fault.call), fault.error("injected"), at)
        is_method = isinstance(owner, type)
        monkeypatch.setattr(owner, fault.call, (lambda self, *a, o=once, **k: o(self, *a, **k)) if is_method else once)
        found = texts(ask_for_all(engine))
        monkeypatch.undo()
        raised += once.left <= 0
        missing = sum(one is None for own in found for one in own)
        for own, good in zip(found, wanted, strict=True):
            assert all(one in (None, right) for one, right in zip(own, good, strict=True))
        if fault.ends and once.left <= 0:
            with pytest.raises(EngineClosed, match=r"its step loop failed: .*injected"):
                engine.generate([5])
        else:
            assert missing <= fault.lost, f"{missing} requests failed"
            assert texts(ask_for_all(engine)) == wanted
            assert_idle(engine)
        engine.close()
        assert not any(thread.is_alive() for thread in engine._loop._threads)
    assert raised, "the fault never came"


# ----------------------------------------------------------------------------------------------- what users' code does


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with make(tiny_model, num_slots=2048) as engine:
        yield engine
        assert_idle(engine)
    assert not any(thread.is_alive() for thread in engine._loop._threads)


@function
def ask(s: State, q: str, max_tokens: int = 4) -> None:
    s += q + gen("a", max_tokens=max_tokens, ignore_eos=True, temperature=0)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt, Panic])
def test_a_callback_that_raises_holds_up_nobody(error: type[BaseException], engine: Engine) -> None:
    told: list[int] = []

    def fail(*_: Any) -> None:
        told.append(1)
        raise error("mine")

    params = GenerateParams(max_tokens=6, temperature=0, ignore_eos=True)
    for _ in range(3):
        engine.start(array("i", [5, 6]), params, on_delta=fail, on_done=fail)
    assert ask.run("x", backend=engine)["a"]
    assert len(told) > 3


def test_a_watcher_that_raises_sees_no_more_and_stops_nobody(engine: Engine) -> None:
    seen: list[int] = []

    def watch(_: Any) -> None:
        seen.append(1)
        raise RuntimeError("mine")

    engine._ask(lambda _: engine._loop.watchers.append(watch))
    assert ask.run("x", backend=engine)["a"]
    assert seen == [1]


def test_a_tokenizer_that_fails_fails_its_program_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = engine.tokenizer.encode

    def failing(text: str, **options: Any) -> Any:
        if "poison" in text:
            raise RuntimeError("the tokenizer is broken")
        return encode(text, **options)

    right = ask.run("x", backend=engine)["a"]
    monkeypatch.setattr(engine.tokenizer, "encode", failing)
    asked = [{"q": "x"}, {"q": "poison"}, {"q": "x"}]
    first, failed, last = ask.run_batch(asked, backend=engine, return_exceptions=True)
    assert isinstance(failed, BaseException) and "the tokenizer is broken" in str(failed)
    assert isinstance(first, State) and isinstance(last, State)
    assert first["a"] == last["a"] == right


def test_functions_that_raise_or_take_their_time_leave_others_alone(engine: Engine) -> None:
    stuck = threading.Event()

    @function
    def mixed(s: State, kind: str) -> None:
        s += "x" + gen("a", max_tokens=4, ignore_eos=True, temperature=0)
        if kind == "raises":
            raise ValueError("mine")
        if kind == "sticks":
            assert stuck.wait(WAIT_S)

    right = ask.run("x", backend=engine)["a"]
    found: list[Any] = []
    kinds = [{"kind": kind} for kind in ("sticks", "raises", "fine")]
    options: dict[str, Any] = {"backend": engine, "num_threads": 3, "return_exceptions": True}
    batch = threading.Thread(target=lambda: found.extend(mixed.run_batch(kinds, **options)))
    batch.start()
    assert ask.run("x", backend=engine)["a"] == right  # one of them still sticks
    stuck.set()
    batch.join(WAIT_S)
    sticks, raises, fine = found
    assert isinstance(raises, ValueError)
    assert sticks["a"] == fine["a"] == right


def test_an_engine_that_is_closed_with_programs_in_flight_answers_all_of_them(tiny_model: Path) -> None:
    engine = make(tiny_model, num_slots=4096)
    states = [ask.stream(f"{i}", max_tokens=1500, backend=engine) for i in range(8)]
    next(states[0].text_iter())
    engine.close()
    for state in states:
        with pytest.raises(GenerationError, match="the engine was closed"):
            _ = state["a"]
    assert not any(thread.is_alive() for thread in engine._loop._threads)


def test_a_state_that_is_dropped_in_flight_leaves_no_request(engine: Engine) -> None:
    for i in range(5):
        ask.stream(f"{i}", max_tokens=1500, backend=engine)
    assert ask.run("x", backend=engine)["a"]
    assert_idle(engine)


def test_of_two_engines_one_may_end(tiny_model: Path, engine: Engine) -> None:
    other = make(tiny_model)
    right = ask.run("x", backend=engine)["a"]
    other._ask(lambda _: setattr(other._loop._scheduler, "plan", None))
    with pytest.raises(GenerationError, match="its step could not be planned 2 times: TypeError"):
        ask.run("x", backend=other)
    other.close()
    assert ask.run("x", backend=engine)["a"] == right

"""Theme 7: who runs, how many fit, and what happens to those who leave. Each test is a case, by its number."""

from __future__ import annotations

import random
import threading
import time
from array import array
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from branchwise import Engine, GenerationError, State, function, gen
from branchwise.runtime import GenerateParams, Result
from tests.told import completion_of

Tokens = list[int]


def start(engine: Engine, prompt: Tokens, count: int, **options: Any) -> tuple[Any, Future[Result]]:
    done: Future[Result] = Future()
    params = GenerateParams(max_tokens=count, temperature=0, ignore_eos=True)
    handle = engine.start(array("i", prompt), params, on_done=lambda _, result: done.set_result(result), **options)
    return handle, done


def idle(engine: Engine) -> None:
    until = time.monotonic() + 20
    while engine.stats.running or engine.stats.waiting:
        assert time.monotonic() < until, engine.stats
        time.sleep(0.01)
    engine.check()
    assert engine.stats.protected_slots == 0


def test_101_a_cold_request_starts_though_hot_ones_keep_coming(tiny_model: Path) -> None:
    """Under "lpm", at most 16 admissions overtake it."""
    hot, order = list(range(10, 110)), list[str]()
    with Engine(tiny_model, num_slots=2048, max_running=2, policy="lpm") as engine:
        start(engine, hot, 1)[1].result(30)
        ends = threading.Semaphore(0)

        def ask(prompt: Tokens, name: str) -> None:
            def on_done(_: int, result: Result | Exception) -> None:
                order.append(name)
                ends.release()

            params = GenerateParams(max_tokens=2, temperature=0, ignore_eos=True)
            engine.start(array("i", prompt), params, on_done=on_done)

        for i in range(6):
            ask([*hot, i + 5], "hot")
        ask(list(range(200, 220)), "cold")
        for i in range(60):  # six are queued at any time
            assert ends.acquire(timeout=30)
            ask([*hot, i + 20], "hot")
        for _ in range(7):
            assert ends.acquire(timeout=30)
    assert order.index("cold") <= 6 + 16 + 2


def test_103_an_answer_is_cut_to_the_context_and_not_refused(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=512, context_length=128) as engine:
        result = engine.generate(list(range(5, 125)), max_tokens=200, temperature=0)
        assert len(result.tokens) <= 8
        assert (result.finish_reason, result.detail) in {("length", "context"), ("stop", "eos")}


def test_104_one_that_needs_more_than_there_is_ends_or_is_refused(tiny_model: Path) -> None:
    @function
    def program(s: State, words: int, max_tokens: int) -> None:
        s += "x" * words + gen("a", max_tokens=max_tokens, ignore_eos=True, heal=False)

    with Engine(tiny_model, num_slots=64, context_length=1024) as engine:
        with pytest.raises(GenerationError, match="needs 80 slots, 64 are free"):
            program.run(80, 8, backend=engine)
        long = program.run(40, 100, backend=engine)
        meta = completion_of(long, "a")
        assert (meta.finish_reason, meta.detail) == ("length", "slots")
        assert 20 <= meta.usage.completion_tokens <= 25
        assert program.run(4, 4, backend=engine)["a"] is not None
        idle(engine)


def test_106_states_that_nobody_holds_leave_no_request(tiny_model: Path) -> None:
    @function
    def program(s: State, i: int) -> None:
        s += f"{i}" + gen("a", max_tokens=1900, ignore_eos=True)

    with Engine(tiny_model, num_slots=8192, seed=0) as engine:
        for i in range(20):
            stream = program.stream(i, backend=engine).text_iter("a")
            next(stream)
            del stream
            program.stream(i, backend=engine)  # and one that nobody ever reads
        idle(engine)
        assert engine.stats.generated_tokens < 20 * 1900
        assert program.run(1, backend=engine)


def test_107_what_waits_and_what_is_read_in_part_can_be_cancelled(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=4096, max_running=1, max_step_tokens=8) as engine:
        alone = engine.generate(list(range(7, 20)), max_tokens=6, temperature=0, ignore_eos=True).tokens
        engine.reset_cache()
        long = [3 + i % 390 for i in range(1500)]
        (a, a_done), (_, b_done), (c, c_done), (d, d_done) = (
            start(engine, prompt, 6) for prompt in (long, list(range(7, 20)), [5, 6], [6, 7])
        )
        for handle in (c, a, d, d):
            handle.cancel()
        assert b_done.result(30).tokens == alone
        for done in (a_done, c_done, d_done):
            assert done.result(30).finish_reason == "cancelled"
        for handle in (a, c, d):
            handle.cancel()
        idle(engine)


def test_109_constraints_stay_with_their_own_requests(tiny_model: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    @function
    def program(s: State, kind: str, i: int) -> None:
        s += f"{kind} {i}: "
        match kind:
            case "free":
                s += gen("x", max_tokens=1 + i * 7, seed=i, temperature=1.0, ignore_eos=True)
            case "json":
                s += gen("x", json_schema=schema, max_tokens=40, on_truncate="close")
            case _:
                s += gen("x", regex=f"[a-f]{{{i + 1}}}", max_tokens=40)

    asked = [{"kind": kind, "i": i} for kind in ("free", "json", "regex") for i in range(8)]
    with Engine(tiny_model, num_slots=8192, seed=0, max_running=8) as engine:
        alone = {i: program.run("free", i, backend=engine)["x"] for i in range(8)}
        for shuffle in range(8):
            order = random.Random(shuffle).sample(asked, len(asked))
            for one, state in zip(order, program.run_batch(order, backend=engine, num_threads=24), strict=True):
                kind, i = str(one["kind"]), int(str(one["i"]))
                if kind == "free":
                    assert state["x"] == alone[i]
                elif kind == "regex":
                    assert len(state["x"]) == i + 1 and set(state["x"]) <= set("abcdef")
                else:
                    assert completion_of(state).complete
        idle(engine)


def test_110_a_long_prompt_holds_up_no_stream_for_longer_than_a_chunk(tiny_model: Path) -> None:
    """Counted in steps: while 2,000 tokens are read, each of the streams goes on by one token a step."""
    with Engine(tiny_model, num_slots=8192, max_step_tokens=128, max_running=16) as engine:
        streams = [start(engine, [5 + i, 6], 200) for i in range(8)]
        while engine.stats.running < 8:
            time.sleep(0.001)
        before = engine.stats
        _, done = start(engine, [3 + i % 390 for i in range(2000)], 1)
        done.result(60)
        took = engine.stats.since(before)
        assert took.steps >= 2000 / 128
        for handle, _ in streams:
            handle.cancel()
        lengths = [len(stream.result(30).tokens) for _, stream in streams]
        assert max(lengths) - min(lengths) <= 2
        assert min(lengths) >= min(200, 2000 // 128)
        idle(engine)

"""A kernel that gives NaN: who it hits is told so or tries again, others go on, and nothing spoilt stays cached."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.runtime import Engine, EngineError, GenerateParams, Result
from branchwise.runtime.model import StepInput

from ..conftest import MakeTiny

POISON = 399
Tokens = list[int]


class SpoiltAttention:
    """An engine's attention that gives NaN for the rows of one token, as often as is said."""

    def __init__(self, engine: Engine, times: int) -> None:
        self.times = times
        self._tokens = torch.empty(0)
        self._attend, self._forward = engine._loop._runner._attention.forward, engine.model.forward
        engine._loop._runner._attention.forward = self.attend  # type: ignore[method-assign]  # a spy in its place
        engine.model.forward = self.forward            # type: ignore[method-assign]  # likewise

    def forward(self, step: StepInput) -> Tensor:
        self._tokens = step.tokens
        logits = self._forward(step)
        self.times -= bool((step.tokens == POISON).any())
        return logits

    def attend(self, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        out = self._attend(layer, q, k_pool, v_pool)
        if self.times > 0:
            out[self._tokens == POISON] = torch.nan
        return out


@pytest.fixture
def folder(make_tiny: MakeTiny) -> Path:
    return make_tiny("qwen3")  # whose layers call attention one by one


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_a_step_left_in_a_buffer_is_not_in_the_next_ones_answers(kind: str, make_tiny: MakeTiny) -> None:
    """The first step after it that has as many rows, of another request that shares nothing with it."""
    with Engine(make_tiny(kind), num_slots=512) as engine:
        fused = getattr(engine.model, "_fused", None)
        assert fused is None or fused.loading.result() is not None
        wanted = greedy(engine, [7, 8, 9])
        greedy(engine, HEAD)

        def spoil(scheduler: Any) -> None:
            slots = scheduler.tree.match(array("i", HEAD)).node.path()[0].slots
            for values in engine._loop._pool.v:
                values[list(slots[:20])] = torch.nan

        engine._ask(spoil)
        engine._ask(lambda scheduler: setattr(scheduler, "forget", lambda *_: None))  # so that it comes again
        with pytest.raises(EngineError, match="not numbers"):
            greedy(engine, [*HEAD, 5, 6, 7])
        engine._ask(lambda scheduler: delattr(scheduler, "forget"))
        assert greedy(engine, [7, 8, 9]) == wanted
        engine.reset_cache()
        assert greedy(engine, [7, 8, 9]) == wanted


Make = Callable[..., Engine]


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(folder, **{"num_slots": 512, "seed": 0, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check()
        assert not spoilt_slots(engine)
        stats = engine.stats
        assert stats.free_slots + stats.evictable_slots + stats.pinned_slots == stats.num_slots
        engine.close()


def spoilt_slots(engine: Engine) -> int:
    """Cached tokens whose keys or values are no numbers."""
    pool = engine._loop._pool

    def count(scheduler: Any) -> int:
        return sum(int(pool.gather(node.slots).isnan().any(dim=1).sum()) for node in scheduler.tree.nodes())

    return engine._ask(count)


def greedy(engine: Engine, prompt: Tokens, count: int = 8, **options: Any) -> Tokens:
    return list(engine.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True, **options).tokens)


def told(engine: Engine, prompt: Tokens) -> str:
    """Why it failed."""
    with pytest.raises(EngineError) as caught:
        greedy(engine, prompt)
    return str(caught.value)


HEAD = list(range(10, 40))
CHUNKED = {"max_step_tokens": 8, "max_running": 4}
CASES = [{}, CHUNKED, {"page_size": 16}, {"page_size": 16, **CHUNKED}]


@pytest.mark.parametrize("options", CASES, ids=["whole", "chunked", "pages", "pages, chunked"])
def test_who_always_gets_nan_fails_with_its_reason_and_leaves_nothing_spoilt(
    make: Make, options: dict[str, Any]
) -> None:
    engine = make(**options)
    good = greedy(engine, HEAD)
    SpoiltAttention(engine, times=10**6)
    for prompt in ([*HEAD, POISON], [*HEAD, POISON, *range(50, 90)], [POISON]):
        said = told(engine, prompt)
        assert "the model's scores for the next token are not numbers (nan)" in said
        assert "failed 2 times" in said
        assert not spoilt_slots(engine)
        assert greedy(engine, HEAD) == good


@pytest.mark.parametrize("options", CASES, ids=["whole", "chunked", "pages", "pages, chunked"])
def test_a_kernel_that_gives_nan_once_changes_no_answer(make: Make, options: dict[str, Any]) -> None:
    prompts = [[*HEAD, POISON, *range(50, 50 + more)] for more in (0, 1, 30)]
    clean = make(**options)
    wanted = [greedy(clean, prompt) for prompt in prompts]
    for prompt, answer in zip(prompts, wanted, strict=True):
        engine = make(**options)
        SpoiltAttention(engine, times=1)
        assert greedy(engine, prompt) == answer
        assert greedy(engine, prompt) == answer


def test_others_of_the_step_and_those_that_share_what_is_spoilt_are_right(make: Make) -> None:
    engine = make(num_slots=2048, max_step_tokens=16, max_running=8)
    others = [[*HEAD, 100 + i] for i in range(6)]
    wanted = [greedy(engine, prompt) for prompt in others]
    engine.reset_cache()
    SpoiltAttention(engine, times=10**6)
    with ThreadPoolExecutor(12) as pool:
        bad = [pool.submit(told, engine, [*HEAD, POISON, *range(50, 60 + i)]) for i in range(6)]
        fine = [pool.submit(greedy, engine, prompt) for prompt in others]
        assert [one.result(60) for one in fine] == wanted
        assert all("not numbers (nan)" in one.result(60) for one in bad)


def test_scores_are_not_nan_either(make: Make) -> None:
    engine = make()
    wanted = engine.score(HEAD, [[50, 51]])
    SpoiltAttention(engine, times=10**6)
    with pytest.raises(EngineError, match="not numbers"):
        engine.score(HEAD, [[50, POISON, 51, 52]])
    assert engine.score(HEAD, [[50, 51]]) == wanted


def test_a_spoilt_page_does_not_come_back_from_host_memory(make: Make, folder: Path) -> None:
    engine = make(num_slots=64, host_cache_bytes=1 << 20)
    prompt = [*HEAD, POISON, 50]
    wanted = greedy(make(num_slots=64), prompt)
    greedy(engine, prompt)

    def spoil(scheduler: Any) -> None:
        end = scheduler.tree.match(array("i", prompt)).node
        engine._loop._pool.k[1][list(end.path()[0].slots[20:21])] = torch.nan

    engine._ask(spoil)
    greedy(engine, list(range(200, 250)))  # evicts it
    greedy(engine, list(range(250, 300)))
    assert greedy(engine, prompt) == wanted


def test_who_shares_a_spoilt_path_while_it_runs_is_computed_anew(make: Make) -> None:
    """A long answer goes on behind tokens that become spoilt: another request finds out, and both come out right."""
    engine, prompt = make(num_slots=2048), HEAD[:20]
    wanted = greedy(engine, prompt, 60), greedy(engine, [*prompt, 7], 8)
    engine.reset_cache()
    done, results = threading.Event(), list[Result | Exception]()
    started = threading.Event()

    def finish(_: int, result: Result | Exception) -> None:
        results.append(result)
        done.set()

    params = GenerateParams(max_tokens=60, temperature=0, ignore_eos=True)
    engine.start(array("i", prompt), params, on_delta=lambda *_: started.set(), on_done=finish)
    assert started.wait(20)

    def spoil(scheduler: Any) -> None:
        slots = scheduler.tree.match(array("i", prompt)).node.path()[0].slots
        engine._loop._pool.v[1][slots[3]] = torch.nan

    engine._ask(spoil)
    assert greedy(engine, [*prompt, 7], 8) == wanted[1]
    assert done.wait(20)
    assert isinstance(results[0], Result)
    assert list(results[0].tokens) == wanted[0]

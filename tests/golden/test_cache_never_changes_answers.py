"""The cache never changes an answer: every way to reach a token gives transformers' token, in float32."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from branchwise.runtime import Engine, GenerateParams, Result
from branchwise.runtime.kv import bytes_per_slot

from ..conftest import MakeTiny

KINDS = ["llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma", "gemma2", "gemma3", "gpt2"]
NEW = 24

Tokens = list[int]
Ask = Callable[[Engine, Tokens, int], Tokens]


def greedy(engine: Engine, prompt: Sequence[int], count: int) -> Tokens:
    return list(engine.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True).tokens)


@cache
def loaded(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def transformers_greedy(folder: Path, prompt: Tokens, count: int) -> Tokens:
    tokens = torch.tensor([prompt])
    output = loaded(folder).generate(  # type: ignore[operator]  # nn.Module types every attribute as a tensor
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    generated: Tokens = output[0, len(prompt) :].tolist()
    return generated


def prompts(seed: int, vocab_size: int = 400) -> list[Tokens]:
    """Prompts of many lengths, some of which share a prefix, contain or equal each other."""
    rng = random.Random(seed)
    base = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 50))] for _ in range(6)]
    return [*base, [*base[0][:20], 7, 8], base[1] + base[2], [*base[1], 9], base[3], base[4][:1]]


def cold(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    with Engine(folder, num_slots=1024) as engine:
        for prompt in asked:
            yield greedy(engine, prompt, NEW)
            engine.reset_cache()


def warm(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    with Engine(folder, num_slots=4096) as engine:
        for prompt in asked:
            greedy(engine, prompt, NEW)
        for prompt in asked:
            before = engine.stats
            yield greedy(engine, prompt, NEW)
            assert engine.stats.since(before).hit_tokens == len(prompt) - 1


def chunked(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    with Engine(folder, num_slots=4096, max_step_tokens=7, max_running=5) as engine:
        for prompt in asked:
            yield greedy(engine, prompt, NEW)


def together(engine: Engine, asked: list[Tokens]) -> list[Tokens]:
    """Ask for all at once: the engine takes no step before it has them."""
    all_there, waits = threading.Event(), [Future[Tokens]() for _ in asked]

    def hold(_: object) -> None:
        all_there.wait(30)

    def on_done(wait: Future[Tokens], result: Result | Exception) -> None:
        assert isinstance(result, Result), result
        wait.set_result(list(result.tokens))

    holding = threading.Thread(target=engine._ask, args=(hold,))
    holding.start()
    params = GenerateParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    for prompt, wait in zip(asked, waits, strict=True):
        engine.start(array("i", prompt), params, on_done=lambda _, result, wait=wait: on_done(wait, result))
    all_there.set()
    holding.join()
    return [wait.result(60) for wait in waits]


def batched(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    with Engine(folder, num_slots=4096, max_step_tokens=64, max_running=8) as engine:
        yield from together(engine, asked)


def in_pages(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    with Engine(folder, num_slots=512, page_size=16, max_step_tokens=50, max_running=8) as engine:
        for _ in range(2):
            answers = together(engine, asked)
            engine.check()
        assert engine.stats.hit_tokens > 0
        yield from answers


def after_eviction(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    with Engine(folder, num_slots=128) as engine:
        for _ in range(2):
            answers = [greedy(engine, prompt, NEW) for prompt in asked]
        assert engine.stats.evicted_slots > 0
        yield from answers


def retracted(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    room = max(map(len, asked)) + NEW  # for the longest alone
    with Engine(folder, num_slots=room + 4, max_step_tokens=32, max_running=8) as engine:
        engine._loop._scheduler._still_needed = float  # type: ignore[method-assign]  # admits whoever fits now
        answers = together(engine, asked)
        assert engine.stats.retracted > 0
        engine.check()
        yield from answers


def forked_in_mid_generation(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    with Engine(folder, num_slots=4096) as engine, ThreadPoolExecutor(4) as pool:
        for prompt in asked:
            half = greedy(engine, prompt, NEW // 2)
            ends = list(pool.map(lambda _, p=prompt, h=half: greedy(engine, p + h, NEW - NEW // 2), range(4)))
            assert all(end == ends[0] for end in ends)
            yield half + ends[0]


def eight_samples(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    with Engine(folder, num_slots=4096) as engine:
        for prompt in asked:
            results = engine.generate(prompt, n=8, max_tokens=NEW, temperature=0, ignore_eos=True)
            assert len({result.tokens for result in results}) == 1
            yield list(results[0].tokens)


def from_tiers(folder: Path, asked: list[Tokens], page_size: int, **options: Any) -> list[Tokens]:
    """Ask for all, alone and together, in a pool so small that what one takes is evicted by others, and comes back."""
    options = {"num_slots": barely_enough(asked), "page_size": page_size, **options}
    with Engine(folder, max_step_tokens=32, max_running=8, **options) as engine:
        for _ in range(2):
            answers = [greedy(engine, prompt, NEW) for prompt in asked]
        assert together(engine, asked) == answers
        engine.check()
        assert engine.stats.restored_tokens > 0
        return answers


def barely_enough(asked: list[Tokens]) -> int:
    """Slots for the longest prompt and its answer, in whole pages of 16."""
    return -(-(max(map(len, asked)) + NEW) // 16) * 16


def from_host_tier(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    slot_bytes = slot_bytes_of(folder)
    answers = from_tiers(folder, asked, 16, host_cache_bytes=2000 * slot_bytes)
    assert from_tiers(folder, asked, 1, host_cache_bytes=200 * slot_bytes) == answers  # itself too small
    yield from answers


def from_disk_tier(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    slot_bytes = slot_bytes_of(folder)
    with TemporaryDirectory() as disk:
        options: dict[str, Any] = {"disk_cache_bytes": 900 * slot_bytes, "disk_cache_path": disk}
        answers = from_tiers(folder, asked, 1, **options)
        assert from_tiers(folder, asked, 16, host_cache_bytes=100 * slot_bytes, **options) == answers
        assert not list(Path(disk).iterdir())
    yield from answers


def from_saved_cache(folder: Path, asked: list[Tokens]) -> Iterator[Tokens]:
    with TemporaryDirectory() as place:
        for page_size in (1, 16):
            file = Path(place) / f"{page_size}.safetensors"
            with Engine(folder, num_slots=4096, page_size=page_size) as engine:
                for prompt in asked:
                    greedy(engine, prompt, NEW)
                assert engine.save_cache(file) > 0
            with Engine(folder, num_slots=barely_enough(asked), page_size=page_size) as small:  # holds a part of it
                assert small.load_cache(file) == small.num_slots
                small.check()
                answers = [greedy(small, prompt, NEW) for prompt in asked]
            with Engine(folder, num_slots=4096, page_size=page_size) as engine:
                engine.load_cache(file)
                for prompt, answer in zip(asked, answers, strict=True):
                    before = engine.stats
                    assert greedy(engine, prompt, NEW) == answer
                    found = engine.stats.since(before).hit_tokens
                    assert found == min(len(prompt) // page_size * page_size, len(prompt) - 1)
                engine.check()
    yield from answers


def slot_bytes_of(folder: Path) -> int:
    with Engine(folder, num_slots=16) as engine:
        return bytes_per_slot(engine.model.specs, engine.model.dtype)


ROUTES = [
    cold,
    warm,
    chunked,
    batched,
    in_pages,
    after_eviction,
    retracted,
    forked_in_mid_generation,
    eight_samples,
    from_host_tier,
    from_disk_tier,
    from_saved_cache,
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_of_a_tiny_model_equal_transformers(
    kind: str, route: Callable[[Path, list[Tokens]], Iterator[Tokens]], make_tiny: MakeTiny
) -> None:
    folder, asked = make_tiny(kind), prompts(seed=1)
    wanted = [tiny_answer(folder, tuple(prompt)) for prompt in asked]
    assert list(route(folder, asked)) == wanted


@cache
def tiny_answer(folder: Path, prompt: tuple[int, ...]) -> Tokens:
    return transformers_greedy(folder, list(prompt), NEW)


def test_tiny_models_write_enough_different_tokens_to_tell(make_tiny: MakeTiny) -> None:
    for kind in KINDS:
        distinct = [len(set(tiny_answer(make_tiny(kind), tuple(prompt)))) for prompt in prompts(seed=1)]
        assert sum(distinct) / len(distinct) > 6, f"{kind}: {distinct}"


DEMO_TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "The capital of France is Paris. The capital of Italy is",
]


@cache
def demo_answer(folder: Path, prompt: tuple[int, ...]) -> Tokens:
    return transformers_greedy(folder, list(prompt), NEW)


@pytest.mark.slow
@pytest.mark.timeout(300)  # some routes run several engines one after another
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_greedy_tokens_of_the_demo_model_equal_transformers(
    route: Callable[[Path, list[Tokens]], Iterator[Tokens]], demo_model: Path
) -> None:
    with Engine(demo_model, num_slots=16) as engine:
        asked = [list(engine.prompt_tokens(text)) for text in DEMO_TEXTS]
    wanted = [demo_answer(demo_model, tuple(prompt)) for prompt in asked]
    if route in (after_eviction, retracted):  # pools so small that they would not hold these prompts' answers twice
        asked, wanted = asked * 3, wanted * 3
    assert list(route(demo_model, asked)) == wanted

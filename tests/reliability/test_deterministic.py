"""`deterministic=True`: the logits after a prefix have the same bits whatever is around it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.runtime import Engine, EngineError, RequestError
from branchwise.runtime.attention import AttnSpec, attn_batch
from branchwise.runtime.attention.deterministic import DeterministicAttention
from branchwise.runtime.attention.reference import ReferenceAttention
from branchwise.runtime.layout import Layout, Wanted, build_layout
from branchwise.runtime.model.deterministic import Tiled, by_row, tiled
from branchwise.runtime.request import Request
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import RadixTree

from ..conftest import MakeTiny
from ..runtime.trees import place

Tokens = list[int]
Bits = dict[tuple[int, ...], bytes]

KINDS = ["llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma2", "gemma3"]
STATES: list[dict[str, Any]] = [
    {"num_slots": 4096},
    {"num_slots": 4096, "max_step_tokens": 7, "max_running": 5},
    {"num_slots": 512, "page_size": 16, "max_step_tokens": 50, "max_running": 8},
    {"num_slots": 160, "max_step_tokens": 33, "max_running": 8},
    {"num_slots": 160, "page_size": 16, "max_step_tokens": 64, "max_running": 8, "host_cache_bytes": 1 << 20},
]


class Logits:
    """All that an engine's steps give, by the tokens before; a prefix whose bits differ from the first is counted."""

    def __init__(self, bits: Bits) -> None:
        self.bits, self.differing, self.seen = bits, 0, 0

    def watch(self, engine: Engine) -> None:
        draw: Callable[[Tensor, Any], Any] = engine._loop._draw

        def spy(logits: Tensor, wanted: Sequence[tuple[Request, list[int]]]) -> Any:
            for request, rows in wanted:
                tokens = (request.tokens + request.draft).tolist()
                for i, row in enumerate(rows):
                    self._take(tuple(tokens[: request.first_wanted + 1 + i]), logits[row].numpy().tobytes())
            return draw(logits, wanted)

        engine._loop._draw = spy  # type: ignore[method-assign]  # a spy in its place

    def _take(self, prefix: tuple[int, ...], bits: bytes) -> None:
        self.seen += 1
        self.differing += self.bits.setdefault(prefix, bits) != bits


def prompts(rng: random.Random) -> list[Tokens]:
    stems = [[rng.randrange(3, 399) for _ in range(rng.randint(1, 70))] for _ in range(3)]
    return [rng.choice(stems)[: rng.randint(1, 70)] + [rng.randrange(3, 399)] * rng.randint(0, 3) for _ in range(10)]


def ask_for_all(engine: Engine, asked: list[Tokens], at_once: int, count: int = 10) -> list[Tokens]:
    def ask(prompt: Tokens) -> Tokens:
        return list(engine.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True).tokens)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, asked))


def tokens_and_differences(folder: Path, states: list[dict[str, Any]], seed: int, **options: Any) -> tuple[int, int]:
    """How many logits were seen in all states, and how many of them were not as the first time; the answers agree."""
    asked, bits, seen, differing = prompts(random.Random(seed)), Bits(), 0, 0
    answers: list[list[Tokens]] = []
    for number, state in enumerate(states):
        with Engine(folder, **state, **options) as engine:
            logits = Logits(bits)
            logits.watch(engine)
            for at_once in (1, 8):  # the second time with a warm cache
                order = random.Random(number).sample(range(len(asked)), len(asked))
                found = ask_for_all(engine, [asked[i] for i in order], at_once)
                answers.append([found[order.index(i)] for i in range(len(asked))])
            engine.check()
        seen, differing = seen + logits.seen, differing + logits.differing
    if options.get("deterministic"):
        assert all(answer == answers[0] for answer in answers)
    return seen, differing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_equal_in_every_batch_chunk_page_and_state_of_the_cache(
    kind: str, dtype: str, make_tiny: MakeTiny
) -> None:
    seen, differing = tokens_and_differences(make_tiny(kind), STATES, 1, dtype=dtype, deterministic=True)
    assert seen > 500
    assert differing == 0


def test_a_product_that_sees_the_number_of_rows_is_noticed(
    make_tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tiled, "__call__", lambda self, x: self.linear(x) * (1 + 1e-6 * (len(x) % 3)))
    bits, differing = Bits(), 0
    for state in STATES[:2]:
        with Engine(make_tiny("llama"), **state, deterministic=True) as engine:
            logits = Logits(bits)
            logits.watch(engine)
            ask_for_all(engine, prompts(random.Random(1)), 4)
        differing += logits.differing
    assert differing > 0


def test_packed_matrices_are_deterministic_too(make_tiny: MakeTiny) -> None:
    options = {"dtype": "bfloat16", "quantization": "int8", "deterministic": True}
    assert tokens_and_differences(make_tiny("llama"), STATES[:3], 2, **options)[1] == 0


def test_scores_are_equal_to_the_last_bit(make_tiny: MakeTiny) -> None:
    with Engine(make_tiny("llama"), num_slots=1024, deterministic=True) as engine:
        prompt, more = list(range(5, 60)), [[7, 8, 9], [7, 8], [10]]
        alone = [engine.score(prompt, [one])[0] for one in more]
        engine.reset_cache()
        assert engine.score(prompt, more) == alone
        assert engine.score(prompt, more) == alone


def test_what_was_saved_is_what_would_be_computed_and_other_caches_are_refused(
    make_tiny: MakeTiny, tmp_path: Path
) -> None:
    folder, asked, bits = make_tiny("llama"), prompts(random.Random(5)), Bits()
    for load in (False, True):
        with Engine(folder, num_slots=4096, deterministic=True) as engine:
            logits = Logits(bits)
            if load:
                assert engine.load_cache(tmp_path / "cache") > 0
            logits.watch(engine)
            ask_for_all(engine, asked, 4)
            engine.save_cache(tmp_path / "cache")
            assert logits.differing == 0
    with Engine(folder, num_slots=4096) as engine:
        assert engine.load_cache(tmp_path / "cache") > 0
        engine.save_cache(tmp_path / "other")
    with (
        Engine(folder, num_slots=4096, deterministic=True) as engine,
        pytest.raises(EngineError, match=r"differs in arithmetic \(none there, deterministic here\)"),
    ):
        engine.load_cache(tmp_path / "other")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt2", {}, "deterministic is for models like Llama, and gpt2 runs on transformers' own code"),
        ("llama", {"dtype": "float16"}, "deterministic is for a CPU, in float32 or bfloat16, not for cpu in"),
        ("llama", {"deterministic": 1}, "deterministic must be True or False, got 1"),
    ],
)
def test_where_it_cannot_be_held_it_is_refused(
    kind: str, options: dict[str, Any], message: str, make_tiny: MakeTiny
) -> None:
    with pytest.raises(RequestError, match=message):
        Engine(make_tiny(kind), **{"num_slots": 64, "deterministic": True, **options})


# --------------------------------------------------------------------------------------------------------- its parts


def long_step(seed: int, page_size: int, num_slots: int) -> Layout:
    """Sequences of up to three blocks of keys, which share some; part of one is cached."""
    rng, tree = random.Random(seed), RadixTree(SlotPool(num_slots, page_size))
    stem = [rng.randrange(9) for _ in range(150)]
    tree.unlock(place(tree, stem[: rng.randint(16, 150) // page_size * page_size]))
    tree.commit()
    texts = [stem[: rng.randint(1, 150)] + [rng.randrange(9) for _ in range(rng.randint(1, 40))] for _ in range(4)]
    ends = [(place(tree, text), len(text) - 1) for text in texts]
    return build_layout(tree.fresh_nodes(), [Wanted(node, len(node) - 1, position) for node, position in ends])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 5.0)])
def test_attention_equals_the_reference(
    dtype: torch.dtype, page_size: int, window: int | None, softcap: float | None
) -> None:
    spec = AttnSpec(4, 2, 16, 0.25, window, softcap)
    generator = torch.Generator().manual_seed(0)
    for seed in range(4):
        num_slots = 1024
        layout = long_step(seed, page_size, num_slots)
        batch = attn_batch(layout, num_slots, torch.device("cpu"), page_size)
        q = torch.randn(len(layout.tokens), 4, 16, generator=generator).to(dtype)
        k, v = (torch.randn(num_slots + page_size, 2, 16, generator=generator).to(dtype) for _ in "kv")
        ours, reference = DeterministicAttention(), ReferenceAttention()
        for attention in (ours, reference):
            attention.plan(batch, [spec])
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(
            ours.forward(0, q, k, v), reference.forward(0, q, k, v), rtol=tolerance, atol=tolerance
        )
        for found, wanted in zip(
            ours.partial(batch.flat, 0, q, k, v), reference.partial(batch.flat, 0, q, k, v), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_a_product_whose_bits_depend_on_the_place_in_a_tile_is_made_row_by_row() -> None:
    def crooked(x: Tensor) -> Tensor:
        return x * torch.linspace(1.0, 1.0 + 1e-6, len(x))[:, None]

    assert tiled(crooked, 8, torch.float32).rows == 1
    straight = tiled(lambda x: x * 2, 8, torch.float32)
    assert straight.rows > 1
    for count in (1, straight.rows, straight.rows + 1):
        assert len(straight(torch.ones(count, 8))) == count


def test_a_product_never_sees_another_number_of_rows() -> None:
    shapes: set[int] = set()

    def product(x: Tensor) -> Tensor:
        shapes.add(len(x))
        return x

    for count in range(1, 40):
        x = torch.rand(count, 4)
        assert torch.equal(Tiled(product, 16)(x), x)
    assert shapes == {16}
    assert torch.equal(by_row(torch.neg, x), -x)

"""The GPU's backend, over a stand-in that checks what FlashInfer would be given, and computes what it would."""

from __future__ import annotations

import logging
import random
import sys
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.runtime import Engine, running
from branchwise.runtime.attention import Attention, AttnSpec, Level, attn_batch, choice
from branchwise.runtime.attention.flashinfer import (
    LEAST_WORKSPACE,
    FlashInferAttention,
    cost_model,
    merges,
    unsupported,
    workspace_bytes,
)
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.attention.reference import ReferenceAttention
from branchwise.runtime.gpu import libraries
from branchwise.runtime.gpu.libraries import Missing
from branchwise.runtime.layout import build_layout
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import RadixTree
from tests import flashinfer_standin
from tests.golden.test_cache_never_changes_answers import NEW, prompts, together, transformers_greedy

from ..conftest import MakeTiny
from .trees import place, random_step

CPU = torch.device("cpu")
NUM_SLOTS, H, K, D = 480, 6, 2, 64
ALWAYS = CostModel(price=0.0, max_levels=3)


class Library:
    """The stand-in as a module, with what was made of it."""

    def __init__(self) -> None:
        self.wrappers: list[Any] = []
        self.merge_state_in_place = flashinfer_standin.merge_state_in_place

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> Any:  # its name there
        self.wrappers.append(flashinfer_standin.BatchPrefillWithPagedKVCacheWrapper(*args, **kwargs))
        return self.wrappers[-1]

    @property
    def pages_read(self) -> int:
        return sum(wrapper.pages_read for wrapper in self.wrappers)


def backend(library: Library) -> FlashInferAttention:
    return FlashInferAttention(library, CPU, torch.float32)


def pools(page_size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(NUM_SLOTS + page_size, K, D), torch.randn(NUM_SLOTS + page_size, K, D)


@pytest.mark.parametrize("cost", [None, ALWAYS])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(20))
def test_it_equals_the_reference_on_random_trees(seed: int, page_size: int, cost: CostModel | None) -> None:
    torch.manual_seed(seed)
    attention, reference = backend(Library()), ReferenceAttention()
    scale = D**-0.5
    specs = [AttnSpec(H, K, D, scale), AttnSpec(H, K, D, scale, window=5), AttnSpec(H, K, D, scale, softcap=10.0)]
    for step in range(3):
        *_, layout = random_step(random.Random(seed + 100 * step), NUM_SLOTS, page_size)
        batch = attn_batch(layout, NUM_SLOTS, CPU, page_size, cost)
        q, (k_pool, v_pool) = torch.randn(len(layout.tokens), H, D), pools(page_size)
        for each in (attention, reference):
            each.plan(batch, specs)
        for layer in (0, 1, 2, 0):
            expected = reference.forward(layer, q, k_pool, v_pool)
            torch.testing.assert_close(attention.forward(layer, q, k_pool, v_pool), expected)
        found = attention.partial(batch.flat, 0, q, k_pool, v_pool)
        for ours, theirs in zip(found, reference.partial(batch.flat, 0, q, k_pool, v_pool), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("page_size", [1, 10])
def test_a_shared_prefix_is_read_once(page_size: int) -> None:
    """P + N * suffix tokens where it is worth a level, N * (P + suffix) where it is not."""
    tree = RadixTree(SlotPool(NUM_SLOTS // page_size * page_size, page_size))
    prefix = list(range(100))
    ends = [place(tree, [*prefix, *range(200 + 10 * i, 210 + 10 * i)]) for i in range(12)]
    tree.commit()
    for i, node in enumerate(ends):
        tree.append(node, array("i", range(500 + 10 * i, 510 + 10 * i)))
    layout = build_layout(tree.fresh_nodes(), [])
    read: list[int] = []
    for cost in (ALWAYS, CostModel(least_saved=20_000)):
        library = Library()
        attention = backend(library)
        attention.plan(attn_batch(layout, NUM_SLOTS, CPU, page_size, cost), [AttnSpec(H, K, D, D**-0.5)])
        attention.forward(0, torch.randn(len(layout.tokens), H, D), *pools(page_size))
        read.append(library.pages_read * page_size)
    assert read == [100 + 12 * 20, 12 * 120]


def test_two_steps_in_a_row_have_wrappers_of_their_own() -> None:
    """What was planned for one step is still being copied while the next one is planned."""
    library = Library()
    attention = backend(library)
    *_, layout = random_step(random.Random(0), NUM_SLOTS, 1)
    for expected in (1, 2, 2, 2):
        attention.plan(attn_batch(layout, NUM_SLOTS, CPU), [AttnSpec(H, K, D, 1.0)] * 4)
        assert len(library.wrappers) == expected


def level(groups: Sequence[int]) -> Level:
    """So many groups of so many rows, a key for each."""
    ends = torch.tensor([0, *groups]).cumsum(0).int()
    return Level(ends, ends.clone(), torch.arange(int(ends[-1])).int(), torch.ones(len(groups)).int(), 1, causal=True)


def test_the_workspace_is_as_large_as_a_step_may_need() -> None:
    """What was measured with FlashInfer's planner: 32 heads, 8 key heads of 128, a row each."""
    spec = AttnSpec(32, 8, 128, 1.0)
    for rows, mib in ((256, 80), (512, 161)):
        needed = workspace_bytes(level([1] * rows), spec) / 2**20
        assert mib * 0.75 < needed < mib * 1.3, needed
    attention = backend(Library())
    batch: Any = SimpleNamespace(levels=(level([1] * 2000),), flat=None)
    attention._reserve(batch, {spec})
    assert len(attention._workspace) == workspace_bytes(level([1] * 2000), spec) > LEAST_WORKSPACE


def test_what_its_kernels_do_not_take_is_named() -> None:
    fine, small = AttnSpec(H, K, 128, 1.0), AttnSpec(H, K, 32, 1.0)
    assert unsupported([fine], torch.bfloat16) is None
    assert unsupported([fine], torch.float32) == "its kernels take float16 and bfloat16, not torch.float32"
    assert unsupported([fine, small], torch.float16) == "its kernels take heads of 64, 128, 256 numbers, not 32"


def test_more_heads_than_it_can_merge_share_nothing() -> None:
    """So many threads of a block: what its kernel for merges has been seen to take."""
    for heads, size in ((128, 64), (64, 128), (32, 256)):
        assert merges(AttnSpec(heads, 8, size, 1.0), torch.bfloat16)
        assert not merges(AttnSpec(2 * heads, 8, size, 1.0), torch.bfloat16)
    assert cost_model([AttnSpec(128, 8, 128, 1.0)], torch.bfloat16).max_levels == 0


def test_sharing_must_be_worth_its_launches() -> None:
    cost = cost_model([AttnSpec(32, 8, 128, 1.0)], torch.bfloat16)
    assert cost.pays(16, 4096)
    assert not cost.pays(8, 256)
    assert not cost.pays(1, 10**6)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_whole_models_give_the_tokens_of_transformers(
    make_tiny: MakeTiny, kind: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = make_tiny(kind), prompts(3)
    made: list[Library] = []

    def attention_for(model: Any, pool: Any) -> tuple[Attention, CostModel]:
        made.append(Library())
        return backend(made[-1]), ALWAYS

    monkeypatch.setattr(running, "attention_for", attention_for)
    with Engine(folder, num_slots=2048, page_size=page_size, max_step_tokens=64, max_running=8) as engine:
        for _ in range(2):
            found = together(engine, asked)
        engine.check()
    assert found == [transformers_greedy(folder, prompt, NEW) for prompt in asked]
    assert made[0].pages_read > 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model on a GPU that there is not: as much of one as is looked at when a backend is chosen."""
    for name in ("flashinfer", "triton"):
        monkeypatch.setattr(choice, name, lambda *_, name=name: Missing(f"no {name} here"))
    monkeypatch.setattr(choice, "gpu_lacks", lambda device: None)
    return SimpleNamespace(device=torch.device("cuda"), specs=[AttnSpec(H, K, D, 1.0)])


def test_a_gpu_without_its_libraries_says_so_and_goes_on(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    pool: Any = SimpleNamespace(dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, "branchwise"):
        attention, _ = choice.attention_for(gpu, pool)
    assert isinstance(attention, ReferenceAttention)
    assert caplog.messages == [
        "attention runs in plain torch, right and slow: FlashInfer cannot be used (no flashinfer here; nor Triton: no "
        "triton here)"
    ]


def test_an_old_gpu_and_a_dtype_that_flashinfer_has_not_are_named(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "branchwise"):
        choice.attention_for(gpu, SimpleNamespace(dtype=torch.float32))  # type: ignore[arg-type]  # a pool's dtype
        monkeypatch.setattr(choice, "gpu_lacks", lambda device: "it has compute capability 7.0, and 8.0 is needed")
        monkeypatch.setattr(choice, "triton", lambda device: SimpleNamespace())
        attention, _ = choice.attention_for(gpu, SimpleNamespace(dtype=torch.bfloat16))  # type: ignore[arg-type]  # likewise
    assert isinstance(attention, ReferenceAttention)
    assert "(its kernels take float16 and bfloat16, not torch.float32; nor Triton" in caplog.messages[0]
    assert "(it has compute capability 7.0, and 8.0 is needed)" in caplog.messages[1]


def test_a_library_that_cannot_compile_its_kernels_is_named(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrapper(*args: Any, **options: Any) -> Any:
        raise RuntimeError("Could not find nvcc:\n  install it")

    broken = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=wrapper)
    monkeypatch.setattr(choice, "flashinfer", lambda: broken)
    monkeypatch.setattr(choice, "is_gpu", lambda device: True)
    gpu.device = torch.device("meta")
    attention, _ = choice.attention_for(gpu, SimpleNamespace(dtype=torch.bfloat16))  # type: ignore[arg-type]  # a pool's dtype
    assert isinstance(attention, ReferenceAttention)
    assert "FlashInfer cannot be used (RuntimeError: Could not find nvcc: install it; nor Triton" in caplog.text


def test_a_library_that_cannot_be_imported_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    libraries.flashinfer.cache_clear()
    missing = libraries.flashinfer()
    libraries.flashinfer.cache_clear()
    assert isinstance(missing, Missing)
    assert missing.reason.startswith("ModuleNotFoundError: import of flashinfer halted")
    assert missing.reason.endswith("Install it with: pip install branchwise[cuda]")

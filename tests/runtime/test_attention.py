"""The reference backend against torch's own attention, and the step's arrays against FlashInfer's rules."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from branchwise.runtime.attention import Attention, AttnSpec, attn_batch, merge
from branchwise.runtime.attention.cpu import CpuAttention
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.attention.reference import ReferenceAttention, attend
from branchwise.runtime.layout import Layout, build_layout
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import RadixTree

from .trees import place, random_step

CPU = torch.device("cpu")
NUM_SLOTS, H, K, D = 256, 4, 2, 64


def pools() -> tuple[Tensor, Tensor]:
    return torch.randn(NUM_SLOTS + 1, K, D), torch.randn(NUM_SLOTS + 1, K, D)


def row_by_row(layout: Layout, q: Tensor, k_pool: Tensor, v_pool: Tensor, window: int | None) -> Tensor:
    """Each row alone, by torch's own attention."""
    out = torch.empty_like(q)
    for segment in layout.segments:
        path = [slot for span in segment.path for slot in span.slots]
        for i in range(segment.num_rows):
            end = len(path) - segment.num_rows + i + 1
            seen = path[max(0, end - window) if window else 0 : end]
            row = segment.first_row + i
            k, v = (pool[seen].transpose(0, 1) for pool in (k_pool, v_pool))
            out[row] = scaled_dot_product_attention(q[row, :, None], k, v, enable_gqa=True)[:, 0]
    return out


@pytest.mark.parametrize("cost", [None, CostModel(price=0.0, max_levels=3), CostModel(price=2.0)])
@pytest.mark.parametrize("backend", [ReferenceAttention(), CpuAttention()], ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seed", range(20))
def test_a_backend_equals_torch_on_random_trees(
    seed: int, window: int | None, page_size: int, backend: Attention, cost: CostModel | None
) -> None:
    torch.manual_seed(seed)
    *_, layout = random_step(random.Random(seed), NUM_SLOTS, page_size)
    q, (k_pool, v_pool) = torch.randn(len(layout.tokens), H, D), pools()
    backend.plan(attn_batch(layout, NUM_SLOTS, CPU, page_size, cost), [AttnSpec(H, K, D, D**-0.5, window)])
    torch.testing.assert_close(backend.forward(0, q, k_pool, v_pool), row_by_row(layout, q, k_pool, v_pool, window))


def test_a_shared_prefix_is_read_once_for_all_rows_below_it() -> None:
    tree = RadixTree(SlotPool(NUM_SLOTS))
    prefix = list(range(100))
    ends = [place(tree, [*prefix, 200 + i]) for i in range(16)]
    tree.commit()
    ends = [tree.append(node, array("i", [300 + i, 301]))[0] for i, node in enumerate(ends)]
    layout = build_layout(tree.fresh_nodes(), [])
    shared, rest = attn_batch(layout, NUM_SLOTS, CPU, cost=CostModel()).levels
    assert len(shared.kv_indices) == 100
    assert shared.qo_indptr.tolist() == [0, 32]
    assert len(rest.kv_indices) == 16 * 3
    flat = attn_batch(layout, NUM_SLOTS, CPU).flat
    assert len(flat.kv_indices) == 16 * 103


def test_rows_that_write_nothing_name_the_scratch_slot() -> None:
    for seed in range(20):
        *_, layout = random_step(random.Random(seed), NUM_SLOTS)
        slots = attn_batch(layout, NUM_SLOTS, CPU).write_slots.tolist()
        assert slots == [NUM_SLOTS if slot < 0 else slot for slot in layout.write_slots]


def test_attention_over_two_halves_merges_to_attention_over_the_whole() -> None:
    torch.manual_seed(0)
    spec = AttnSpec(H, K, D, D**-0.5, softcap=20.0)
    q, k, v = torch.randn(3, H, D), torch.randn(10, K, D), torch.randn(10, K, D)
    whole = attend(q, k, v, spec, causal=False)
    halves = attend(q, k[:4], v[:4], spec, causal=False), attend(q, k[4:], v[4:], spec, causal=False)
    for got, wanted in zip(merge(*halves[0], *halves[1]), whole, strict=True):
        torch.testing.assert_close(got, wanted)


def test_merging_with_nothing_changes_nothing() -> None:
    out, lse = torch.randn(2, H, D), torch.randn(2, H)
    nothing = torch.zeros(2, H, D), torch.full((2, H), -torch.inf)
    for got, wanted in zip(merge(out, lse, *nothing), (out, lse), strict=True):
        torch.testing.assert_close(got, wanted)
    merged, empty = merge(*nothing, *nothing)
    assert torch.equal(merged, nothing[0])
    assert torch.equal(empty, nothing[1])

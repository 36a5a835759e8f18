"""FlashInfer's own wrappers and planners, on a CPU: our backend over them, for random trees. Run by its test.

The environment must name a fake libcudart (`fake_cudart.c`) in LD_LIBRARY_PATH, and a folder where FlashInfer may build
its module for sm_90a. Kernels are launched and do nothing; what is planned is real, and is compared with the arrays.
"""

from __future__ import annotations

import ctypes
import random
import sys
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from branchwise.runtime.attention import AttnSpec, Level, attn_batch
from branchwise.runtime.attention.flashinfer import FlashInferAttention
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.gpu.graphs import fill_up, shape_of
from tests.runtime.trees import decode_step, random_step

CPU = torch.device("cpu")
HEADS, KV, SIZE, NUM_SLOTS = 6, 2, 64, 480
FIELDS = "padded rows rows_offset tile request q_tile kv_tile merge o_indptr chunk v s mask graph split"
"""Of a plan's vector of integers, in its order; places are in bytes of the integer workspace."""


def load() -> tuple[Any, Any]:
    """The fake libcudart, and FlashInfer upon it."""
    runtime = ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
    empty = torch.empty

    def unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    torch.empty = unpinned  # type: ignore[assignment]  # memory is pinned by CUDA, which is not there
    return runtime, import_module("flashinfer")


def planned(wrapper: Any) -> tuple[dict[str, int], set[tuple[int, int, int]], int]:
    """A plan: its integers, the work items that it lists (group, tile of queries, part of the keys), size of a part."""
    plan = dict(zip(FIELDS.split(), wrapper._plan_info, strict=False))
    memory = wrapper._int_workspace_buffer.numpy().view("int32")
    lists = [memory[plan[name] // 4 :][: plan["padded"]].tolist() for name in ("request", "q_tile", "kv_tile")]
    return plan, set(zip(*lists, strict=True)), int(memory[plan["chunk"] // 4])


def expected(level: Level, plan: dict[str, int], chunk: int) -> set[tuple[int, int, int]]:
    """The work items that the arrays of a level describe."""
    items = set()
    pages = level.kv_indptr.tolist()
    for group, (first, end) in enumerate(pairwise(level.qo_indptr.tolist())):
        keys = (pages[group + 1] - pages[group]) * level.page_size
        tiles = -(-(end - first) * (HEADS // KV) // plan["tile"])
        parts = max(1, -(-max(keys, 1) // chunk)) if plan["split"] else 1
        items |= {(group, tile, part) for tile in range(tiles) for part in range(parts)}
    return items


def main(trees: int) -> None:
    runtime, flashinfer = load()
    made: list[Any] = []

    def wrapper(*args: Any, **options: Any) -> Any:
        made.append(flashinfer.BatchPrefillWithPagedKVCacheWrapper(*args, **options))
        return made[-1]

    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=wrapper,
        merge_state_in_place=lambda out, lse, more, more_lse: None,  # its module takes tensors on a GPU only
    )
    attention = FlashInferAttention(library, CPU, torch.bfloat16)
    levels = graphs = 0
    for seed in range(trees):
        page_size = (1, 16)[seed % 2]
        rng = random.Random(seed)
        *_, layout = random_step(rng, NUM_SLOTS, page_size)
        if seed % 3 == 0:
            layout = decode_step(rng, rng.randint(1, 6), NUM_SLOTS, page_size)
        batch = attn_batch(layout, NUM_SLOTS, CPU, page_size, CostModel(price=0.0, max_levels=2))
        k, v = torch.zeros(2, NUM_SLOTS + page_size, KV, SIZE, dtype=torch.bfloat16)
        spec, shape = AttnSpec(HEADS, KV, SIZE, SIZE**-0.5), shape_of(batch)
        recorded = None
        if shape is not None:
            batch, graphs = fill_up(batch, shape, NUM_SLOTS // page_size), graphs + 1
            recorded = attention.record(batch, 4096)
        attention.plan(batch, [spec], recorded)
        before = runtime.fake_launches()
        attention.forward(0, torch.zeros(batch.num_rows, HEADS, SIZE, dtype=torch.bfloat16), k, v)
        assert runtime.fake_launches() - before >= len(batch.levels), "a level was not launched"
        for number, level in enumerate(batch.levels):
            plan, found, chunk = planned(attention._wrappers.get(spec, number))
            wanted = expected(level, plan, chunk)
            if recorded is None:
                assert found == wanted, (seed, number, found ^ wanted)
            else:
                assert wanted <= found, (seed, number)  # the grid of a graph is as large as it may ever need to be
            levels += 1
    print(f"{flashinfer.__version__}: {levels} levels of {trees} trees, {graphs} of them for graphs")


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Attention on a GPU by kernels of our own: for heads and dtypes that FlashInfer has no kernels for, or without it.

A step is a list of *items*: some rows of a group with some of its keys, of any level; each is a program for each key
head, which leaves a partial result. A second kernel merges the parts of every row. So sharing, windows and splitting
long paths over the GPU's processors are all the same to the kernels, and a step is two launches a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..devices import synchronize
from ..gpu.kernels import attend_kernel, merge_kernel, next_power_of_2
from ..transfers import Transfers, transfers_for
from . import AttnBatch, AttnSpec, Level, one_key

LANES = 64
"""Rows times query heads of a key head that an item has at most; 16 at least, which tensor cores multiply."""

KEYS = 1024
"""Keys of an item at most."""

BLOCK = 32
"""Keys that are looked at together."""


@dataclass(frozen=True, slots=True)
class Items:
    """What the kernels read; int32, on the device.

    A row's partial results are those of its items: item i leaves that of row r in place i * rows + r - first row.
    """

    rows: int       # of an item at most
    items: Tensor   # [I, 6]: first row, end row, where the group's slots begin, first key, end key, rightmost or -1
    slots: Tensor   # of all groups
    starts: Tensor  # [T + 1], into `parts`: those of each row
    parts: Tensor


class TritonAttention:
    """Work is planned once a step for each kind of layer."""

    def __init__(self, device: torch.device, transfers: Transfers | None = None) -> None:
        self._device, self._transfers = device, transfers or transfers_for(device)
        self._specs: Sequence[AttnSpec] = ()

    def plan(self, batch: AttnBatch, specs: Sequence[AttnSpec]) -> None:
        self._specs = specs
        self._items = {
            spec: self._upload(batch.levels if spec.window is None else (batch.flat,), spec, batch.num_rows)
            for spec in dict.fromkeys(specs)
        }

    def try_out(self, specs: Sequence[AttnSpec], dtype: torch.dtype) -> None:
        """Run a step of one row and one key for each kind of layer; raises what Triton does where it cannot."""
        for spec in dict.fromkeys(specs):
            self._specs = (spec,)
            keys = torch.zeros(1, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=self._device)
            q = torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=dtype, device=self._device)
            self.partial(one_key(), 0, q, keys, keys)
        synchronize(self._device)

    def forward(self, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        spec = self._specs[layer]
        return attend(self._items[spec], spec, q, k_pool, v_pool)[0]

    def partial(self, level: Level, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        spec = self._specs[layer]
        return attend(self._upload((level,), spec, len(q)), spec, q, k_pool, v_pool)

    def _upload(self, levels: Sequence[Level], spec: AttnSpec, num_rows: int) -> Items:
        lanes = LANES if spec.head_dim <= 128 else LANES // 2  # they are kept in shared memory, with a block of keys
        rows = max(1, lanes // (spec.num_q_heads // spec.num_kv_heads))
        found, slots = items_of(levels, rows, spec.window)
        starts, parts = parts_of(found, num_rows, rows)
        arrays = found, slots, starts, parts
        return Items(rows, *(self._transfers.upload(torch.from_numpy(array)) for array in arrays))


Int32 = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


def items_of(levels: Sequence[Level], most_rows: int, window: int | None) -> tuple[Int32, Int32]:
    """The items of some levels, and the slots of all their groups."""
    found: list[tuple[int, int, int, int, int, int]] = []
    slots: list[Int32] = [np.empty(0, np.int32)]
    offset = 0
    for level in levels:
        page = level.page_size
        indices = level.kv_indices.numpy()
        slots.append((indices[:, None] * page + np.arange(page, dtype=np.int32)).reshape(-1))
        rows, pages, last = level.qo_indptr.tolist(), level.kv_indptr.tolist(), level.last_page_len.tolist()
        for group, (begin, end) in enumerate(pairwise(pages)):
            length = (end - begin - 1) * page + last[group] if end > begin else 0
            for first in range(rows[group], rows[group + 1], most_rows):
                stop = min(first + most_rows, rows[group + 1])
                until = length - (rows[group + 1] - stop) if level.causal else length
                since = 0
                if level.causal and window is not None:
                    since = max(0, until - (stop - first - 1) - window)
                newest = until - 1 if level.causal else -1  # the key of the item's last row
                for key in range(since, until, KEYS):
                    found.append((first, stop, offset + begin * page, key, min(key + KEYS, until), newest))
        offset += len(slots[-1])
    return np.array(found, np.int32).reshape(-1, 6), np.concatenate(slots).astype(np.int32)


def parts_of(items: Int32, num_rows: int, rows: int) -> tuple[Int32, Int32]:
    """For each row, where its partial results are: [T + 1] into a list of places."""
    sizes = items[:, 1] - items[:, 0]
    item = np.repeat(np.arange(len(items)), sizes)
    within = np.arange(len(item)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    row = items[item, 0] + within
    order = np.argsort(row, kind="stable")
    starts = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(row, minlength=num_rows), out=starts[1:])
    return starts, (item * rows + within)[order].astype(np.int32)


def attend(items: Items, spec: AttnSpec, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
    """Attention by items: [T, H, D], and the natural log-sum-exp, float32 [T, H]."""
    q = q.contiguous()
    num_rows, heads, size = q.shape
    repeat = heads // spec.num_kv_heads
    count = len(items.items)
    places = max(1, count * items.rows)
    part = q.new_empty(places, heads, size, dtype=torch.float32)
    part_lse = q.new_empty(places, heads, dtype=torch.float32)
    out, lse = torch.empty_like(q), q.new_empty(num_rows, heads, dtype=torch.float32)
    width = max(16, next_power_of_2(size))
    lanes = max(16, next_power_of_2(items.rows * repeat))
    if count:
        attend_kernel[count, spec.num_kv_heads](
            q, k_pool, v_pool, part, part_lse, items.items, items.slots,
            spec.scale, spec.softcap or 0.0, spec.window or 0,
            HEADS=heads, REPEAT=repeat, SIZE=size, WIDTH=width, ROWS=items.rows, LANES=lanes, BLOCK=BLOCK,
        )  # fmt: skip
    merge_kernel[num_rows, heads](
        part, part_lse, items.starts, items.parts, out, lse, HEADS=heads, SIZE=size, WIDTH=width
    )
    return out, lse

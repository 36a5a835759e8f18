"""Attention on a GPU by kernels of our own: for heads and dtypes that FlashInfer has no kernels for, or without it.

A step is a list of *items*: some rows of a group with some of its keys, of any level; each is a program for each key
head, which leaves a partial result. A second kernel merges the parts of every row. So sharing, windows and splitting
long paths over the GPU's processors are all the same to the kernels, and a step is two launches a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..transfers import Transfers, transfers_for
from . import AttnBatch, AttnSpec, Level

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

    items: Tensor   # [I, 6]: first row, end row, where the group's slots begin, first key, end key, rightmost or -1
    slots: Tensor   # of all groups
    starts: Tensor  # [T + 1], into `parts`: those of each row
    parts: Tensor
    rows: int       # of an item at most


class TritonAttention:
    """Work is planned once a step for each kind of layer."""

    def __init__(self, device: torch.device, transfers: Transfers | None = None) -> None:
        self._transfers = transfers or transfers_for(device)

    def plan(self, batch: AttnBatch, specs: Sequence[AttnSpec]) -> None:
        self._specs = specs
        self._items = {
            spec: self._upload(batch.levels if spec.window is None else (batch.flat,), spec, batch.num_rows)
            for spec in dict.fromkeys(specs)
        }

    def forward(self, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        spec = self._specs[layer]
        return attend(self._items[spec], spec, q, k_pool, v_pool)[0]

    def partial(self, level: Level, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        spec = self._specs[layer]
        return attend(self._upload((level,), spec, len(q)), spec, q, k_pool, v_pool)

    def _upload(self, levels: Sequence[Level], spec: AttnSpec, num_rows: int) -> Items:
        rows = max(1, LANES // (spec.num_q_heads // spec.num_kv_heads))
        found, slots = items_of(levels, rows, spec.window)
        starts, parts = parts_of(found, num_rows, rows)
        arrays = (found, slots, starts, parts)
        return Items(*(self._transfers.upload(torch.from_numpy(array)) for array in arrays), rows=rows)


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
        for group, (begin, end) in enumerate(zip(pages[:-1], pages[1:], strict=True)):
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
    part, part_lse = q.new_empty(places, heads, size, dtype=torch.float32), q.new_empty(places, heads, dtype=torch.float32)
    out, lse = torch.empty_like(q), q.new_empty(num_rows, heads, dtype=torch.float32)
    width = max(16, triton.next_power_of_2(size))
    lanes = max(16, triton.next_power_of_2(items.rows * repeat))
    if count:
        attend_kernel[count, spec.num_kv_heads](
            q, k_pool, v_pool, part, part_lse, items.items, items.slots,
            spec.scale, spec.softcap or 0.0, spec.window or 0,
            HEADS=heads, REPEAT=repeat, SIZE=size, WIDTH=width, ROWS=items.rows, LANES=lanes, BLOCK=BLOCK,
            EXACT=q.dtype == torch.float32,
        )  # fmt: skip
    merge_kernel[num_rows, heads](
        part, part_lse, items.starts, items.parts, out, lse, HEADS=heads, SIZE=size, WIDTH=width
    )
    return out, lse


@triton.jit
def attend_kernel(
    q, k, v, part, part_lse, items, slots, scale, softcap, window,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One item and one key head: flash attention over the item's keys, a lane for each row and query head.

    q [T, HEADS, SIZE]; k, v [slots, HEADS / REPEAT, SIZE]; part [places, HEADS, SIZE], part_lse [places, HEADS].
    """
    item, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, stop = tl.load(items + 6 * item), tl.load(items + 6 * item + 1)
    begin, key = tl.load(items + 6 * item + 2), tl.load(items + 6 * item + 3)
    end, newest = tl.load(items + 6 * item + 4), tl.load(items + 6 * item + 5)
    lane = tl.arange(0, LANES)
    row, head = first + lane // REPEAT, kv_head * REPEAT + lane % REPEAT
    fine = (row < stop) & (lane < ROWS * REPEAT)
    d = tl.arange(0, WIDTH)
    inside = d < SIZE
    there = fine[:, None] & inside[None, :]
    queries = tl.load(q + (row.to(tl.int64) * HEADS + head)[:, None] * SIZE + d[None, :], mask=there, other=0.0)
    last = newest - (stop - 1 - row)  # the last key that each lane sees
    highest = tl.full([LANES], -1.0e30, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    output = tl.zeros([LANES, WIDTH], tl.float32)
    for start in range(key, end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        slot = tl.load(slots + begin + j, mask=j < end, other=0).to(tl.int64)
        at = (slot * (HEADS // REPEAT) + kv_head)[:, None] * SIZE + d[None, :]
        real = (j < end)[:, None] & inside[None, :]
        keys = tl.load(k + at, mask=real, other=0.0)
        if EXACT:
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        else:
            scores = tl.dot(queries, tl.trans(keys)) * scale
        if softcap > 0:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)  # softcap * tanh(scores / softcap)
        seen = (j < end)[None, :] & fine[:, None]
        if newest >= 0:
            seen = seen & (j[None, :] <= last[:, None])
            if window > 0:
                seen = seen & (j[None, :] > last[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        fade, weights = tl.exp(highest - higher), tl.exp(scores - higher[:, None])
        values = tl.load(v + at, mask=real, other=0.0)
        if EXACT:
            more = tl.dot(weights, values, input_precision="ieee")
        else:
            more = tl.dot(weights.to(values.dtype), values)
        output = output * fade[:, None] + more
        total = total * fade + tl.sum(weights, 1)
        highest = higher
    found = total > 0
    sums = tl.where(found, total, 1.0)
    place = (item * ROWS + lane // REPEAT) * HEADS + head
    tl.store(part + place[:, None] * SIZE + d[None, :], output / sums[:, None], mask=there)
    tl.store(part_lse + place, tl.where(found, highest + tl.log(sums), -float("inf")), mask=fine)


@triton.jit
def merge_kernel(
    part, part_lse, starts, parts, out, lse, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """One head of one row: its parts, merged as `attention.merge` does; zeros and -inf where there is none."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    highest, total, output = -1.0e30, 0.0, tl.zeros([WIDTH], tl.float32)
    for i in range(tl.load(starts + row), tl.load(starts + row + 1)):
        place = tl.load(parts + i).to(tl.int64) * HEADS + head
        one = tl.load(part_lse + place)
        higher = tl.maximum(highest, one)
        fade, weight = tl.exp(highest - higher), tl.exp(one - higher)
        output = output * fade + weight * tl.load(part + place * SIZE + d, mask=d < SIZE, other=0.0)
        total = total * fade + weight
        highest = higher
    sums = tl.where(total > 0, total, 1.0)
    target = out + (row * HEADS + head) * SIZE + d
    tl.store(target, (output / sums).to(out.dtype.element_ty), mask=d < SIZE)
    tl.store(lse + row * HEADS + head, tl.where(total > 0, highest + tl.log(sums), -float("inf")))

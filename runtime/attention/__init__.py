"""Attention over the tree: what a backend is given, and what it answers.

The scheduler's layout becomes index arrays once a step (`AttnBatch`); a backend plans once a step
and then answers layer by layer. It never sees the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..layout import NO_SLOT, Layout
from .levels import CostModel, Group, cut


@dataclass(frozen=True, slots=True)
class AttnSpec:
    """How one kind of layer attends."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # keys a row sees, itself included; None: all before it
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of rows and, for each, the pages of the slots it attends to; int32, contiguous, on the CPU.

    Rows [qo_indptr[g], qo_indptr[g + 1]) of the step attend to the slots of pages
    kv_indices[kv_indptr[g] : kv_indptr[g + 1]], of the last one to `last_page_len[g]` slots only: to all of them if
    not `causal`, else aligned to the right: the last row sees all, the one before it one fewer.
    """

    qo_indptr: Tensor      # [G + 1]
    kv_indptr: Tensor      # [G + 1]
    kv_indices: Tensor     # [kv_indptr[-1]]
    last_page_len: Tensor  # [G], 1 to page_size; 0 where the group has no page
    page_size: int
    causal: bool


@dataclass(frozen=True)
class AttnBatch:
    """One step. Partial results of the levels are merged; the last level holds each segment's own rows."""

    levels: tuple[Level, ...]
    make_flat: Callable[[], Level]
    write_slots: Tensor    # int64 [T] on the device
    num_rows: int

    @cached_property
    def flat(self) -> Level:
        """The same step in one level: each segment with its whole path. Made when asked for, as few layers need it."""
        return self.make_flat()


class Attention(Protocol):
    """A way to compute attention. K and V of the step are in the pool before `forward`."""

    def plan(self, batch: AttnBatch, specs: Sequence[AttnSpec]) -> None:
        """Prepare a step; `specs` has one entry a layer."""

    def forward(self, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """The attention of one layer.

        Args:
            q: [T, H, D], positions applied, not scaled.
            k_pool, v_pool: [num_slots + 1, K, D].

        Returns:
            [T, H, D], until the next call.
        """

    def partial(self, level: Level, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        """One level alone: its output [T, H, D] and the natural log-sum-exp of its scores, float32 [T, H]."""


def attn_batch(
    layout: Layout, scratch: int, device: torch.device, page_size: int = 1, cost: CostModel | None = None
) -> AttnBatch:
    """The index arrays of a step. Rows that write nothing name slot `scratch`. Without `cost` nothing is shared."""
    num_rows = len(layout.tokens)

    def flat() -> Level:
        return _level(cut(layout.segments, CostModel(max_levels=0))[1], num_rows, page_size, causal=True)

    shared, rest = cut(layout.segments, cost or CostModel(max_levels=0))
    levels = [_level(groups, num_rows, page_size, causal=False) for groups in shared]
    levels.append(own := _level(rest, num_rows, page_size, causal=True))
    whole = flat if shared else lambda: own
    slots = int32(layout.write_slots).to(torch.int64)
    return AttnBatch(tuple(levels), whole, torch.where(slots == NO_SLOT, scratch, slots).to(device), num_rows)


def _level(groups: Sequence[Group], num_rows: int, page_size: int, *, causal: bool) -> Level:
    """Groups of ascending rows as index arrays; rows between them attend to nothing here."""
    qo, kv, indices, last = array("i", [0]), array("i", [0]), array("i"), array("i")

    def add(end_row: int, slots: array[int]) -> None:
        indices.extend(slots if page_size == 1 else [slot // page_size for slot in slots[::page_size]])
        qo.append(end_row)
        kv.append(len(indices))
        last.append((len(slots) - 1) % page_size + 1 if slots else 0)

    for group in groups:
        if group.first_row > qo[-1]:
            add(group.first_row, array("i"))
        add(group.end_row, group.slots)
    if num_rows > qo[-1]:
        add(num_rows, array("i"))
    return Level(int32(qo), int32(kv), int32(indices), int32(last), page_size, causal)


def one_key() -> Level:
    """One row and one key, in slot 0: to try a backend out with."""
    one, ends = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    return Level(ends, ends, torch.zeros(1, dtype=torch.int32), one, 1, causal=True)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys.

    The exact identity softmax(a ++ b) = weighted sum by exp(log-sum-exp), as in Flash-Decoding.

    Args:
        out, other: [T, H, D].
        lse, other_lse: [T, H] float32, natural; -inf where there was no key.
    """
    total = torch.logaddexp(lse, other_lse)
    a, b = (torch.exp(part - total).nan_to_num_(0.0) for part in (lse, other_lse))  # nan: neither has a key
    return (out * a[..., None] + other * b[..., None]).to(out.dtype), total


def int32(values: array[int]) -> Tensor:
    """A CPU tensor of its own with the values of an `array("i")`."""
    return torch.frombuffer(values, dtype=torch.int32).clone() if values else torch.empty(0, dtype=torch.int32)

"""The keys and values themselves, by slot.

One pair of tensors a layer, `[num_slots + page_size, K, D]`. The last page belongs to no token: rows
whose keys and values are in the cache already write there, so that a written slot is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import AttnSpec


def bytes_per_slot(specs: Sequence[AttnSpec], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    return sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs) * dtype.itemsize


class KVPool:
    """K and V of every slot. `specs` has one entry a layer."""

    def __init__(
        self, num_slots: int, specs: Sequence[AttnSpec], dtype: torch.dtype, device: torch.device, page_size: int = 1
    ) -> None:
        self.scratch = num_slots
        self.page_size = page_size
        shapes = [(num_slots + page_size, spec.num_kv_heads, spec.head_dim) for spec in specs]
        self.k = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store this step's keys and values.

        Args:
            slots: [T] int64; rows that must not write name the scratch slot.
            k, v: [T, K, D], positions already applied.
        """
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)

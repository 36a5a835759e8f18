"""The keys and values themselves, by slot.

One pair of tensors a layer, `[num_slots + page_size, K, D]`, views of one for all layers where these are
alike. The last page belongs to no token: rows whose keys and values are in the cache already write there,
so that a written slot is never touched.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .transfers import Transfers, transfers_for

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
        self.stacked: tuple[Tensor, Tensor] | None = None  # [layers, ...], where all layers are alike
        if len(set(shapes)) == 1:
            k, v = (torch.empty((len(shapes), *shapes[0]), dtype=dtype, device=device) for _ in "kv")
            self.stacked = k, v
            self.k, self.v = list(k), list(v)
        else:
            self.k, self.v = ([torch.empty(shape, dtype=dtype, device=device) for shape in shapes] for _ in "kv")
        self.dtype, self.device = dtype, device
        self.transfers: Transfers = transfers_for(device)
        self._widths = [page_size * spec.num_kv_heads * spec.head_dim for spec in specs for _ in "kv"]
        self.page_width = sum(self._widths)  # numbers in one page, in all layers

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store this step's keys and values.

        Args:
            slots: [T] int64; rows that must not write name the scratch slot.
            k, v: [T, K, D], positions already applied.
        """
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)

    def gather(self, slots: array[int]) -> Tensor:
        """A copy of whole pages, on the device: [pages, page_width], a page's keys and values layer by layer."""
        index = self._index(slots)
        parts = [pool.index_select(0, index).view(-1, width) for pool, width in self._pools()]
        return torch.cat(parts, dim=1)

    def scatter(self, slots: array[int], rows: Tensor) -> None:
        """Store whole pages that `gather` gave.

        Args:
            rows: [pages, page_width], on any device.
        """
        index = self._index(slots)
        there = rows if rows.device == self.device else self.transfers.upload(rows)
        parts = torch.split(there, self._widths, dim=1)
        for (pool, _), part in zip(self._pools(), parts, strict=True):
            pool.index_copy_(0, index, part.reshape(len(slots), *pool.shape[1:]))

    def _pools(self) -> list[tuple[Tensor, int]]:
        """K and V of each layer in turn, and how many numbers of a page lie there."""
        pools = [pool for pair in zip(self.k, self.v, strict=True) for pool in pair]
        return list(zip(pools, self._widths, strict=True))

    def _index(self, slots: array[int]) -> Tensor:
        return self.transfers.upload(torch.frombuffer(slots, dtype=torch.int32)).long()

"""What a layer does, with bits that do not depend on the other rows of the step.

A product of matrices, a sum or an exponential may be made in another order, by another instruction, for another number
of rows. So products are made of tiles that always have the same number of rows, padded if need be; all else is done row
by row by the same compiled code, or read from a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import EngineError
from .linear import Linear
from .rope import Rope
from .rows import CompiledRows, array_of, loading_kernels

TILE = 16
"""Rows of one product: so many cost a step of one row little more, since the weights are read once for all."""


@dataclass(frozen=True, slots=True)
class Tiled:
    """`linear`, `rows` rows at a time."""

    linear: Linear
    rows: int

    def __call__(self, x: Tensor) -> Tensor:
        missing = -len(x) % self.rows
        padded = F.pad(x, (0, 0, 0, missing)).contiguous()
        return torch.cat([self.linear(tile) for tile in torch.split(padded, self.rows)])[: len(x)]


def tiled(linear: Linear, num_inputs: int, dtype: torch.dtype) -> Tiled:
    """`linear` in tiles of `TILE` rows if it gives a row the same bits in each place of a tile, else row by row."""
    row = torch.randn(1, num_inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    in_each_place = linear(row.expand(TILE, -1).contiguous())
    return Tiled(linear, TILE if bool((in_each_place == in_each_place[0]).all()) else 1)


def by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each row [1, N] of [T, N]: in a larger array it may be other instructions that do a number."""
    return torch.cat([function(row) for row in torch.split(x, 1)]) if len(x) else x


class DeterministicRows(CompiledRows):
    """The compiled code, for any number of rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Waits for the code.

        Raises:
            EngineError: it cannot be had.
        """
        kernels = loading_kernels(dtype == torch.bfloat16).result()
        if kernels is None:
            raise EngineError("Engine: deterministic needs numba's compiled code, which cannot be had here.")
        super().__init__(kernels)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        numbers = array_of(rows)
        self._add_norm(numbers, numbers, False, array_of(weight), np.float32(eps), array_of(out))
        return out.view(x.shape)

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if activation is not F.silu:
            return by_row(activation, gate.contiguous()).mul_(up)
        out = torch.empty_like(up, memory_format=torch.contiguous_format)
        self._silu_mul(array_of(gate_up), array_of(out))
        return out


@dataclass(frozen=True, slots=True)
class RopeTable:
    """The angles of all positions, [positions, 1, D / 2] each."""

    cos: Tensor
    sin: Tensor

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.cos[positions].to(dtype), self.sin[positions].to(dtype)


def table_of(rope: Rope, num_positions: int, device: torch.device) -> RopeTable:
    return RopeTable(*rope(torch.arange(num_positions, device=device), torch.float32))

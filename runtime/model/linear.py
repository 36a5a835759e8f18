"""The matrices of a model, dense or packed: one call for both.

Packed weights are read faster, which is what a step of few rows waits for; but they are unpacked for every few
rows anew, which is what a step of many rows waits for. So a packed matrix may keep a dense copy beside it,
with the same values up to rounding, and takes whichever is faster for the rows that come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import RequestError
from .quantize import GROUP, Int4, Int8, to_int4, to_int8

Quantization = Literal["int8", "int4"]

PACKED_ROWS = 16
"""Steps of at most this many rows use packed weights where there is a dense copy."""

MOST_COPIED = 1 << 30
"""Weights of a model whose dense copies would take more bytes than this are kept packed only."""

OPERATORS = {
    "int8": ("_weight_int8pack_mm",),
    "int4": ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm"),
}
"""What torch must have for each kind; their names are not public. With 4 bits the head has 8."""


class Linear(Protocol):
    """x [T, K] to [T, N] in x's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Dense:
    weight: Tensor              # [N, K]
    bias: Tensor | None = None  # [N]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Packed:
    """`product` takes x in bfloat16 to its product with the packed weights, in bfloat16."""

    product: Callable[[Tensor], Tensor]
    bias: Tensor | None  # [N]
    copy: Tensor | None  # [N, K], dense, for more than `packed_rows` rows
    packed_rows: int

    def __call__(self, x: Tensor) -> Tensor:
        if self.copy is not None and len(x) > self.packed_rows:
            return F.linear(x, self.copy, self.bias)
        out = self.product(x.bfloat16()).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)


def product_of(grid: Int8 | Int4) -> Callable[[Tensor], Tensor]:
    """What multiplies bfloat16 [T, K], contiguous, with the weights on `grid`, packed: to bfloat16 [T, N]."""
    aten = torch.ops.aten
    match grid:
        case Int8(quants, scale):
            return lambda x: aten._weight_int8pack_mm(x, quants, scale)
        case Int4(quants, scale, zero):
            packed = aten._convert_weight_to_int4pack_for_cpu(quants, 1)  # uint8 [N, K / 2], in torch's own order
            pairs = torch.stack([scale.t(), zero.t()], dim=-1)            # [K / 32, N, 2]
            return lambda x: aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, pairs)


@dataclass(frozen=True, slots=True)
class Storage:
    """How the matrices of a model are kept."""

    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None
    copies: bool = False  # packed ones have a dense copy, too
    packed_rows: int = PACKED_ROWS

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A matrix [N, K] of any dtype, and perhaps what is added to its result [N]."""
        if self.quantization is None:
            return Dense(weight.to(self.device, self.dtype), bias)
        return self._packed(to_int4(weight) if self.quantization == "int4" else to_int8(weight), bias)

    def head(self, weight: Tensor) -> Linear:
        """The matrix that makes logits. It has at least 8 bits: nothing after it evens its errors out."""
        return self.linear(weight) if self.quantization is None else self._packed(to_int8(weight))

    def tied(self, weight: Tensor) -> tuple[Tensor, Linear]:
        """An embedding, and the head that is the same matrix: what is embedded is the dense copy of what is packed."""
        if self.quantization is None:
            dense = weight.to(self.device, self.dtype)
            return dense, Dense(dense)
        grid = to_int8(weight)
        dense = grid.values().to(self.dtype)
        return dense, Packed(product_of(grid), None, dense, self.packed_rows)

    def _packed(self, grid: Int8 | Int4, bias: Tensor | None = None) -> Packed:
        copy = grid.values().to(self.dtype) if self.copies else None
        return Packed(product_of(grid), bias, copy, self.packed_rows)


def check_quantization(quantization: Quantization, device: torch.device, sizes: dict[str, int]) -> None:
    """Raise `RequestError` unless matrices of these sizes can be packed, on this device and by this torch.

    Args:
        sizes: by what they are called, the numbers of rows and columns of the model's matrices.
    """
    ask = f"Engine: quantization {quantization!r}"
    if device.type != "cpu":
        raise RequestError(f'{ask} is for device "cpu", and this engine runs on {device}. Leave it out.')
    for operator in OPERATORS[quantization]:
        if not hasattr(torch.ops.aten, operator):
            raise RequestError(
                f"{ask} needs {operator}, which torch {torch.__version__} has not. Use torch 2.13, or leave it out."
            )
    for name, size in sizes.items():
        if size % GROUP:
            raise RequestError(
                f"{ask} packs weights in groups of {GROUP}, and this model's {name} of {size} is no multiple of that. "
                "Leave it out, or use another model."
            )

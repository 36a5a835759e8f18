"""The matrices of a model, dense or packed: one call for all.

On a CPU a dense matrix is put in the order that oneDNN reads fastest. Packed weights are read faster still, which is
what a step of few rows waits for; but they are unpacked anew for every few rows, which is what a step of many rows
waits for. So a packed matrix may keep a dense copy beside it, with the same values up to rounding, and takes whichever
is faster for the rows that come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..devices import is_cpu
from ..errors import RequestError
from .quantize import GROUP, Int4, Int8, to_int4, to_int8

Quantization = Literal["int8", "int4"]

MOST_COPIED = 1 << 30
"""Dense copies that would take more bytes than this in all are not made."""

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
    weight: Tensor       # [N, K]
    bias: Tensor | None  # [N]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Reordered:
    weight: Tensor       # [N, K], in an order of oneDNN's own
    bias: Tensor | None  # [N]

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


@dataclass(frozen=True, slots=True)
class Packed:
    """`product` takes x in bfloat16 to its product with the packed weights, in bfloat16."""

    product: Callable[[Tensor], Tensor]
    bias: Tensor | None   # [N]
    copy: Linear | None   # the same, dense, for more than `packed_rows` rows
    packed_rows: int

    def __call__(self, x: Tensor) -> Tensor:
        if self.copy is not None and len(x) > self.packed_rows:
            return self.copy(x)
        out = self.product(x.bfloat16().contiguous()).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)


def dense(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The matrix [N, K], in the fastest order there is for its dtype on its device."""
    if is_cpu(weight.device) and reorders(weight.dtype):
        return Reordered(torch.ops.mkldnn._reorder_linear_weight(weight), bias)
    return Dense(weight, bias)


def reorders(dtype: torch.dtype) -> bool:
    """Whether torch has oneDNN's reordered product (the name is not public), and it is fast in `dtype` on this CPU."""
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported()))


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
    """How the matrices of a model are kept.

    copies: packed ones have a dense copy for steps of more than `packed_rows` rows.
    """

    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None
    copies: bool = False
    packed_rows: int = 0
    finish: Callable[[Linear, int], Linear] | None = None  # what becomes of each; hears how many inputs it has

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A matrix [N, K] of any dtype, and perhaps what is added to its result [N]."""
        if self.quantization is None:
            return self._finished(dense(weight.to(self.device, self.dtype), bias), weight.shape[1])
        return self._packed(to_int4(weight) if self.quantization == "int4" else to_int8(weight), bias)

    def head(self, weight: Tensor) -> Linear:
        """The matrix that makes logits. It has at least 8 bits: nothing after it evens its errors out."""
        return self.linear(weight) if self.quantization is None else self._packed(to_int8(weight))

    def tied(self, weight: Tensor) -> tuple[Tensor, Linear]:
        """An embedding and the head that is the same matrix; packed, what is embedded are the packed values.

        The head is a copy in the order for products, unless it is too large.
        """
        if self.quantization is not None:
            grid = to_int8(weight)
            embedding = grid.values().to(self.dtype)
            packed = Packed(product_of(grid), None, self._copy_of(embedding), self.packed_rows)
            return embedding, self._finished(packed, weight.shape[1])
        embedding = weight.to(self.device, self.dtype)
        return embedding, self._finished(self._copy_of(embedding), weight.shape[1])

    def _packed(self, grid: Int8 | Int4, bias: Tensor | None = None) -> Linear:
        values = grid.values()
        copy = dense(values.to(self.dtype), bias) if self.copies else None
        return self._finished(Packed(product_of(grid), bias, copy, self.packed_rows), values.shape[1])

    def _finished(self, linear: Linear, num_inputs: int) -> Linear:
        return linear if self.finish is None else self.finish(linear, num_inputs)

    def _copy_of(self, embedding: Tensor) -> Linear:
        return dense(embedding) if embedding.nbytes <= MOST_COPIED else Dense(embedding, None)


def check_quantization(quantization: Quantization, device: torch.device, sizes: dict[str, int]) -> None:
    """Raise `RequestError` unless matrices of these sizes can be packed, on this device and by this torch.

    Args:
        sizes: by what they are called, the numbers of rows and columns of the model's matrices.
    """
    ask = f"Engine: quantization {quantization!r}"
    if not is_cpu(device):
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

"""What a layer does to each row by itself, on a GPU in 16 bits: `rows.Rows` in three launches.

Norms and activations are FlashInfer's. Turning queries and keys and storing keys and values is one kernel of ours: what
it reads and writes is small, so launches are what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..kv import KVPool
from ..libraries import Missing
from .family import ACTIVATIONS
from .rows import Angles, TorchRows


class GpuRows(TorchRows):
    """`library` is FlashInfer, or says why it is missing: then torch does what it would."""

    def __init__(self, library: Any | Missing) -> None:
        self._library = None if isinstance(library, Missing) else library
        self._gates: dict[Callable[[Tensor], Tensor], Any] = {}
        if self._library is not None:
            gelu = ACTIVATIONS["gelu_pytorch_tanh"]
            self._gates = {F.silu: self._library.silu_and_mul, gelu: self._library.gelu_tanh_and_mul}

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if self._library is None:
            return super().add_norm(x, more, weight, eps)
        if more is None:
            normed: Tensor = self._library.rmsnorm(x, weight, eps)
            return normed
        self._library.fused_add_rmsnorm(more, x, weight, eps)  # x += more, and the norm takes the place of `more`
        return more

    def place(self, qkv: Tensor, angles: Angles | None, slots: Tensor, pool: KVPool, layer: int) -> Tensor:
        keys, values = pool.k[layer], pool.v[layer]
        kv, head_dim = keys.shape[1:]
        heads = qkv.shape[1] // head_dim
        queries = qkv.new_empty(len(qkv), heads - 2 * kv, head_dim)
        cos, sin = angles or (qkv, qkv)
        place_kernel[len(qkv), heads](
            qkv, cos, sin, slots, queries, keys, values, qkv.stride(0),
            Q=heads - 2 * kv, K=kv, HALF=head_dim // 2, BLOCK=triton.next_power_of_2(head_dim // 2),
            TURNS=angles is not None,
        )  # fmt: skip
        return queries

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        kernel = self._gates.get(activation)
        if kernel is None or gate_up.shape[1] // 2 * gate_up.itemsize % 16:  # it reads 16 bytes at a time
            return super().gate(gate_up, activation)
        gated: Tensor = kernel(gate_up)
        return gated


@triton.jit
def place_kernel(
    qkv, cos, sin, slots, queries, keys, values, stride,
    Q: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One head of one row: turn it if it is a query or a key, and put it where it belongs.

    qkv [T, (Q + 2 K) 2 HALF], rows `stride` apart; cos, sin [T, HALF]; slots int64 [T]; queries [T, Q, 2 HALF];
    keys, values [slots, K, 2 HALF].
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    there = i < HALF
    source = qkv + row * stride + head * 2 * HALF
    a = tl.load(source + i, mask=there, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + i, mask=there, other=0.0).to(tl.float32)
    if TURNS and head < Q + K:
        c = tl.load(cos + row * HALF + i, mask=there, other=0.0).to(tl.float32)
        s = tl.load(sin + row * HALF + i, mask=there, other=0.0).to(tl.float32)
        turned = a * c - b * s
        b = b * c + a * s
        a = turned
    slot = tl.load(slots + row)
    target = queries + (row * Q + head) * 2 * HALF
    if head >= Q + K:
        target = values + (slot * K + head - Q - K) * 2 * HALF
    elif head >= Q:
        target = keys + (slot * K + head - Q) * 2 * HALF
    tl.store(target + i, a.to(target.dtype.element_ty), mask=there)
    tl.store(target + HALF + i, b.to(target.dtype.element_ty), mask=there)

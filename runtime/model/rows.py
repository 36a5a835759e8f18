"""What a layer does to each row by itself, in torch, or by compiled code where that is to be had.

Each of torch's operators gives up the interpreter's lock, which other threads of the process want as well, and takes
it again; making an empty tensor is one of them. The compiled code keeps the lock for its microseconds, and what it
writes to is made once a step.

T rows, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..compiling import loading
from ..devices import is_cpu, is_gpu
from ..gpu.libraries import DTYPES, Missing, flashinfer, triton
from ..kv import KVPool
from ..models import cache_folder
from .rope import rotate

Angles = tuple[Tensor, Tensor]
"""Cosine and sine of the rows' positions, [T, 1, D / 2]."""

MOST_GATED = 64
"""For more rows torch's threads are worth waking: its exponential is as fast."""


class Rows(Protocol):
    """Operations on all rows of a step. What one gives is overwritten by its next call."""

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `more` to x [T, hidden], in place, and give its RMS norm times `weight` [hidden]."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMS norm over the last dimension of x [T, ..., N] times `weight` [N]; nothing overwrites it."""

    def place(self, qkv: Tensor, angles: Angles | None, slots: Tensor, pool: KVPool, layer: int) -> Tensor:
        """Turn queries and keys of [T, (H + 2K) D] by `angles`, store keys and values, and give the queries [T, H, D].

        `qkv` may be changed.
        """

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """activation(gate) * up of [T, 2 inner], which may be changed: [T, inner]."""


class TorchRows:
    """On any device, in any dtype."""

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if more is not None:
            x += more
        return self.norm(x, weight, eps)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def place(self, qkv: Tensor, angles: Angles | None, slots: Tensor, pool: KVPool, layer: int) -> Tensor:
        kv, head_dim = pool.k[layer].shape[1:]
        heads = qkv.view(len(qkv), -1, head_dim)
        if angles is not None:
            rotate(heads[:, :-kv], *angles)
        q, k, v = torch.split(heads, [heads.shape[1] - 2 * kv, kv, kv], dim=1)
        pool.write(layer, slots, k, v)
        return q.contiguous()

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return activation(gate).mul_(up)


class CompiledRows:
    """On a CPU, in float32 or bfloat16, for one step."""

    def __init__(self, kernels: tuple[Callable[..., None], ...]) -> None:
        self._add_norm, self._place, self._silu_mul = kernels
        self._normed: dict[int, Tensor] = {}  # by the number of rows
        self._queries: Tensor | None = None
        self._gated: Tensor | None = None

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = self._normed.get(len(x))
        if out is None:
            out = self._normed[len(x)] = torch.empty_like(x)
        numbers = array_of(x)
        self._add_norm(
            numbers,
            numbers if more is None else array_of(more),
            more is not None,
            array_of(weight),
            np.float32(eps),
            array_of(out),
        )
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _TORCH.norm(x, weight, eps)

    def place(self, qkv: Tensor, angles: Angles | None, slots: Tensor, pool: KVPool, layer: int) -> Tensor:
        keys, values = pool.k[layer], pool.v[layer]
        kv, head_dim = keys.shape[1:]
        if self._queries is None:
            self._queries = qkv.new_empty(len(qkv), qkv.shape[1] // head_dim - 2 * kv, head_dim)
        cos, sin = angles or (qkv, qkv)
        self._place(
            array_of(qkv),
            array_of(cos).reshape(len(qkv), -1),
            array_of(sin).reshape(len(qkv), -1),
            angles is not None,
            slots.numpy(),
            array_of(keys),
            array_of(values),
            array_of(self._queries),
        )
        return self._queries

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        if activation is not F.silu or len(gate_up) > MOST_GATED:
            return _TORCH.gate(gate_up, activation)
        if self._gated is None:
            self._gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._silu_mul(array_of(gate_up), array_of(self._gated))
        return self._gated


def rows_for(dtype: torch.dtype, device: torch.device) -> Rows:
    """The fastest there is by now, for one step; the first call begins to load what is compiled."""
    if is_gpu(device):
        return gpu_rows(dtype, device)
    if not is_cpu(device) or dtype not in (torch.float32, torch.bfloat16):
        return _TORCH
    coming = loading_kernels(dtype == torch.bfloat16)
    kernels = coming.result() if coming.done() else None
    return _TORCH if kernels is None else CompiledRows(kernels)


@cache
def gpu_rows(dtype: torch.dtype, device: torch.device) -> Rows:
    """On a GPU: FlashInfer's kernels for norms and activations and one of ours for the rest, as far as there are."""
    if dtype not in DTYPES or isinstance(triton(device), Missing):
        return _TORCH
    from .gpu_rows import GpuRows

    return GpuRows(flashinfer(), torch.zeros(1, 64, dtype=dtype, device=device))


@cache
def loading_kernels(half: bool) -> Future[tuple[Callable[..., None], ...] | None]:
    """Compiled code on its way; None if it cannot be had."""
    return loading(lambda: _compiled(half), "branchwise-rows-kernel")


def _compiled(half: bool) -> tuple[Callable[..., None], ...]:
    from .rowwise import kernels

    return kernels(half, cache_folder() / "kernels")


_TORCH = TorchRows()


def array_of(tensor: Tensor) -> NDArray[Any]:
    """The tensor's numbers in their order; of bfloat16, which numpy has not, the bits."""
    tensor = tensor.contiguous()
    array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array

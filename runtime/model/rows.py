"""What a layer does to each row by itself, in torch, or by compiled code where that is to be had.

T rows, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from threading import Thread
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..kv import KVPool
from ..models import cache_folder
from .rope import rotate

log = logging.getLogger(__name__)

Angles = tuple[Tensor, Tensor]
"""Cosine and sine of the rows' positions, [T, 1, D / 2]."""


MOST_GATED = 64
"""For more rows torch's threads are worth waking: its exponential is as fast."""


class Rows(Protocol):
    """Operations on all rows of a step."""

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `more` to x [T, hidden], in place, and give its RMS norm times `weight` [hidden]."""

    def place(
        self, qkv: Tensor, angles: Angles | None, slots: Tensor, pool: KVPool, layer: int, num_heads: int
    ) -> Tensor:
        """Turn queries and keys of [T, H + 2K, D] by `angles`, store keys and values, and give the queries [T, H, D].

        `qkv` may be changed.
        """


    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """activation(gate) * up of [T, 2 inner], which may be changed: [T, inner]."""


class TorchRows:
    """On any device, in any dtype."""

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if more is not None:
            x += more
        return F.rms_norm(x, weight.shape, weight, eps)

    def place(
        self, qkv: Tensor, angles: Angles | None, slots: Tensor, pool: KVPool, layer: int, num_heads: int
    ) -> Tensor:
        kv = (qkv.shape[1] - num_heads) // 2
        if angles is not None:
            rotate(qkv[:, : num_heads + kv], *angles)
        q, k, v = torch.split(qkv, [num_heads, kv, kv], dim=1)
        pool.write(layer, slots, k, v)
        return q.contiguous()

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return activation(gate).mul_(up)


class CompiledRows:
    """On a CPU, in float32 or bfloat16."""

    def __init__(self, half: bool) -> None:
        from .rowwise import kernels

        self._add_norm, self._place, self._silu_mul = kernels(half, cache_folder() / "kernels")

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        numbers = _array(x)
        self._add_norm(
            numbers,
            numbers if more is None else _array(more),
            more is not None,
            _array(weight),
            np.float32(eps),
            _array(out),
        )
        return out

    def place(
        self, qkv: Tensor, angles: Angles | None, slots: Tensor, pool: KVPool, layer: int, num_heads: int
    ) -> Tensor:
        queries = qkv.new_empty(len(qkv), num_heads, qkv.shape[2])
        cos, sin = (_array(part.squeeze(1)) for part in angles or (qkv[:, :1], qkv[:, :1]))
        turns = angles is not None
        keys, values = _array(pool.k[layer]), _array(pool.v[layer])
        self._place(_array(qkv), cos, sin, turns, slots.numpy(), keys, values, _array(queries))
        return queries

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        if activation is not F.silu or len(gate_up) > MOST_GATED:
            return _TORCH.gate(gate_up, activation)
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._silu_mul(_array(gate_up), _array(out))
        return out


def rows_for(dtype: torch.dtype, device: torch.device) -> Rows:
    """The fastest there is by now; the first call begins to load what is compiled."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return _TORCH
    loading = loading_rows(dtype == torch.bfloat16)
    return loading.result() if loading.done() else _TORCH


@cache
def loading_rows(half: bool) -> Future[Rows]:
    """Compiled code on its way; torch's if that cannot be had."""
    future: Future[Rows] = Future()
    Thread(target=_load, args=(future, half), name="branchwise-rows").start()
    return future


def _load(future: Future[Rows], half: bool) -> None:
    try:
        future.set_result(CompiledRows(half))
    except Exception as error:  # no numba, a numba that does not know this Python, a compiler that fails
        log.warning("norms and positions run without compiled code, so slower: %r.", error)
        future.set_result(_TORCH)


_TORCH = TorchRows()


def _array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's numbers in their order; of bfloat16, which numpy has not, the bits."""
    tensor = tensor.contiguous()
    array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array

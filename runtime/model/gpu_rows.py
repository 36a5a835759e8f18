"""What a layer does to each row by itself, on a GPU in 16 bits: `rows.Rows` in three launches.

Norms and activations are FlashInfer's. Turning queries and keys and storing keys and values is one kernel of ours: what
it reads and writes is small, so launches are what it costs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..gpu.kernels import next_power_of_2, place_kernel
from ..gpu.libraries import Missing
from ..kv import KVPool
from .family import ACTIVATIONS
from .rows import Angles, TorchRows

log = logging.getLogger("branchwise")


class GpuRows(TorchRows):
    """`library` is FlashInfer, or says why it is missing: then torch does what it would."""

    def __init__(self, library: Any | Missing, probe: Tensor | None = None) -> None:
        """`probe`: [1, n] on the GPU, to try the library out with, as it compiles what it has when it is first used."""
        self._library = None if isinstance(library, Missing) else library
        self._gates: dict[Callable[[Tensor], Tensor], Any] = {}
        if self._library is not None:
            gelu = ACTIVATIONS["gelu_pytorch_tanh"]
            self._gates = {F.silu: self._library.silu_and_mul, gelu: self._library.gelu_tanh_and_mul}
        if self._library is not None and probe is not None:
            try:
                self._library.fused_add_rmsnorm(probe.clone(), probe.clone(), probe[0], 1.0)
                for gate in self._gates.values():
                    gate(probe)
            except Exception as error:
                log.warning("norms and activations run in plain torch, slower: FlashInfer's cannot be used (%r)", error)
                self._library, self._gates = None, {}

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if self._library is None or not len(x):  # no logits are wanted, and it launches no empty grid
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
            Q=heads - 2 * kv, K=kv, HALF=head_dim // 2, BLOCK=next_power_of_2(head_dim // 2),
            TURNS=angles is not None,
        )  # fmt: skip
        return queries

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        kernel = self._gates.get(activation)
        if kernel is None or gate_up.shape[1] // 2 * gate_up.itemsize % 16:  # it reads 16 bytes at a time
            return super().gate(gate_up, activation)
        gated: Tensor = kernel(gate_up)
        return gated

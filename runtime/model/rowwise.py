"""What a layer does to each row by itself, as compiled code: norms, positions, activations.

torch takes several passes over the rows for each of these. Numbers are float32 or bfloat16, sums are made in float32.
numba makes the code; without it, and until it is loaded, `rows.py` does the same in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import boolean, float32, int64, types, uint16

from ..attention import ragged
from ..attention.compiled import kept
from ..attention.ragged import exp_of_negative, narrow, wide

FAST = {"reassoc", "contract", "nsz", "arcp"}
ZERO, ONE = np.float32(0.0), np.float32(1.0)

Kernel = Callable[..., None]


def _add_norm(x: Any, more: Any, adds: Any, weight: Any, eps: Any, out: Any) -> None:
    """x += more, if `adds`; out = x / sqrt(mean(x * x) + eps) * weight (RMSNorm, arXiv 1910.07467)."""
    size = x.shape[1]
    for row in range(len(x)):
        if adds:
            for i in range(size):
                x[row, i] = narrow(wide(x[row, i]) + wide(more[row, i]), x[row, i])
        total = ZERO
        for i in range(size):
            total += wide(x[row, i]) * wide(x[row, i])
        factor = ONE / np.float32(math.sqrt(total / np.float32(size) + eps))
        for i in range(size):
            out[row, i] = narrow(wide(x[row, i]) * factor * wide(weight[i]), x[row, i])


def _place(
    qkv: Any, cos: Any, sin: Any, turns: Any, slots: Any, k_pool: Any, v_pool: Any, q_out: Any
) -> None:
    """Turn queries and keys by the angles of their rows, if `turns`; keys and values go to their slots."""
    heads, kv, size = q_out.shape[1], k_pool.shape[1], q_out.shape[2]
    half = size // 2
    for row in range(len(qkv)):
        slot = slots[row]
        for head in range(heads + kv):
            source = qkv[row, head * size : (head + 1) * size]
            target = q_out[row, head] if head < heads else k_pool[slot, head - heads]
            if turns:
                for i in range(half):
                    a, b, c, s = wide(source[i]), wide(source[i + half]), wide(cos[row, i]), wide(sin[row, i])
                    target[i] = narrow(a * c - b * s, source[i])
                    target[i + half] = narrow(b * c + a * s, source[i])
            else:
                for i in range(size):
                    target[i] = source[i]
        for head in range(kv):
            for i in range(size):
                v_pool[slot, head, i] = qkv[row, (heads + kv + head) * size + i]


def _silu_mul(gate_up: Any, out: Any) -> None:
    """out = silu(gate) * up, of rows that are gate and up after each other."""
    size = out.shape[1]
    for row in range(len(out)):
        for i in range(size):
            gate = wide(gate_up[row, i])
            e = exp_of_negative(-abs(gate))
            sigmoid = (ONE if gate >= ZERO else e) / (ONE + e)
            out[row, i] = narrow(gate * sigmoid * wide(gate_up[row, size + i]), out[row, i])


def kernels(half: bool, folder: Path) -> tuple[Kernel, Kernel, Kernel]:
    """`_add_norm`, `_place` and `_silu_mul` for float32, or for bfloat16 (as uint16) if `half`.

    Args:
        folder: where compiled code is kept.
    """
    number = uint16 if half else float32
    flat, deep = number[:, ::1], types.Array(number, 3, "C")
    signatures = (
        types.void(flat, flat, boolean, number[::1], float32, flat),
        types.void(flat, flat, flat, boolean, int64[::1], deep, deep, deep),
        types.void(flat, flat),
    )
    add_norm, place, silu_mul = (
        kept(numba.njit(fastmath=FAST, error_model="numpy")(function), signature, folder, ragged)
        for function, signature in zip((_add_norm, _place, _silu_mul), signatures, strict=True)
    )
    return add_norm, place, silu_mul

"""Attention whose bits do not depend on what else is in the step.

Each row is done by itself: its keys are cut into blocks of `BLOCK` by their position in the sequence, each block gives
a partial result, and these are merged in order of position. What is added to what, and in which order, follows from the
row's position alone: not from the tree, the pages, the chunks or the threads. Keys are read anew for every row, which
is what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import float32, int32, int64, types
from numpy.typing import NDArray
from torch import Tensor

from ..compiling import help_with
from ..models import cache_folder
from . import AttnBatch, AttnSpec, Level, ragged
from .compiled import kept
from .ragged import add_to_counter, exp_of_negative

BLOCK = 64
"""Keys whose scores are made and summed together."""

FAST = {"reassoc", "contract", "nsz"}  # the compiler may choose an order, once and for all rows

Kernel = Callable[..., None]


class DeterministicAttention:
    """On a CPU, in float32 or bfloat16; what is shared is not read together."""

    def __init__(self) -> None:
        self._kernel = kernel_in(cache_folder() / "kernels")

    def plan(self, batch: AttnBatch, specs: Sequence[AttnSpec]) -> None:
        self._work, self._specs = _Work(batch.flat), specs

    def forward(self, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        return self._run(self._work, self._specs[layer], q, k_pool, v_pool)[0]

    def partial(self, level: Level, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(_Work(level), self._specs[layer], q, k_pool, v_pool)

    def _run(
        self, work: _Work, spec: AttnSpec, q: Tensor, k_pool: Tensor, v_pool: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
        slots, keys, values = work.slots, k_pool, v_pool
        if q.dtype != torch.float32:  # widening is exact
            slots, keys, values = work.places, k_pool[work.used].float(), v_pool[work.used].float()
        arguments = (
            np.zeros(1, np.int32), slots, work.first, work.count, spec.window or 0,
            *(tensor.float().contiguous().numpy() for tensor in (q, keys, values)), np.float32(spec.scale),
            np.float32(spec.softcap or 0), out.numpy(), lse.numpy(),
        )  # fmt: skip
        helped = help_with(self._kernel, arguments, len(q) * spec.num_kv_heads - 1)
        self._kernel(*arguments)
        for future in helped:
            if not future.cancel():
                future.result()
        return out.to(q.dtype), lse


class _Work:
    """Which slots each row of a level attends to: `count` of `slots` from `first` on, oldest first."""

    def __init__(self, level: Level) -> None:
        page, rows, ends = np.arange(level.page_size), level.qo_indptr.numpy(), level.kv_indptr.numpy()
        self.slots = (level.kv_indices.numpy().astype(np.int64)[:, None] * level.page_size + page).reshape(-1)
        self.first = np.zeros(rows[-1], np.int64)
        self.count = np.zeros(rows[-1], np.int64)
        for group, last in enumerate(level.last_page_len.tolist()):
            r, pages = slice(rows[group], rows[group + 1]), ends[group + 1] - ends[group]
            seen = max(0, (pages - 1) * level.page_size + last)
            self.first[r] = ends[group] * level.page_size
            later = np.arange(r.stop - r.start)[::-1] if level.causal and seen else 0  # the group's rows after each
            self.count[r] = seen - later

    @property
    def used(self) -> Tensor:
        """The slots that are read, each once."""
        return torch.from_numpy(np.unique(self.slots))

    @property
    def places(self) -> NDArray[np.int64]:
        """For each of `slots` its place in `used`."""
        places: NDArray[np.int64] = np.unique(self.slots, return_inverse=True)[1].astype(np.int64).reshape(-1)
        return places


def _attend(
    counter: Any, slots: Any, first: Any, count: Any, window: Any, q: Any, k: Any, v: Any, scale: Any, cap: Any,
    out: Any, lse: Any,
) -> None:  # fmt: skip
    """Rows and key heads are claimed one by one; what one of them gives depends on nothing else."""
    num_kv, size = k.shape[1], k.shape[2]
    repeat = q.shape[1] // num_kv
    scores, part, whole = np.empty(BLOCK, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    while True:
        unit = add_to_counter(counter, 0, 1)
        if unit >= len(q) * num_kv:
            break
        row, kv = unit // num_kv, unit % num_kv
        stop = count[row]
        low = max(0, stop - window) if window > 0 else 0
        for head in range(kv * repeat, (kv + 1) * repeat):
            highest, total = -np.float32(np.inf), np.float32(0.0)
            for d in range(size):
                whole[d] = np.float32(0.0)
            for start in range(low // BLOCK * BLOCK, stop, BLOCK):
                begin, end = max(low, start), min(stop, start + BLOCK)
                top, mass = -np.float32(np.inf), np.float32(0.0)
                for key in range(begin, end):
                    slot, score = slots[first[row] + key], np.float32(0.0)
                    for d in range(size):
                        score += q[row, head, d] * k[slot, kv, d]
                    score *= scale
                    if cap > 0:
                        score = cap * np.float32(math.tanh(score / cap))
                    scores[key - start] = score
                    top = max(top, score)
                for d in range(size):
                    part[d] = np.float32(0.0)
                for key in range(begin, end):
                    slot, weight = slots[first[row] + key], exp_of_negative(scores[key - start] - top)
                    mass += weight
                    for d in range(size):
                        part[d] += weight * v[slot, kv, d]
                joint = max(highest, top)
                before, found = exp_of_negative(highest - joint), exp_of_negative(top - joint)
                for d in range(size):
                    whole[d] = whole[d] * before + part[d] * found
                highest, total = joint, total * before + mass * found
            for d in range(size):
                out[row, head, d] = whole[d] / total if stop > low else np.float32(0.0)
            lse[row, head] = highest + np.float32(math.log(total)) if stop > low else -np.float32(np.inf)


@cache
def kernel_in(folder: Path) -> Kernel:
    """`_attend`, compiled. Its arguments, for T rows, H query heads, K key heads of D numbers:

        counter: int32 [1], zero; threads that call it with the same one share the work.
        slots: int64; first, count: int64 [T], as of `_Work`.
        window: keys that a row sees, 0 for all; scale, cap: float32, of the scores; a cap of 0 is none.
        q: float32 [T, H, D]; k, v: float32 [slots, K, D].
        out: float32 [T, H, D]; lse: float32 [T, H], the natural log-sum-exp of the scores.

    Args:
        folder: where compiled code is kept.
    """
    deep = types.Array(float32, 3, "C")
    signature = types.void(
        int32[::1], int64[::1], int64[::1], int64[::1], int64, deep, deep, deep, float32, float32, deep, float32[:, ::1]
    )
    return kept(numba.njit(nogil=True, fastmath=FAST, error_model="numpy")(_attend), signature, folder, ragged)

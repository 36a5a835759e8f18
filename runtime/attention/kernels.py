"""The compiled attention kernels of this process, one for each kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..compiling import help_with, loading
from ..models import cache_folder
from . import AttnSpec
from .units import Units

Kernel = Callable[..., None]

SHARE = 300_000
"""Query-key pairs times the size of a head that are worth waking another thread for: about 0.05 ms of work."""


def kernel_for(spec: AttnSpec, dtype: torch.dtype) -> Kernel | None:
    """The kernel for a kind of layer, or None: there is none for it, or it is not loaded yet; the first call begins."""
    kernel = loading_of(spec.head_dim, spec.num_q_heads // spec.num_kv_heads, dtype)
    return kernel.result() if kernel.done() else None


@cache
def loading_of(head_dim: int, repeat: int, dtype: torch.dtype) -> Future[Kernel | None]:
    """One kernel on its way: None if there is no numba, or the kernel does not know such heads."""
    if head_dim % 4 or dtype not in (torch.float32, torch.bfloat16):
        none: Future[Kernel | None] = Future()
        none.set_result(None)
        return none
    return loading(lambda: _compiled(head_dim, repeat, dtype), "branchwise-kernel")


def _compiled(head_dim: int, repeat: int, dtype: torch.dtype) -> Kernel:
    from .ragged import kernel

    return kernel(head_dim, repeat, dtype == torch.bfloat16, cache_folder() / "kernels")


class Caller:
    """Calls a kernel, with the help of other threads where there is enough to do."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None
        self._last: list[Future[None]] = []

    def run(
        self, kernel: Kernel, units: Units, spec: AttnSpec, q: Tensor, k_pool: Tensor, v_pool: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention by units: [T, H, D], and the natural log-sum-exp, float32 [T, H]; both until the next call."""
        q = q.contiguous()
        out, lse = self._empty(q)
        counters = np.zeros(2 * len(units.stages), np.int32)
        arguments = (
            units.units, units.stages, counters, units.slots, spec.window or 0,
            *map(_array, (q, k_pool, v_pool, out, lse)), np.float32(spec.scale), np.float32(spec.softcap or 0),
        )  # fmt: skip
        if all(future.done() for future in self._last):
            self._last = help_with(kernel, arguments, units.work * spec.head_dim // SHARE - 1)
        kernel(*arguments)
        return out, lse

    def _empty(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of nothing yet: zeros, since a NaN that one step left there would be merged into the next one's."""
        if self._kept is None or self._kept[0].shape != q.shape or self._kept[0].dtype != q.dtype:
            self._kept = torch.empty_like(q), torch.empty(q.shape[:2])
        _array(self._kept[0]).fill(0)
        self._kept[1].numpy().fill(-np.inf)
        return self._kept


def _array(tensor: Tensor) -> NDArray[np.generic]:
    """The tensor's numbers; of bfloat16, which numpy has not, the bits."""
    array: NDArray[np.generic] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array

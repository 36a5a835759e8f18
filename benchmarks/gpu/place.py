"""Where the checks run: a GPU with FlashInfer, or a CPU with what stands in for both, to try the checks themselves."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from report import NotHere
from torch import Tensor

from branchwise.runtime.attention.flashinfer import FlashInferAttention
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.devices import is_gpu
from branchwise.runtime.gpu.graphs import Record, record_on
from branchwise.runtime.gpu.libraries import Missing, flashinfer
from branchwise.runtime.transfers import Transfers, transfers_for
from tests import flashinfer_standin

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 floating-point operations a second, as the manufacturer gives them."""


@dataclass(frozen=True, slots=True)
class Place:
    device: torch.device
    small: bool

    @property
    def gpu(self) -> bool:
        return is_gpu(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.gpu else torch.float32

    @property
    def transfers(self) -> Transfers:
        return transfers_for(self.device)

    def library(self) -> Any:
        """FlashInfer, or the stand-in on a CPU."""
        library = flashinfer() if self.gpu else flashinfer_standin
        if isinstance(library, Missing):
            raise NotHere(library.reason)
        return library

    def attention(self) -> FlashInferAttention:
        return FlashInferAttention(self.library(), self.device, self.dtype)

    def record(self) -> Record:
        """CUDA graphs, or plain calls on a CPU."""
        return record_on(self.device) if self.gpu else lambda run: run

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def poison(self, *shape: int) -> None:
        """Leave nan where the next tensors of this size will lie: what is not written is then seen."""
        for dtype in (self.dtype, torch.float32):
            torch.full(shape, torch.nan, dtype=dtype, device=self.device)

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give the memory back of what is not used any more."""
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """The least of some: all that was launched is done."""
        run()
        times = []
        for _ in range(repeats):
            self.synchronize()
            began = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    def bytes_s(self) -> float:
        """Bytes read a second, by summing a buffer."""
        buffer = torch.ones((1 << 30) // (64 if self.small else 1) // 4, device=self.device)
        return buffer.nbytes / self.seconds(buffer.sum)

    def flops_s(self) -> tuple[float, str]:
        """Operations a second at most: as the manufacturer says, else as a large product shows."""
        name = torch.cuda.get_device_name(self.device) if self.gpu else ""
        for known, peak in PEAKS.items():
            if known in name:
                return peak, "of the manufacturer's peak"
        size = 512 if self.small else 8192
        a, b = self.random(size, size), self.random(size, size)
        return 2 * size**3 / self.seconds(lambda: a @ b), "of what a large product reaches"


@contextmanager
def backend(place: Place) -> Iterator[None]:
    """Engines that are made here run on the GPU's backend, on a CPU over what stands in for FlashInfer."""
    if place.gpu:
        yield
        return

    def attention_for(model: Any, pool: Any) -> tuple[Any, CostModel]:
        return place.attention(), CostModel(price=0.0, max_levels=2)

    with mock.patch("branchwise.runtime.running.attention_for", attention_for):
        yield

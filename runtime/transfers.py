"""Copies between host memory and where a model runs.

On a GPU nothing here waits but `wait` and `read`: host memory is pinned, so that the GPU copies by itself, in the order
in which it was told. torch keeps a pinned tensor that goes out of use until the copies from it are done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .devices import is_gpu


class Transfers(Protocol):
    """Host memory and one device. `empty` is host memory that copies fast."""

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor: ...

    def pinned(self, values: Tensor) -> Tensor:
        """A CPU tensor in such memory."""

    def upload(self, values: Tensor) -> Tensor:
        """A copy of a CPU tensor on the device. `values` may be written to again only if nobody else holds it."""

    def download(self, values: Tensor, into: Tensor) -> None:
        """Begin to copy to memory that `empty` gave. It must not be looked at before `wait`."""

    def wait(self) -> None:
        """Until all that was begun to be downloaded is there."""

    def read(self, values: Tensor) -> Tensor:
        """A copy in host memory that is there: waits."""

    def so_far(self) -> Callable[[], None]:
        """What waits until the device has done all that it was told until now."""


class DirectTransfers:
    """To a CPU, where there is nothing to copy, and to devices that copy at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def pinned(self, values: Tensor) -> Tensor:
        return values

    def upload(self, values: Tensor) -> Tensor:
        return values.to(self._device)

    def download(self, values: Tensor, into: Tensor) -> None:
        into.copy_(values)

    def wait(self) -> None:
        """Nothing is under way."""

    def read(self, values: Tensor) -> Tensor:
        return values.cpu()

    def so_far(self) -> Callable[[], None]:
        return self.wait


class PinnedTransfers:
    """To a GPU, on the stream that is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None  # after the last download, until it was waited for

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory()

    def upload(self, values: Tensor) -> Tensor:
        if not values.numel():  # there is nothing to pin
            return values.to(self._device)
        return values.pin_memory().to(self._device, non_blocking=True)

    def download(self, values: Tensor, into: Tensor) -> None:
        assert into.is_pinned(), "a copy to memory that is not pinned waits"
        into.copy_(values, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def read(self, values: Tensor) -> Tensor:
        into = self.empty(*values.shape, dtype=values.dtype)
        self.download(values, into)
        self.wait()
        return into

    def so_far(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


def transfers_for(device: torch.device) -> Transfers:
    return PinnedTransfers(device) if is_gpu(device) and torch.cuda.is_available() else DirectTransfers(device)

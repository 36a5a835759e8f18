"""Weights by name, from the safetensors files of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import WeightsError
from ..models import weight_map


class WeightSource(Protocol):
    """Tensors by name. What is wrong with them is told by `check`, once they were all asked for."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, of this shape, in the dtype and on the device of the model."""

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """Likewise, if there is one."""

    def stacked(self, prefix: str, heights: dict[str, int], width: int) -> Tensor:
        """Matrices of one width as one, [sum of heights, width], in any dtype and wherever they are."""

    def check(self) -> None:
        """Raise `WeightsError` if something that was asked for was not as it should be."""


class Weights:
    """From a model's folder, one by one. Remembers what is missing or misshapen, so that all of it is said at once."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        index = weight_map(folder)
        if index is None:
            index = dict.fromkeys(_names(folder / "model.safetensors"), "model.safetensors")
        self._files = index
        self._problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, which must have this shape; zeros in its place if it has not."""
        return self._read(name, shape).to(self._device, self._dtype)

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """The tensor of this name, if there is one."""
        return self.get(name, *shape) if name in self else None

    def stacked(self, prefix: str, heights: dict[str, int], width: int) -> Tensor:
        """Matrices of one width as one, in the dtype of the file and on the CPU; [sum of heights, width]."""
        parts = [self._read(f"{prefix}{name}.weight", (height, width)) for name, height in heights.items()]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            self._problems.append(f"missing {name}")
            return torch.zeros(shape)
        tensor = _tensor(self._folder / self._files[name], name)
        if tensor.shape != shape:
            self._problems.append(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
            return torch.zeros(shape)
        return tensor

    def check(self) -> None:
        if self._problems:
            shown = "; ".join(self._problems[:4])
            raise WeightsError(
                f"{self._folder}: {len(self._problems)} weights do not fit the configuration: {shown}."
            )


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as weights:
            return list(weights.keys())
    except SafetensorError as error:
        raise _unreadable(file, error) from error


def _tensor(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, framework="pt") as weights:
            tensor: Tensor = weights.get_tensor(name)
            return tensor
    except SafetensorError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: SafetensorError) -> WeightsError:
    return WeightsError(f"{file} cannot be read ({error}). Delete it and fetch the model again.")

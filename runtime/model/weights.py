"""Weights by name, from the safetensors files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import WeightsError


class Weights:
    """Reads tensors one by one; remembers what is missing or misshapen, so that all of it can be said at once."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            files = dict.fromkeys(_names(folder / "model.safetensors"), "model.safetensors")
        self._files = files
        self._problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, which must have this shape; zeros in its place if it has not."""
        if name not in self._files:
            self._problems.append(f"missing {name}")
            return torch.zeros(shape)
        with safe_open(self._folder / self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.shape != shape:
            self._problems.append(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
            return torch.zeros(shape)
        return tensor.to(self._device, self._dtype)

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """The tensor of this name, if there is one."""
        return self.get(name, *shape) if name in self else None

    def check(self) -> None:
        """Raise `WeightsError` if something that was asked for was not as it should be."""
        if self._problems:
            shown = "; ".join(self._problems[:4])
            raise WeightsError(
                f"{self._folder}: {len(self._problems)} weights do not fit the configuration: {shown}."
            )


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as weights:
        return list(weights.keys())

"""Who draws the tokens of a step: by where the logits are."""

from __future__ import annotations

import torch

from .device_draws import DeviceDrawer, Operations, TorchOperations
from .devices import is_gpu
from .draws import Drawer, HostDrawer
from .gpu.libraries import Missing, flashinfer, triton
from .transfers import transfers_for


def drawer_for(device: torch.device, eos_ids: frozenset[int]) -> Drawer:
    """Both give the same tokens, up to rounding of float64."""
    return DeviceDrawer(eos_ids, _operations(device), transfers_for(device)) if is_gpu(device) else HostDrawer(eos_ids)


def _operations(device: torch.device) -> Operations:
    if isinstance(triton(device), Missing):
        return TorchOperations()
    from .gpu.draws import GpuOperations

    return GpuOperations(flashinfer(), torch.ones(1, 64, device=device))

"""Where a model runs, and how much memory there is. With `config`, the only place that names kinds of devices."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .errors import EngineError

log = logging.getLogger("branchwise")

CPU = torch.device("cpu")
GPU = "cuda"

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which a GPU has bfloat16 and what FlashInfer's and our kernels need: Ampere."""


def is_cpu(device: torch.device) -> bool:
    return device.type == CPU.type


def is_gpu(device: torch.device) -> bool:
    return device.type == GPU


def choose_device(name: str | torch.device | None) -> torch.device:
    """The device of that name, checked to be there; None: a GPU if there is one that can be used, else the CPU.

    Raises:
        EngineError: the device that was asked for by name cannot be used.
    """
    if name is None:
        reason = no_gpu_because()
        if reason:
            _warn_once(f"the model runs on the CPU: {reason}")
        name = GPU if reason is None else CPU
    try:
        device = torch.device(name)
        if is_gpu(device) and (reason := no_gpu_because()) is not None:
            raise EngineError(f"Engine: device {str(name)!r} cannot be used: {reason or 'no GPU is found'}")
        return torch.empty(1, device=device).device  # a GPU with its number: tensors there say that they are on it
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device it lacks differs by build
        raise EngineError(f"Engine: device {str(name)!r} cannot be used: {error}") from error


def no_gpu_because() -> str | None:
    """None: there is a GPU that torch can use. Else why not: "" if nothing hints at one that should be used."""
    if torch.version.cuda is None:
        if not has_driver():
            return ""
        return (
            f"there is an NVIDIA driver, but torch {torch.__version__} is a build without CUDA. Install torch's CUDA "
            "build, from the index that pytorch.org names."
        )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    if told:  # of an old driver, among others
        return " ".join(str(told[-1].message).split())
    return f"torch {torch.__version__} finds no GPU that it can use, though there is a driver" if has_driver() else ""


def has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def gpu_lacks(device: torch.device) -> str | None:
    """Why this GPU cannot run the kernels that are compiled for one; None: it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= LEAST_CAPABILITY:
        return None
    have, need = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
    return f"{gpu_name(device)} has compute capability {have}, and {need} is needed"


def gpu_count() -> int:
    return torch.cuda.device_count()


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Where kernels are launched that are not torch's, by this thread: they take the GPU that is current."""
    return torch.cuda.device(device) if is_gpu(device) and torch.cuda.is_available() else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for all that the device was told."""
    if is_gpu(device) and torch.cuda.is_available():
        torch.cuda.synchronize(device)


def half_precision(device: torch.device) -> torch.dtype:
    """The 16-bit dtype that such a device computes in: bfloat16 where it has it."""
    return torch.float16 if is_gpu(device) and gpu_lacks(device) is not None else torch.bfloat16


def total_bytes(device: torch.device) -> int:
    if is_gpu(device):
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> int:
    if is_gpu(device):
        torch.cuda.empty_cache()  # what torch keeps for later is free, too
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *_cgroup_room()])


def _cgroup_room() -> list[int]:
    """What a container's limit leaves, if there is one."""
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return [int(limit.read()) - int(used.read())]
    except (OSError, ValueError):  # no such limit
        return []


def gib(size: int) -> str:
    return f"{size / (1 << 30):,.1f} GiB"


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)

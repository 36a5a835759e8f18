"""What a GPU is used through beside torch: loaded when first asked for, once; and why, where it cannot be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ..devices import synchronize
from ..messages import shortened

DTYPES = (torch.float16, torch.bfloat16)
"""What FlashInfer's kernels compute in."""


@dataclass(frozen=True, slots=True)
class Missing:
    """There is no such library here."""

    reason: str


@cache
def flashinfer() -> Any | Missing:
    """The module `flashinfer`."""
    # Its norms have two codes; the one that needs no further package is the one that was checked.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    return _imported("flashinfer")


@cache
def triton(device: torch.device) -> Any | Missing:
    """The module `triton`, in which our own kernels are written, if they run on this GPU: it needs a C compiler."""
    found = _imported("triton")
    if isinstance(found, Missing):
        return found
    from .kernels import mask_kernel

    try:
        row, word = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int32, device=device)
        mask_kernel[1, 1](torch.zeros(32, device=device), row, word, 32, 1, BLOCK=32)
        synchronize(device)
    except Exception as error:
        return Missing(f"its kernels cannot be run: {type(error).__name__}: {shortened(str(error), 300)}")
    return found


def _imported(name: str) -> Any | Missing:
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # not installed, or for another CUDA than there is
        return Missing(f"{type(error).__name__}: {error}. Install it with: pip install branchwise[cuda]")

"""Threads that share the work of compiled kernels with whoever calls them: the same ones for all engines.

A kernel cuts its work into items that are claimed one by one, so a helper that comes late, or never, holds nobody up.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch


def help_with(kernel: Callable[..., None], arguments: tuple[Any, ...], most: int) -> list[Future[None]]:
    """Have other threads call `kernel(*arguments)` as well: `most`, or as many as torch computes on less this one."""
    count = min(torch.get_num_threads() - 1, most)
    return [_pool().submit(kernel, *arguments) for _ in range(count)]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "branchwise-helper")

"""Compiled code: loaded beside what the caller does, and run by several threads.

numba and its compiler are loaded with the first of it. What is on disk is there in half a second; what is not takes
some seconds, once on a machine. A kernel cuts its work into items that are claimed one by one, so a thread that helps
late, or never, holds nobody up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import Any, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")

_said: list[bool] = []  # a machine without numba is told so once


def loading(make: Callable[[], T], name: str) -> Future[T | None]:
    """What `make` gives, soon, from a thread of that name; None if it cannot be had."""
    future: Future[T | None] = Future()
    Thread(target=_load, args=(future, make), name=name).start()
    return future


def _load(future: Future[Any], make: Callable[[], Any]) -> None:
    try:
        future.set_result(make())
    except Exception as error:  # no numba, a numba that does not know this Python, a compiler that fails
        if not _said:
            log.warning("there is no compiled code, so all is slower: %r. With numba it is faster.", error)
            _said.append(True)
        future.set_result(None)


def help_with(kernel: Callable[..., None], arguments: tuple[Any, ...], most: int) -> list[Future[None]]:
    """Have other threads call `kernel(*arguments)` as well: `most`, or as many as torch computes on less this one."""
    count = min(torch.get_num_threads() - 1, most)
    with suppress(RuntimeError):  # Python ends: then nobody helps
        return [_pool().submit(kernel, *arguments) for _ in range(count)]
    return []


@cache
def _pool() -> ThreadPoolExecutor:
    """The same threads for all kernels and engines."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "branchwise-helper")

"""Waiting for what happens on other threads, with an end."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from branchwise.interpreter import Scripted


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait until a condition holds, at most five seconds."""

    def wait(condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < until, "the condition did not come true within 5 s"
            gc.collect()
            time.sleep(0.005)

    return wait


@pytest.fixture
def scripted(eventually: Callable[[Callable[[], bool]], None]) -> Iterator[Callable[..., Scripted]]:
    """Makes scripted backends, and checks at the end that no session of theirs was left open."""
    made: list[Scripted] = []

    def make(*args: Any, **kwargs: Any) -> Scripted:
        made.append(Scripted(*args, **kwargs))
        return made[-1]

    yield make
    eventually(lambda: all(backend.open_sessions == 0 for backend in made))

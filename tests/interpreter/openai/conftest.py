"""A stub server, and backends on it, which are closed with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from branchwise import OpenAI

from .stub import Stub


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    yield server
    server.close()


@pytest.fixture
def remote(stub: Stub) -> Iterator[Callable[..., OpenAI]]:
    """Makes backends on the stub."""
    made: list[OpenAI] = []

    def make(server: Any = "sglang", **options: Any) -> OpenAI:
        made.append(OpenAI("m", base_url=stub.url, server=server, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()

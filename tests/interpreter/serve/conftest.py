"""One server for the tests that ask it plain things, and a way to make others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .live import Live, live


@pytest.fixture(scope="package")
def served(tiny_model: Path) -> Iterator[Live]:
    """A tiny model with the default options."""
    with live(tiny_model, num_slots=4096, seed=0) as server:
        yield server

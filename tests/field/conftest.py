"""What cases from the field need: a small engine, and text that any model is made to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from branchwise import Engine, State, function, gen
from branchwise.lang import Gen


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, num_slots=8192, seed=0, defaults={"temperature": 0}) as engine:
        yield engine
        engine.check()
        stats = engine.stats
        assert stats.protected_slots == 0
        assert stats.free_slots + stats.evictable_slots == stats.num_slots


def forced(text: str, name: str = "x", **options: Any) -> Gen:
    """A generation that can only say `text`."""
    op = gen(name, regex=re.escape(text), max_tokens=400, **options)
    assert isinstance(op, Gen)
    return op


Streamed = Callable[..., tuple[State, list[str]]]


@pytest.fixture
def streamed(engine: Engine) -> Streamed:
    """Streams what a model is made to write: the state, and the pieces."""

    def run(text: str, *, backend: Engine = engine, **options: Any) -> tuple[State, list[str]]:
        @function
        def program(s: State) -> None:
            s += "Say: "
            s += forced(text, **options)

        state = program.run(backend=backend, stream=True)
        pieces = list(state.text_iter("x"))
        assert "".join(pieces) == state["x"]
        assert state.text() == "Say: " + state["x"]
        return state, pieces

    return run

"""The interpreter's switch interval: short inside, and what it was before when the last one has left."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from branchwise.runtime import Engine
from branchwise.runtime.gil import INTERVAL_S, ShortTurns


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield 0.004
    sys.setswitchinterval(before)


def test_turns_are_short_until_the_last_one_has_left(interval: float) -> None:
    turns = ShortTurns()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with turns:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with turns:
        assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)
        thread.start()
        assert inside.wait(10)
    assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)
    leave.set()
    thread.join(10)
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_an_interval_that_is_shorter_already_is_left_alone() -> None:
    sys.setswitchinterval(1e-5)
    with ShortTurns():
        assert sys.getswitchinterval() == pytest.approx(1e-5)


def test_an_engine_leaves_the_interval_as_it_was(tiny_model: Path, interval: float) -> None:
    with Engine(tiny_model, num_slots=256) as engine:
        seen: list[float] = []
        forward = engine.model.forward
        engine.model.forward = lambda step: (seen.append(sys.getswitchinterval()), forward(step))[1]  # type: ignore[method-assign]
        engine.generate("To be", max_tokens=3, ignore_eos=True)
        assert {round(s, 6) for s in seen} == {INTERVAL_S}
    assert sys.getswitchinterval() == pytest.approx(interval)

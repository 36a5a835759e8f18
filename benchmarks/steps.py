"""Decode steps of an engine, and how long they take: what the benchmarks of branchwise alone have in common.

A step is timed from the end of the one before it to its own, so all that the engine's thread does is in it.
"""

from __future__ import annotations

import json
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from workloads import Writer

from branchwise.runtime import Engine, GenerateParams

STEPS = 16
"""Of one round, timed. A few more go before them, in which branches that begin one after the other come together."""

SETTLING = 4


@dataclass(frozen=True, slots=True)
class Branches:
    """So many branches over a shared prefix, each with tokens of its own: at the middle of what is timed, `own`."""

    count: int
    shared: int
    own: int


class Decoding:
    """A shared prefix that is computed and held, and rounds of decoding over it."""

    def __init__(self, engine: Engine, branches: Branches, seed: int = 0) -> None:
        engine.reset_cache()
        self._engine, self._branches, self._write = engine, branches, Writer(seed)
        self._shared = self._write.tokens(branches.shared)
        self._pin = engine.hold(self._shared)

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pin.release()

    def prompts(self) -> list[array[int]]:
        """New branches, computed as far as the decoding begins."""
        own = max(1, self._branches.own - SETTLING - STEPS // 2)
        prompts = [array("i", (*self._shared, *self._write.tokens(own))) for _ in range(self._branches.count)]
        self._generate(prompts, 1)
        return prompts

    def decode(self, prompts: Sequence[array[int]]) -> None:
        """Greedily generate `SETTLING + STEPS` tokens in every branch, all branches in the same steps."""
        self._generate(prompts, SETTLING + STEPS)

    def _generate(self, prompts: Sequence[array[int]], tokens: int) -> None:
        params = GenerateParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        waits: list[Future[Any]] = [Future() for _ in prompts]

        def put(wait: Future[Any]) -> Any:
            return lambda _, result: wait.set_result(result)

        for prompt, wait in zip(prompts, waits, strict=True):
            self._engine.start(prompt, params, on_done=put(wait))
        for wait in waits:
            if isinstance(wait.result(), Exception):
                raise wait.result()


@contextmanager
def step_ends(engine: Engine) -> Iterator[list[float]]:
    """A list that grows by the moment at which each step ends."""
    ends: list[float] = []
    loop: Any = engine._loop
    step = loop._step

    def timed() -> None:
        step()
        ends.append(time.perf_counter())

    loop._step = timed
    try:
        yield ends
    finally:
        del loop._step


def step_s(engine: Engine, branches: Branches, rounds: int = 3) -> float:
    """Seconds of a decode step, the median."""
    with Decoding(engine, branches) as decoding:
        return rounds_s(engine, decoding, rounds)


def rounds_s(engine: Engine, decoding: Decoding, rounds: int = 3) -> float:
    """Seconds of a step in some rounds, the median."""
    seconds: list[float] = []
    for _ in range(rounds):
        prompts = decoding.prompts()
        with step_ends(engine) as ends:
            decoding.decode(prompts)
        last = ends[-STEPS:]
        seconds += [end - start for start, end in pairwise(last)]
    return statistics.median(seconds)


def append(out: Path | None, **line: object) -> None:
    """Print a result, and write it to the file of results if there is one."""
    shown = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in line.items()]
    print(*shown, flush=True)
    if out is not None:
        with out.open("a") as stream:
            stream.write(json.dumps(line) + "\n")

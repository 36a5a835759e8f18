"""Where the time of a decode step goes: `python benchmarks/step_profile.py [--out FILE]`.

32 greedy branches over 1,024 tokens. Functions of the engine are wrapped by name, and each is charged with the time in
it that is not in another one of them. What the completion thread does is charged to callbacks, as if it held the step
up, though it runs beside it. A name that is not there any more is an error: then this file must follow.

Then the same step while other threads of the process run pure Python, against a step without them.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from steps import Branches, Decoding, append, rounds_s

from branchwise.runtime import Engine, loop, request, runner, scheduler

BRANCHES = Branches(32, 1024, 64)
ROUNDS = 4
OPERATORS = "the model's operators"


def parts(engine: Engine) -> list[tuple[Any, str, str]]:
    """An object, the name of a function of it, and the part of a step that it counts to."""
    steps: Any = engine._loop
    return [
        (steps, "_act", "messages"),
        (steps, "_step", "the likeliest tokens, and the loop itself"),
        (steps._scheduler, "plan", "scheduling"),
        (scheduler, "build_layout", "layout"),
        (runner, "attn_batch", "attention plan"),
        (steps._runner._attention, "plan", "attention plan"),
        (steps._runner._model, "forward", OPERATORS),
        (steps._scheduler.tree, "commit", "tree"),
        (steps._scheduler.tree, "append", "tree"),
        (steps, "_draw", "sampling"),
        (steps, "_use", "sampling"),
        (request.Request, "take", "detokenising"),
        (loop, "_call", "callbacks"),
    ]


class Clock:
    """Seconds by part; a function inside of another stops the clock of the outer one. One stack a thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stacks: dict[int, list[str]] = defaultdict(list)
        self._since: dict[int, float] = {}

    def wrap(self, function: Any, part: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            stack = self._stacks[thread]
            self._charge(thread, stack)
            stack.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge(thread, stack)
                stack.pop()

        return timed

    def _charge(self, thread: int, stack: list[str]) -> None:
        now = time.perf_counter()
        if stack:
            self.seconds[stack[-1]] += now - self._since[thread]
        self._since[thread] = now


@contextmanager
def profiled(engine: Engine, clock: Clock) -> Iterator[None]:
    wrapped = [(owner, name, getattr(owner, name), name in vars(owner)) for owner, name, _ in parts(engine)]
    for owner, name, part in parts(engine):
        setattr(owner, name, clock.wrap(getattr(owner, name), part))
    try:
        yield
    finally:
        for owner, name, function, own in wrapped:
            if own:
                setattr(owner, name, function)
            else:
                delattr(owner, name)


@contextmanager
def spinning(threads: int) -> Iterator[None]:
    """So many threads that run pure Python and never wait."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(i * i for i in range(1000))

    running = [threading.Thread(target=spin, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in running:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    for dtype in ("float32", "fastest"):
        with Engine("smollm2-135m", dtype=dtype) as engine, Decoding(engine, BRANCHES) as decoding:
            name = str(engine.model.dtype).removeprefix("torch.")
            decoding.decode(decoding.prompts())
            clock = Clock()
            for _ in range(ROUNDS):
                prompts = decoding.prompts()
                with profiled(engine, clock):
                    decoding.decode(prompts)
            total = sum(clock.seconds.values())
            shares = {part: seconds / total for part, seconds in sorted(clock.seconds.items(), key=lambda s: -s[1])}
            append(out, kind="step_profile", dtype=name, overhead=1 - shares[OPERATORS], shares=shares)
            idle = rounds_s(engine, decoding)
            for threads in (1, 4) if dtype == "float32" else ():
                with spinning(threads):
                    busy = rounds_s(engine, decoding, 1)
                append(out, kind="spinning", dtype=name, threads=threads, idle_s=idle, busy_s=busy, ratio=busy / idle)


if __name__ == "__main__":
    main()

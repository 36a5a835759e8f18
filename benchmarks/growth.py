"""How time, memory and slots grow: `python benchmarks/growth.py [--out FILE]`.

With the number of branches and the length of what they share: a decode step, the slots in use while it runs, and their
bytes. With the number of programs that wait: programs a second, and the memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

from steps import Branches, Decoding, append, rounds_s

from branchwise import Engine, function, gen
from branchwise.runtime.kv import bytes_per_slot

BRANCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFIXES = (128, 512, 1024, 2048, 4096, 8192 - 64)
"""The last is the demo model's context, less what branches add."""

PROGRAMS = (1, 10, 100, 1000, 10_000)
COMMON = "These are the rules, and they are the same for all of you. " * 8


@function(temperature=0, max_tokens=1)
def program(s: Any, number: int) -> None:
    s += COMMON
    s += f"Number {number}:" + gen("answer")


def grow(engine: Engine, out: Path | None, what: str, branches: Branches) -> None:
    """One point: the time of a step, and what it holds."""
    engine.reset_cache()
    began = time.perf_counter()
    with Decoding(engine, branches) as decoding:
        prefix_s = time.perf_counter() - began
        step_s = rounds_s(engine, decoding, 1)
        stats = engine.stats
    slots = stats.num_slots - stats.free_slots
    append(
        out,
        kind="growth",
        what=what,
        branches=branches.count,
        shared=branches.shared,
        prefix_s=prefix_s,
        step_s=step_s,
        slots=slots,
        kv_mib=slots * bytes_per_slot(engine.model.specs, engine.model.dtype) / 2**20,
    )


def peak_mib() -> float:
    """The most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with Engine("smollm2-135m", num_slots=1 << 15) as engine:
        for count in PROGRAMS:
            before, began = peak_mib(), time.perf_counter()
            program.run_batch([{"number": number} for number in range(count)], backend=engine)
            seconds = time.perf_counter() - began
            append(
                out,
                kind="growth",
                what="programs",
                programs=count,
                seconds=seconds,
                programs_s=count / seconds,
                more_mib=peak_mib() - before,
            )
        for count in BRANCHES:
            grow(engine, out, "branches", Branches(count, 1024, 16))
        for shared in PREFIXES:
            grow(engine, out, "prefix", Branches(32, shared, 16))


if __name__ == "__main__":
    main()

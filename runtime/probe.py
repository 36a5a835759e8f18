"""What this machine multiplies fastest with: measured once, in less than half a second, and kept on disk.

What is chosen from it decides how numbers are rounded, so it must not change from run to run: what was measured first
stays in the cache folder until what it depends on changes (the processor, the cores, torch, how it is measured).
To measure again, delete `probe-*.json` there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from .model.linear import OPERATORS, Linear, Packed, Quantization, dense, product_of
from .model.quantize import GROUP, Int4, Int8
from .models import cache_folder

VERSION = 1
"""Of how it is measured and written."""

ROWS = (1, 4, 8, 16, 32)
SHAPE, COPIES = (1536, 1024), 14
"""The matrix, and how often it is there, so that weights come from memory and not from a cache."""

REPEATS = 4

CLEARLY = 1.2
"""How many times as fast something must be to be taken in place of what is more exact, or more usual."""

LEAST_PACKED = 4
"""So few rows wait for memory wherever it was measured: were packed weights slower for them, something disturbed."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds for products with each of `ROWS` rows.

    ways: by dtype ("float32", "bfloat16") and quantization ("int8", "int4", if torch can), on torch's own threads.
    threads: in bfloat16, by number of threads; torch's own comes first.
    """

    ways: dict[str, list[float]]
    threads: dict[str, list[float]]

    def dtype(self) -> torch.dtype:
        """bfloat16 if it is clearly faster, else float32."""
        gain = _gain(self.ways["float32"], self.ways["bfloat16"])
        return torch.bfloat16 if gain > CLEARLY else torch.float32

    def num_threads(self) -> int | None:
        """The fastest number of threads; None if none is clearly faster than torch's own."""
        own = next(iter(self.threads))
        gains = {number: _gain(self.threads[own], times) for number, times in self.threads.items()}
        best = max(gains, key=lambda number: gains[number])
        return int(best) if gains[best] > CLEARLY else None

    def packed_rows(self, quantization: Quantization, dtype: torch.dtype) -> int:
        """Up to how many rows packed weights are as fast as dense ones in `dtype`; at least `LEAST_PACKED`."""
        packed = self.ways.get(quantization, [])  # none where torch cannot pack
        unpacked = self.ways["bfloat16" if dtype == torch.bfloat16 else "float32"]
        faster = takewhile(lambda times: times[1] <= times[2], zip(ROWS, packed, unpacked, strict=False))
        return max([LEAST_PACKED, *(rows for rows, _, _ in faster)])


def _gain(times: Sequence[float], others: Sequence[float]) -> float:
    """How many times as fast the others are: the geometric mean over the numbers of rows."""
    return statistics.geometric_mean(a / b for a, b in zip(times, others, strict=True))


def speeds() -> Speeds:
    """Those of this machine: from disk, else measured now, and kept if that can be."""
    file = cache_folder() / f"probe-{_machine()}.json"
    kept = _read(file)
    if kept is None:
        measured = measure()
        if _read(file) is None:  # no other process was first
            _write(file, measured)
        kept = _read(file) or measured
    return kept


def measure() -> Speeds:
    """Time products with the same matrix in many places, in every way and on several numbers of threads.

    While others use the cores, fewer threads than torch's own look better than they are: then only those are timed.
    """
    own = torch.get_num_threads()
    fewer = [] if _is_busy() else sorted({own // 2, own // 4} - {0}, reverse=True)
    times = {name: _times(*_matrices(name)) for name in ("float32", "bfloat16", *OPERATORS) if _can(name)}
    threads = {str(own): times["bfloat16"]}
    try:
        for number in fewer:
            torch.set_num_threads(number)
            threads[str(number)] = _times(*_matrices("bfloat16"))
    finally:
        torch.set_num_threads(own)
    return Speeds(times, threads)


def _is_busy() -> bool:
    """Whether others kept a quarter of the cores busy in the last minute, as far as that is told."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1) / 4


def _can(way: str) -> bool:
    return all(hasattr(torch.ops.aten, operator) for operator in OPERATORS.get(way, ()))


def _matrices(way: str) -> tuple[list[Linear], torch.dtype]:
    """The matrices kept in one way, and the dtype of what they are multiplied with. Their values do not matter."""
    if way in OPERATORS:
        return [Packed(product_of(_grid(way)), None, None, 0) for _ in range(COPIES)], torch.bfloat16
    dtype: torch.dtype = getattr(torch, way)
    return [dense(torch.ones(SHAPE, dtype=dtype)) for _ in range(COPIES)], dtype


def _grid(quantization: str) -> Int8 | Int4:
    rows, columns = SHAPE
    if quantization == "int8":
        return Int8(torch.ones(SHAPE, dtype=torch.int8), torch.ones(rows, dtype=torch.bfloat16))
    scale = torch.ones(rows, columns // GROUP, dtype=torch.bfloat16)
    return Int4(torch.ones(SHAPE, dtype=torch.int32), scale, scale)


@torch.inference_mode()
def _times(linears: Sequence[Linear], dtype: torch.dtype) -> list[float]:
    """The least seconds of some for each of `ROWS`: what disturbs only adds to them."""

    def run(x: Tensor) -> float:
        started = time.perf_counter()
        for linear in linears:
            linear(x)
        return time.perf_counter() - started

    inputs = [torch.ones(rows, SHAPE[1], dtype=dtype) for rows in ROWS]
    run(inputs[0])
    return [min(run(x) for _ in range(REPEATS)) for x in inputs]


def _machine() -> str:
    """A name for all that the speeds depend on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = (VERSION, _processor(), cores, os.environ.get("OMP_NUM_THREADS"), torch.__version__)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor's model, and what it can do as far as that is told."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        told = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
        return f"{told.get('model name')} {told.get('flags') or told.get('Features')}"
    return f"{platform.machine()} {platform.processor()}"


def _read(file: Path) -> Speeds | None:
    """What is kept in `file`, if it is whole."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kept = Speeds(**{part: _checked(content[part]) for part in ("ways", "threads")})
        kept.dtype(), kept.num_threads()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError):
        return None
    return kept


def _checked(times: dict[str, list[float]]) -> dict[str, list[float]]:
    if not all(len(of_way) == len(ROWS) and min(of_way) > 0 for of_way in times.values()):
        raise ValueError("not a positive number of seconds for each number of rows")
    return times


def _write(file: Path, measured: Speeds) -> None:
    """Keep what was measured, whole or not at all; a folder that cannot be written is no error."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".probe-", dir=file.parent)
        try:
            with open(handle, "w", encoding="utf-8") as stream:
                json.dump(asdict(measured), stream)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
            raise

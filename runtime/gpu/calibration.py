"""From where on it pays, on this GPU, to read a span once for several rows: timed at the first start, kept on disk.

A shared level costs launches and a merge, whatever it spares. So decode steps are timed with one and without, over
spans of growing length, until sharing wins for good. To measure again, delete `cascade-*.json` in the cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..attention import AttnSpec, attn_batch
from ..attention.flashinfer import FlashInferAttention
from ..attention.levels import CostModel
from ..devices import CPU, synchronize
from ..layout import Layout, Segment, Span
from ..models import cache_folder
from .graphs import Record

log = logging.getLogger("branchwise")

VERSION = 1
"""Of how it is measured and written."""

ROWS, OWN = 16, 16
"""Branches, and tokens that each has for itself."""

SHARED = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens that all of them share."""

LAYERS = 4
"""Pools that are read in turn, so that keys come from memory and not from a cache, as in a model of many layers."""

REPEATS = 20


def least_saved(measure: Callable[[], Sequence[tuple[float, float]]], *machine: object) -> float:
    """Tokens that a shared level must spare: what is kept for such a machine, or measured now.

    Args:
        measure: for each length of `SHARED`, seconds without and with a shared level.
        machine: all that they depend on.
    """
    key = hashlib.sha256(repr((VERSION, *machine)).encode()).hexdigest()[:16]
    file = cache_folder() / f"cascade-{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads(file.read_text(encoding="utf-8"))["least_saved"])
    found = break_even(measure())
    log.info("on this GPU, reading a span once for several rows pays from %.0f tokens on that it spares", found)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"least_saved": found}), encoding="utf-8")
        os.replace(part, file)
    return found


def break_even(times: Sequence[tuple[float, float]]) -> float:
    """Tokens that are spared where sharing begins to win for good; those of twice the longest span if it never does."""
    slower = [i for i, (without, shared) in enumerate(times) if shared >= without]
    first = slower[-1] + 1 if slower else 0
    return float((ROWS - 1) * (*SHARED, 2 * SHARED[-1])[first])


def measure(
    attention: FlashInferAttention, spec: AttnSpec, dtype: torch.dtype, device: torch.device, record: Record
) -> list[tuple[float, float]]:
    """Seconds for each length of `SHARED`, without and with a shared level, launched as they are in recorded steps."""
    num_slots = SHARED[-1] + ROWS * OWN
    shape = (num_slots + 1, spec.num_kv_heads, spec.head_dim)
    pools = [tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv") for _ in range(LAYERS)]
    q = torch.zeros(ROWS, spec.num_q_heads, spec.head_dim, dtype=dtype, device=device)
    found: list[tuple[float, float]] = []
    for shared in SHARED:
        times: list[float] = []
        for cost in (None, CostModel(price=0.0, max_levels=1)):
            batch = attn_batch(_branches(shared), num_slots, CPU, 1, cost)
            attention.plan(batch, [spec], attention.record(batch, num_slots * ROWS))

            def layers() -> Tensor:
                for k, v in pools:
                    out = attention.forward(0, q, k, v)
                return out

            times.append(_seconds(record(layers), device))
        found.append((times[0], times[1]))
    return found


def _branches(shared: int) -> Layout:
    """A decode step of `ROWS` branches over a shared span."""
    prefix = Span(0, array("i", range(shared)))
    segments = []
    for row in range(ROWS):
        first = SHARED[-1] + row * OWN
        segments.append(Segment(row, 1, (prefix, Span(row + 1, array("i", range(first, first + OWN))))))
    zeros = array("i", [0] * ROWS)
    return Layout(zeros, zeros, zeros, tuple(segments), array("i"), array("i"))


def _seconds(replay: Callable[[], Tensor], device: torch.device) -> float:
    replay()
    times: list[float] = []
    for _ in range(3):  # the least: what disturbs only adds
        synchronize(device)
        began = time.perf_counter()
        for _ in range(REPEATS):
            replay()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times) / REPEATS

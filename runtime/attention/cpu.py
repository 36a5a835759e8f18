"""Attention on a CPU: what rows share is read once, by torch's flash attention.

torch's CPU kernel gives the log-sum-exp of its scores beside its output, so that parts merge
exactly. Slots that are one run are read where they lie; others are gathered first. The heads that
share a key head are rows of one call, so keys are never repeated. Layers with a sliding window or a
soft cap, which the kernel does not know, take the plain way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from . import AttnBatch, AttnSpec, Level, merge
from .reference import ReferenceAttention

LEAST_RUN = 128
"""Runs of at least this many slots are worth a call each; shorter ones are gathered together."""


def is_available() -> bool:
    """Whether this torch has the kernel; its name is not public."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


@dataclass(frozen=True, slots=True)
class _Job:
    """Rows that attend to all of some slots, or, `causal`, each of them up to its own."""

    rows: slice
    slots: slice | Tensor  # a run of the pool, or int64 slot numbers
    causal: bool


class CpuAttention:
    """Jobs are made once a step, and done once a layer."""

    def __init__(self) -> None:
        self._reference = ReferenceAttention()

    def plan(self, batch: AttnBatch, specs: Sequence[AttnSpec]) -> None:
        self._reference.plan(batch, specs)
        self._specs = specs
        self._jobs = [job for level in batch.levels for job in _jobs(level)]

    def forward(self, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        spec = self._specs[layer]
        if spec.window is not None or spec.softcap is not None:
            return self._reference.forward(layer, q, k_pool, v_pool)
        return _run(self._jobs, q, k_pool, v_pool, spec)[0]

    def partial(self, level: Level, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        return _run(list(_jobs(level)), q, k_pool, v_pool, self._specs[layer])


def _run(jobs: Sequence[_Job], q: Tensor, k_pool: Tensor, v_pool: Tensor, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """Do jobs and merge what they give for each row: [T, H, D] and float32 [T, H]."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32)
    done = 0  # rows below have had a job
    for job in jobs:
        part, part_lse = flash(q[job.rows], k_pool[job.slots], v_pool[job.slots], spec.scale, causal=job.causal)
        if job.rows.start >= done:
            out[job.rows], lse[job.rows] = part, part_lse
            done = job.rows.stop
        else:
            out[job.rows], lse[job.rows] = merge(out[job.rows], lse[job.rows], part, part_lse)
    return out, lse


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of R rows to S > 0 keys by torch's CPU kernel.

    Args:
        q: [R, H, D].
        k, v: [S, K, D].
        causal: R equals S, and row i sees keys 0 to i.

    Returns:
        [R, H, D], and the natural log-sum-exp, float32 [R, H].
    """
    assert len(k), "the kernel ends the process on an empty set of keys"
    num_rows, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]                  # [1, K, S, D]
    if causal:  # a row's place among the rows matters: one call's rows are one head's
        queries = q.transpose(0, 1)[None]                                            # [1, H, R, D]
        repeat = num_heads // num_kv
        keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    else:
        queries = q.view(num_rows, num_kv, -1, head_dim).transpose(0, 1).reshape(1, num_kv, -1, head_dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, attn_mask=None, scale=scale
    )
    if causal:
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    shape = (num_kv, num_rows, num_heads // num_kv)
    return (
        out.view(*shape, head_dim).transpose(0, 1).reshape(q.shape),
        lse.view(shape).transpose(0, 1).reshape(num_rows, num_heads),
    )


def _jobs(level: Level) -> Sequence[_Job]:
    """The jobs of a level, in order of rows: for each group the keys all its rows see, then its own rows."""
    rows, ends, last = level.qo_indptr.tolist(), level.kv_indptr.tolist(), level.last_page_len.tolist()
    page = torch.arange(level.page_size)
    slots = (level.kv_indices.long()[:, None] * level.page_size + page).flatten()
    jobs: list[_Job] = []
    for group, (first, end) in enumerate(pairwise(rows)):
        start, stop = ends[group] * level.page_size, ends[group + 1] * level.page_size - level.page_size + last[group]
        own = end - first if level.causal and end - first > 1 else 0
        if first < end and start < stop:
            jobs += [_Job(slice(first, end), part, False) for part in _runs(slots[start : stop - own])]
            if own:
                jobs.append(_Job(slice(first, end), _only_run(slots[stop - own : stop]), True))
    return jobs


def _runs(slots: Tensor) -> list[slice | Tensor]:
    """Slots as runs of the pool where those are long, and the others together."""
    if not len(slots):
        return []
    breaks = ((slots[1:] - slots[:-1]) != 1).nonzero().flatten() + 1
    if not len(breaks):
        return [_only_run(slots)]
    runs = slots.tensor_split(breaks)
    long = [run for run in runs if len(run) >= LEAST_RUN]
    short = [run for run in runs if len(run) < LEAST_RUN]
    return [_only_run(run) for run in long] + ([torch.cat(short)] if short else [])


def _only_run(slots: Tensor) -> slice | Tensor:
    first, end = int(slots[0]), int(slots[-1]) + 1
    is_run = end - first == len(slots) and bool((slots.diff() == 1).all())
    return slice(first, end) if is_run else slots

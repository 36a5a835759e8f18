"""Attention on a CPU: what rows share is read once.

The compiled kernel of `ragged.py` does it all where there is numba. Without it, and until its code is
loaded, torch's flash attention does what it can: it gives the log-sum-exp of its scores beside its
output, so that parts merge exactly. Slots that are one run are read where they lie; others are
gathered first. The short ends that rows have for themselves are padded and done together, by length.
The heads that share a key head are rows of one call, so keys are never repeated. Layers with a
sliding window or a soft cap, which torch's kernel does not know, take the plain way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from . import AttnBatch, AttnSpec, Level, merge
from .kernels import Caller, kernel_for
from .reference import ReferenceAttention
from .units import Units, units_of

LEAST_RUN = 128
"""Runs of at least this many slots are worth a call each; shorter ones are gathered."""


def is_available() -> bool:
    """Whether this torch has the kernel; its name is not public."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


@dataclass(frozen=True, slots=True)
class Together:
    """Rows that attend to the same slots: to all of them or, `causal`, each of them up to its own."""

    rows: slice
    slots: slice | Tensor  # a run of the pool, or int64 slot numbers
    causal: bool


@dataclass(frozen=True, slots=True)
class EachItsOwn:
    """Rows that attend to slots of their own, of about the same number."""

    rows: Tensor   # [N] int64
    slots: Tensor  # [N, S] int64, padded
    mask: Tensor   # [N, 1, 1, S], 0 for slots that count and -inf for the others


class CpuAttention:
    """Work is planned once a step, and done once a layer."""

    def __init__(self) -> None:
        self._reference = ReferenceAttention()
        self._caller = Caller()

    def prepare(self, specs: Sequence[AttnSpec], dtype: torch.dtype) -> None:
        """Begin to load the compiled kernels of these layers, with keys of `dtype`. Until then torch does the work."""
        for spec in specs:
            kernel_for(spec, dtype)

    def plan(self, batch: AttnBatch, specs: Sequence[AttnSpec]) -> None:
        self._reference.plan(batch, specs)
        self._batch, self._specs = batch, specs
        self._threads = torch.get_num_threads()
        self._units: dict[tuple[int, int, int | None], Units] = {}
        self._jobs: list[Together | EachItsOwn] | None = None

    def forward(self, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        spec = self._specs[layer]
        if (kernel := kernel_for(spec, q.dtype)) is not None:
            return self._caller.run(kernel, self.units(spec), spec, q, k_pool, v_pool)[0]
        if spec.window is not None or spec.softcap is not None:
            return self._reference.forward(layer, q, k_pool, v_pool)
        if self._jobs is None:
            self._jobs = [job for level in self._batch.levels for job in _jobs(level)]
        return _run(self._jobs, q, k_pool, v_pool, spec.scale)[0]

    def partial(self, level: Level, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        spec = self._specs[layer]
        if (kernel := kernel_for(spec, q.dtype)) is not None:
            units = units_of((level,), spec.num_kv_heads, _repeat(spec), spec.window, self._threads)
            out, lse = self._caller.run(kernel, units, spec, q, k_pool, v_pool)
            return out.clone(), lse.clone()
        if spec.window is not None or spec.softcap is not None:
            return self._reference.partial(level, layer, q, k_pool, v_pool)
        return _run(_jobs(level), q, k_pool, v_pool, spec.scale)

    def units(self, spec: AttnSpec) -> Units:
        """Those of the step, made once for all layers of a kind. A window's rows look back along the whole path."""
        key = spec.num_kv_heads, _repeat(spec), spec.window
        if key not in self._units:
            levels = self._batch.levels if spec.window is None else (self._batch.flat,)
            self._units[key] = units_of(levels, *key, self._threads)
        return self._units[key]


def _repeat(spec: AttnSpec) -> int:
    return spec.num_q_heads // spec.num_kv_heads


def _run(
    jobs: Sequence[Together | EachItsOwn], q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Do jobs and merge what they give for each row: [T, H, D] and float32 [T, H]."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for job in jobs:
        rows = job.rows
        match job:
            case Together(_, slots, causal):
                part = flash(q[rows], k_pool[slots], v_pool[slots], scale, causal=causal)
            case EachItsOwn(_, slots, mask):
                part = flash_each(q[rows], k_pool[slots], v_pool[slots], scale, mask.to(q.dtype))
        out[rows], lse[rows] = merge(out[rows], lse[rows], *part)
    return out, lse


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of R rows to S > 0 keys.

    Args:
        q: [R, H, D].
        k, v: [S, K, D].
        causal: R equals S, and row i sees keys 0 to i.

    Returns:
        [R, H, D], and the natural log-sum-exp, float32 [R, H].
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]                    # [1, K, S, D]
    if causal:  # a row's place among the rows matters: the rows of a call are those of one head
        repeat = num_heads // num_kv
        keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        out, lse = _kernel(q.transpose(0, 1)[None], keys, values, scale, causal=True)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    queries = q.reshape(num_rows, num_kv, -1, head_dim).transpose(0, 1)                # [K, R, G, D]
    out, lse = _kernel(queries.reshape(1, num_kv, -1, head_dim), keys, values, scale)
    shape = (num_kv, num_rows, num_heads // num_kv)
    out, lse = out.view(*shape, head_dim).transpose(0, 1), lse.view(shape).transpose(0, 1)
    return out.reshape(q.shape), lse.reshape(num_rows, num_heads)


def flash_each(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of N rows to S keys each, of which those count whose mask is 0; at least one for each row.

    Args:
        q: [N, H, D].
        k, v: [N, S, K, D].
        mask: [N, 1, 1, S].
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv = k.shape[2]
    queries = q.reshape(num_rows, num_kv, -1, head_dim)                                # [N, K, G, D]
    out, lse = _kernel(queries, k.transpose(1, 2), v.transpose(1, 2), scale, mask=mask)
    return out.reshape(q.shape), lse.reshape(num_rows, num_heads)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    assert k.shape[2], "torch's kernel ends the process on an empty set of keys"
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _jobs(level: Level) -> list[Together | EachItsOwn]:
    """The jobs of a level: for each group the keys all its rows see, then its own rows; single short rows together."""
    rows, ends, last = level.qo_indptr.tolist(), level.kv_indptr.tolist(), level.last_page_len.tolist()
    page = torch.arange(level.page_size)
    slots = (level.kv_indices.long()[:, None] * level.page_size + page).flatten()
    jobs: list[Together | EachItsOwn] = []
    short: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)  # by the length they are padded to
    for group, (first, end) in enumerate(pairwise(rows)):
        start, stop = ends[group] * level.page_size, ends[group + 1] * level.page_size - level.page_size + last[group]
        if first == end or start >= stop:
            continue
        if end - first == 1 and stop - start < LEAST_RUN:
            short[1 << (stop - start - 1).bit_length()].append((first, slots[start:stop]))
            continue
        own = end - first if level.causal and end - first > 1 else 0
        jobs += [Together(slice(first, end), part, False) for part in _runs(slots[start : stop - own])]
        if own:
            jobs.append(Together(slice(first, end), _run_or_slots(slots[stop - own : stop]), True))
    return jobs + [_together(members) for members in short.values()]


def _together(members: Sequence[tuple[int, Tensor]]) -> EachItsOwn:
    rows = torch.tensor([row for row, _ in members])
    slots = torch.nn.utils.rnn.pad_sequence([slots for _, slots in members], batch_first=True)
    lengths = torch.tensor([len(slots) for _, slots in members])
    padding = torch.arange(slots.shape[1]) >= lengths[:, None]
    return EachItsOwn(rows, slots, torch.zeros(slots.shape).masked_fill(padding, -torch.inf)[:, None, None])


def _runs(slots: Tensor) -> list[slice | Tensor]:
    """Slots as runs of the pool where those are long, and the others together."""
    if not len(slots):
        return []
    breaks = ((slots[1:] - slots[:-1]) != 1).nonzero().flatten() + 1
    if not len(breaks):
        return [_run_or_slots(slots)]
    runs = slots.tensor_split(breaks)
    long = [run for run in runs if len(run) >= LEAST_RUN]
    short = [run for run in runs if len(run) < LEAST_RUN]
    return [_run_or_slots(run) for run in long] + ([torch.cat(short)] if short else [])


def _run_or_slots(slots: Tensor) -> slice | Tensor:
    first, end = int(slots[0]), int(slots[-1]) + 1
    is_run = end - first == len(slots) and bool((slots.diff() == 1).all())
    return slice(first, end) if is_run else slots

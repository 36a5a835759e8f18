"""Decode steps as CUDA graphs: recorded once for each size, then launched whole.

A step of one row a segment is filled up to the next of a few sizes, with rows that use the scratch page only.
What differs between steps of a size lies in tensors that stay where they are: they are written, attention is planned,
and the graph is replayed. Everything else is eager: prompts, drafts, steps of unusual sharing.

Nothing here knows CUDA but `record_on`: with a function that just runs what it is given, all of it works on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..attention import AttnBatch, Level
from ..attention.flashinfer import FlashInferAttention, Wrappers
from ..kv import KVPool
from ..layout import Layout
from ..model import Model
from ..runner import step_input
from ..transfers import Transfers

log = logging.getLogger("branchwise")

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of recorded steps."""

GROUPS = (1, 4, 8)
"""Groups of a shared level. Few: with many, FlashInfer takes small tiles, which read the shared keys more often."""

MOST_PAGES = 1 << 22
"""Pages that a level may name: 16 MiB of indices."""

Record: TypeAlias = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Takes what launches a step and gives what launches it again, with the same tensors."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is fixed in a recorded step: its rows, and the groups of each shared level."""

    rows: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    integers: Tensor  # int32 [4 rows], on the device: tokens, positions, write slots, wanted rows
    wrappers: Wrappers
    replay: Callable[[], Tensor]


class Graphs:
    """Recorded steps of one model, made when they are first needed."""

    def __init__(
        self, model: Model, attention: FlashInferAttention, pool: KVPool, transfers: Transfers, record: Record
    ) -> None:
        self._model, self._attention, self._pool = model, attention, pool
        self._transfers, self._record = transfers, record
        self._windows = any(spec.window is not None for spec in model.specs)
        self._recorded: dict[Shape, Recorded] = {}
        self._failed = False

    def forward(self, batch: AttnBatch, layout: Layout) -> Tensor | None:
        """float32 logits [L, V] of the wanted rows, until the next call; None: this step is not for a graph."""
        shape = shape_of(batch, windows=self._windows)
        if shape is None or self._failed or not layout.logit_rows:
            return None
        page = self._pool.scratch // self._pool.page_size
        padded = fill_up(batch, shape, page)
        if shape not in self._recorded:
            try:
                self._recorded[shape] = self._new(padded, shape)
            except RuntimeError as error:
                self._failed = True
                log.warning("CUDA graphs cannot be used, so steps cost more to launch: %r", error)
                return None
        found = self._recorded[shape]
        self._attention.plan(padded, self._model.specs, found.wrappers)
        found.integers.copy_(self._transfers.upload(self._integers(batch, layout, shape)), non_blocking=True)
        return found.replay()[: len(layout.logit_rows)]

    def _new(self, padded: AttnBatch, shape: Shape) -> Recorded:
        """Record steps of a shape, by one whose rows are all filled up."""
        wrappers = self._attention.record(padded, MOST_PAGES)
        integers = torch.zeros(4 * shape.rows, dtype=torch.int32, device=self._model.device)
        integers[2 * shape.rows : 3 * shape.rows] = self._pool.scratch
        self._attention.plan(padded, self._model.specs, wrappers)

        def run() -> Tensor:
            return self._model.forward(step_input(integers, [shape.rows] * 4, self._attention, self._pool))

        return Recorded(integers, wrappers, self._record(run))

    def _integers(self, batch: AttnBatch, layout: Layout, shape: Shape) -> Tensor:
        values = torch.zeros(4, shape.rows, dtype=torch.int32)
        values[2] = self._pool.scratch
        values[2, : batch.num_rows] = batch.write_slots
        for place, part in ((0, layout.tokens), (1, layout.positions), (3, layout.logit_rows)):
            values[place, : len(part)] = torch.frombuffer(part, dtype=torch.int32)
        return values.flatten()


def shape_of(batch: AttnBatch, *, windows: bool = True) -> Shape | None:
    """The smallest shape that a step fits in, or None: it has segments of several rows, or too much of something.

    Args:
        windows: some layer has one, and so needs whole paths.
    """
    if batch.num_rows != len(batch.levels[-1].last_page_len):
        return None
    rows = next((size for size in SIZES if size >= batch.num_rows), None)
    levels = (*batch.levels, batch.flat) if windows else batch.levels
    if rows is None or max(int(level.kv_indptr[-1]) for level in levels) + rows > MOST_PAGES:
        return None
    filled = rows > batch.num_rows  # these rows are one more group
    needed = [len(level.last_page_len) + filled for level in batch.levels[:-1]]
    groups = [next((size for size in GROUPS if size >= count), None) for count in needed]
    return None if None in groups else Shape(rows, tuple(size for size in groups if size is not None))


def fill_up(batch: AttnBatch, shape: Shape, page: int) -> AttnBatch:
    """The step with rows and groups as in `shape`; rows that are added see the first slot of `page`."""
    more = shape.rows - batch.num_rows
    *shared, own = batch.levels
    levels = [_with_groups(level, groups, shape.rows) for level, groups in zip(shared, shape.groups, strict=True)]
    filled = _with_rows(own, more, page)
    flat = (lambda: _with_rows(batch.flat, more, page)) if shared else lambda: filled
    return AttnBatch((*levels, filled), flat, batch.write_slots, shape.rows)


def _with_rows(level: Level, more: int, page: int) -> Level:
    """So many groups more, of one row with one key each."""
    count = torch.arange(1, more + 1, dtype=torch.int32)
    return Level(
        torch.cat([level.qo_indptr, level.qo_indptr[-1] + count]),
        torch.cat([level.kv_indptr, level.kv_indptr[-1] + count]),
        torch.cat([level.kv_indices, torch.full_like(count, page)]),
        torch.cat([level.last_page_len, torch.ones_like(count)]),
        level.page_size,
        level.causal,
    )


def _with_groups(level: Level, groups: int, rows: int) -> Level:
    """So many groups in all, those that are added without a key: the first has the rows that are added, if any."""
    more = groups - len(level.last_page_len)
    return Level(
        torch.cat([level.qo_indptr, torch.full((more,), rows, dtype=torch.int32)]),
        torch.cat([level.kv_indptr, level.kv_indptr[-1:].expand(more)]),
        level.kv_indices,
        torch.cat([level.last_page_len, torch.zeros(more, dtype=torch.int32)]),
        level.page_size,
        level.causal,
    )


def record_on(device: torch.device) -> Record:
    """Recording on a GPU. All graphs share their memory, as no two of them run at once."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        current, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):  # what is made at a first run must not become part of the graph
            run()
            run()
        current.wait_stream(beside)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    return record

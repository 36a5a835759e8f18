"""Attention on an NVIDIA GPU: FlashInfer's kernels, one planned wrapper for each level of sharing.

Every level is a batch of its prefill kernel, decoding included: with tensor cores a row of queries is as well served
there, and one compiled module does it all. Levels are merged by FlashInfer's own kernel. What its kernels do not take
is answered in plain torch, by the reference backend (`unsupported` says what that is).

Facts about FlashInfer that this code stands on: its planner reads index arrays as int32 whatever they are, so they are
checked here; its log-sum-exp is base 2; `window_left` shows one key more than it says; a plan is copied to the GPU
after `plan` has returned, so two sets of wrappers take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..devices import synchronize
from ..gpu.libraries import DTYPES
from ..transfers import Transfers, transfers_for
from . import AttnBatch, AttnSpec, Level, one_key
from .levels import CostModel

HEAD_DIMS = (64, 128, 256)

LEAST_WORKSPACE = 256 << 20
INTEGERS = 1 << 20
"""Bytes for the plan of a recorded step, which has few rows."""

SPLITS = 264
"""Work items at most where the planner splits the keys of a batch, on the largest GPUs: two for each processor."""

NOTHING = -1e4
"""FlashInfer's log-sum-exp where there was no key is -5e4; a real one is far above this."""

WORTH_BYTES = 40_000_000
"""Bytes of a layer that a shared level must save: what its launches and merges cost, at 4 TB/s and 10 microseconds."""


def unsupported(specs: Sequence[AttnSpec], dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot serve these layers with keys of `dtype`; None: it can."""
    if dtype not in DTYPES:
        return f"its kernels take float16 and bfloat16, not {dtype}"
    sizes = sorted({spec.head_dim for spec in specs} - set(HEAD_DIMS))
    if sizes:
        return f"its kernels take heads of {', '.join(map(str, HEAD_DIMS))} numbers, not {', '.join(map(str, sizes))}"
    return None


def merges(spec: AttnSpec, dtype: torch.dtype) -> bool:
    """Whether its kernel that merges takes so many heads: all of a row's are one block of 1,024 threads at most."""
    numbers = max(16 // dtype.itemsize, spec.head_dim // 32)  # of a thread
    return spec.head_dim // numbers * spec.num_q_heads <= 1024


def cost_model(specs: Sequence[AttnSpec], dtype: torch.dtype) -> CostModel:
    """When sharing a span pays: when the keys and values of a layer that need not be read are worth its launches."""
    if not all(merges(spec, dtype) for spec in specs):
        return CostModel(max_levels=0)
    widest = max(2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize for spec in specs)
    return CostModel(price=6.0, max_levels=2, least_saved=WORTH_BYTES / widest)


def workspace_bytes(level: Level, spec: AttnSpec) -> int:
    """What a plan of this level may need: partial outputs of each work item, in float32.

    A work item is a tile of queries, packed by key head, with a part of its keys.
    """
    rows = level.qo_indptr.tolist()
    packed = [(end - first) * (spec.num_q_heads // spec.num_kv_heads) for first, end in pairwise(rows)]
    mean = sum(packed) / len(packed)
    tile = 16 if mean <= 16 else 64 if mean <= 64 or spec.head_dim > 128 else 128
    tiles = sum(-(-size // tile) for size in packed)
    items: int = max(SPLITS // spec.num_kv_heads, tiles)
    return spec.num_q_heads * items * tile * (spec.head_dim + 1) * 4


class Wrappers:
    """FlashInfer's wrappers for steps of one kind: one for each level and kind of layer."""

    def __init__(self, make: Callable[[AttnSpec, int], Any]) -> None:
        self._make = make
        self._made: dict[tuple[AttnSpec, int], Any] = {}
        self.sent: Callable[[], None] | None = None  # what waits until the last plan is on the GPU

    def get(self, spec: AttnSpec, number: int) -> Any:
        if (spec, number) not in self._made:
            self._made[spec, number] = self._make(spec, number)
        return self._made[spec, number]


class FlashInferAttention:
    """Plans a step with FlashInfer's wrappers, and launches them layer by layer."""

    def __init__(
        self, library: Any, device: torch.device, dtype: torch.dtype, transfers: Transfers | None = None
    ) -> None:
        """
        Args:
            library: the module `flashinfer`, or what stands in for it in tests.
            dtype: of queries, keys and values.
        """
        self._library, self._device, self._dtype = library, device, dtype
        self.version: str = getattr(library, "__version__", "")
        self._transfers = transfers or transfers_for(device)
        self._workspace = torch.zeros(LEAST_WORKSPACE, dtype=torch.uint8, device=device)
        self._sets = [Wrappers(self._plain_wrapper) for _ in range(2)]
        self._step = 0
        self._specs: Sequence[AttnSpec] = ()
        # Of recorded steps, which never run at once, nor does one begin to run that was not planned just before.
        self._indices: dict[tuple[AttnSpec, int], Tensor] = {}
        self._integers: dict[tuple[AttnSpec, int], Tensor] = {}

    def try_out(self, specs: Sequence[AttnSpec]) -> None:
        """Plan and run a step of one row and one key for each kind of layer, and a merge.

        FlashInfer compiles its modules when they are first used. What that raises if it cannot is raised here.
        """
        for spec in dict.fromkeys(specs):
            self._specs = (spec,)
            keys = torch.zeros(1, spec.num_kv_heads, spec.head_dim, dtype=self._dtype, device=self._device)
            q = torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=self._dtype, device=self._device)
            out, lse = self.partial(one_key(), 0, q, keys, keys)
            if merges(spec, self._dtype):
                self._library.merge_state_in_place(out, lse, out.clone(), lse.clone())
        synchronize(self._device)

    def plan(self, batch: AttnBatch, specs: Sequence[AttnSpec], recorded: Wrappers | None = None) -> None:
        """Prepare a step; `recorded`: what `record` gave for a step of this shape."""
        self._step += 1
        self._batch, self._specs = batch, specs
        self._reserve(batch, set(specs))
        self._wrappers = recorded or self._sets[self._step % 2]
        if self._wrappers.sent is not None:  # its plans are copied from memory that a new plan writes to
            self._wrappers.sent()
        for spec in dict.fromkeys(specs):
            for number, level in enumerate(self._levels(spec)):
                self._plan(self._wrappers.get(spec, number), level, spec)
        self._wrappers.sent = self._transfers.so_far()

    def record(self, batch: AttnBatch, most_pages: int) -> Wrappers:
        """Wrappers for a CUDA graph: their plans stay where they are, for steps of as many rows and groups as `batch`.

        Args:
            most_pages: of one level of a step.
        """

        def make(spec: AttnSpec, number: int) -> Any:
            levels = batch.levels if spec.window is None else (batch.flat,)
            if (spec, number) not in self._indices or len(self._indices[spec, number]) < most_pages:
                self._indices[spec, number] = self._empty(most_pages)
                self._integers[spec, number] = torch.zeros(INTEGERS, dtype=torch.uint8, device=self._device)
            groups = len(levels[number].last_page_len)
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=self._empty(groups + 1),
                paged_kv_indptr_buf=self._empty(groups + 1),
                paged_kv_indices_buf=self._indices[spec, number],
                paged_kv_last_page_len_buf=self._empty(groups),
                backend="fa2",
            )
            wrapper.reset_workspace_buffer(self._workspace, self._integers[spec, number])  # its own are 8 MiB each
            return wrapper

        return Wrappers(make)

    def forward(self, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        spec = self._specs[layer]
        levels = self._levels(spec)
        own = len(levels) - 1
        out, lse = self._run(self._wrappers.get(spec, own), levels[own], q, k_pool, v_pool)
        for number in range(own):
            more, more_lse = self._run(self._wrappers.get(spec, number), levels[number], q, k_pool, v_pool)
            self._library.merge_state_in_place(out, lse, more, more_lse)
        return out

    def partial(self, level: Level, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        spec = self._specs[layer]
        wrapper = self._plain_wrapper(spec, 0)
        self._plan(wrapper, level, spec)
        out, lse = self._run(wrapper, level, q, k_pool, v_pool)
        return out, torch.where(lse < NOTHING, -torch.inf, lse * math.log(2))

    def _levels(self, spec: AttnSpec) -> tuple[Level, ...]:
        """A window's rows look back along the whole path: positions are relative inside a level."""
        return self._batch.levels if spec.window is None else (self._batch.flat,)

    def _run(self, wrapper: Any, level: Level, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)  # else it fills them with zeros
        wrapper.run(q, _paged(k_pool, v_pool, level.page_size), out=out, lse=lse, return_lse=True)
        return out, lse

    def _plain_wrapper(self, spec: AttnSpec, number: int) -> Any:
        # backend "auto" is another kernel on some GPUs, which neither packs query heads nor splits keys
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=self._device)

    def _reserve(self, batch: AttnBatch, specs: set[AttnSpec]) -> None:
        """Make the workspace larger if this step may need it. Wrappers hold the old one: so new ones are made, except
        for recorded steps, whose own never need more."""
        needed = max(
            workspace_bytes(level, spec)
            for spec in specs
            for level in (batch.levels if spec.window is None else (batch.flat,))
        )
        if needed > len(self._workspace):
            self._workspace = torch.zeros(needed, dtype=torch.uint8, device=self._device)
            self._sets = [Wrappers(self._plain_wrapper) for _ in range(2)]

    def _plan(self, wrapper: Any, level: Level, spec: AttnSpec) -> None:
        _check(level)
        pinned = self._transfers.pinned
        wrapper.plan(
            qo_indptr=pinned(level.qo_indptr),  # on the host: it reads them there
            paged_kv_indptr=pinned(level.kv_indptr),
            paged_kv_indices=self._transfers.upload(level.kv_indices),
            paged_kv_last_page_len=pinned(level.last_page_len),
            num_qo_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_qk=spec.head_dim,
            page_size=level.page_size,
            causal=level.causal,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.softcap,
            q_data_type=self._dtype,
        )


def _paged(k_pool: Tensor, v_pool: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """The pools as pages: [pages, page_size, K, D] each, where they lie."""
    shape = (-1, page_size, *k_pool.shape[1:])
    return k_pool.view(shape), v_pool.view(shape)


def _check(level: Level) -> None:
    """What the planner does not check, and would misread."""
    for tensor in (level.qo_indptr, level.kv_indptr, level.kv_indices, level.last_page_len):
        assert tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous(), "index arrays are int32"
    if level.causal:
        rows, pages, last = level.qo_indptr.tolist(), level.kv_indptr.tolist(), level.last_page_len.tolist()
        for group, ((first, end), (start, stop)) in enumerate(zip(pairwise(rows), pairwise(pages), strict=True)):
            keys = (stop - start - 1) * level.page_size + last[group] if stop > start else 0
            assert keys >= end - first, f"group {group} has {end - first} rows and {keys} keys"

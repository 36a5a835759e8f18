"""FlashInfer's batch prefill wrapper on a CPU: its argument names, its rules checked strictly, torch's numbers.

Its kernels need a GPU; the arrays they are given do not. What this accepts, the real planner takes.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MINUS_INFINITY = -5e4  # FlashInfer's own, finite; its log-sum-exp is base 2


class Refused(ValueError):
    """An argument that FlashInfer would refuse, or silently misread."""


def need(condition: bool, message: str) -> None:
    if not condition:
        raise Refused(message)


def need_int32(tensor: Tensor, length: int | None, name: str) -> list[int]:
    ok = tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
    need(ok, f"{name} must be a contiguous 1-D int32 tensor")
    need(length is None or len(tensor) == length, f"{name} has length {len(tensor)}, not {length}")
    values: list[int] = tensor.tolist()
    return values


def is_rising(values: list[int]) -> bool:
    return values[0] == 0 and all(a <= b for a, b in pairwise(values))


def length_of(pages: int, last: int, page_size: int) -> int:
    return (pages - 1) * page_size + last if pages else 0


def merge_state_in_place(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    need(lse.dtype == other_lse.dtype == torch.float32, "a log-sum-exp must be float32")
    need(out.shape == other.shape and lse.shape == other_lse.shape == out.shape[:2], "shapes to merge")
    top = torch.maximum(lse, other_lse)
    a, b = torch.exp2(lse - top), torch.exp2(other_lse - top)
    out.copy_(out * (a / (a + b))[..., None] + other * (b / (a + b))[..., None])
    lse.copy_(torch.log2(a + b) + top)


class BatchPrefillWithPagedKVCacheWrapper:
    """`plan`, then `run`; counts the pages that are read.

    For a CUDA graph, `run` sees of a plan only what lies in the buffers, as a replayed graph does.
    """

    def __init__(
        self,
        workspace: Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        need(kv_layout == "NHD", "only the layout [pages, page_size, heads, dim] is used")
        need(backend == "fa2", 'backend="fa2" must be chosen explicitly')
        self.pages_read = 0
        self._graph, self._most_rows = use_cuda_graph, 0
        self._buffers = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf, paged_kv_indices_buf]
        given = [buffer for buffer in self._buffers if buffer is not None]
        need(len(given) == (4 if use_cuda_graph else 0), "a CUDA graph needs all buffers, and nothing else any")
        for buffer in given:
            need_int32(buffer, None, "a buffer")

    def reset_workspace_buffer(self, floats: Tensor, integers: Tensor) -> None:
        need(floats.dtype == integers.dtype == torch.uint8, "workspaces are bytes")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        rows = need_int32(qo_indptr, None, "qo_indptr")
        groups = len(rows) - 1
        pages = need_int32(paged_kv_indptr, groups + 1, "paged_kv_indptr")
        last = need_int32(paged_kv_last_page_len, groups, "paged_kv_last_page_len")
        indices = need_int32(paged_kv_indices, None, "paged_kv_indices")
        need(groups >= 1, "an empty batch")
        need(is_rising(rows) and is_rising(pages), "an indptr does not rise from 0")
        need(pages[-1] <= len(indices), "paged_kv_indptr points past the indices")
        need(num_qo_heads % num_kv_heads == 0, "query heads must be a multiple of key heads")
        for group in range(groups):
            count = pages[group + 1] - pages[group]
            need(1 <= last[group] <= page_size if count else last[group] == 0, "last_page_len does not fit the pages")
            if causal:  # the real planner does not check this
                need(length_of(count, last[group], page_size) >= rows[group + 1] - rows[group], "fewer keys than rows")
        self._planned = [qo_indptr, paged_kv_indptr, paged_kv_last_page_len, paged_kv_indices]
        if self._graph:
            self._most_rows = self._most_rows or rows[-1]
            need(rows[-1] <= self._most_rows, "more rows than in the first plan of a graph")
            for buffer, values in zip(self._buffers, self._planned, strict=True):
                assert buffer is not None
                need(len(values) == len(buffer) or values is paged_kv_indices, "the groups of a graph are fixed")
                need(len(values) <= len(buffer), "more indices than the graph's buffer holds")
                buffer[: len(values)].copy_(values)
        self._num_rows, self._heads, self._shape = rows[-1], num_qo_heads, (page_size, num_kv_heads, head_dim_qk)
        self._causal, self._window, self._cap = causal, window_left, logits_soft_cap
        self._scale = sm_scale or head_dim_qk**-0.5

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        k, v = paged_kv_cache
        need(q.shape == (self._num_rows, self._heads, self._shape[2]), f"q has shape {tuple(q.shape)}")
        need(k.shape[1:] == self._shape and k.stride() == v.stride(), f"the cache has shape {tuple(k.shape)}")
        arrays = self._buffers if self._graph else self._planned
        rows, ends, last = [array.tolist() for array in arrays[:3] if array is not None]
        assert arrays[3] is not None
        indices = arrays[3][: ends[-1]].tolist()
        need(max(indices, default=0) < len(k), "a page id is out of range")
        out, lse = torch.empty_like(q) if out is None else out, torch.empty(q.shape[:2]) if lse is None else lse
        out.zero_(), lse.fill_(MINUS_INFINITY)
        for group, (first, end) in enumerate(pairwise(rows)):
            pages = indices[ends[group] : ends[group + 1]]
            length = length_of(len(pages), last[group], self._shape[0])
            self.pages_read += len(pages) * (end > first)
            if length and end > first:
                keys, values = (t[pages].flatten(0, 1)[:length] for t in (k, v))
                out[first:end], lse[first:end] = self._attend(q[first:end], keys, values)
        return (out, lse) if return_lse else out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1).float(), v.repeat_interleave(repeat, 1).float()
        scores = torch.einsum("qhd,nhd->hqn", q.float(), k) * self._scale
        if self._cap:
            scores = self._cap * torch.tanh(scores / self._cap)
        row = torch.arange(len(k) - len(q), len(k))[:, None]
        key = torch.arange(len(k))[None]
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        if self._causal:
            seen &= key <= row
        if self._window >= 0:
            seen &= key >= row - self._window  # shows window_left + 1 keys
        scores = scores.masked_fill(~seen, -torch.inf)
        out = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), v).to(q.dtype)
        return out, (torch.logsumexp(scores, -1) / math.log(2)).T

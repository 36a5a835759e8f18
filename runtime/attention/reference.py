"""Attention in plain torch, obviously right: the oracle of the other backends. Runs on any device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from . import AttnBatch, AttnSpec, Level, merge


class ReferenceAttention:
    """One gather and one softmax for each group of rows."""

    def plan(self, batch: AttnBatch, specs: Sequence[AttnSpec]) -> None:
        self._batch, self._specs = batch, specs

    def forward(self, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        windowed = self._specs[layer].window is not None  # positions are relative inside a level
        levels = (self._batch.flat,) if windowed else self._batch.levels
        parts = [self.partial(level, layer, q, k_pool, v_pool) for level in levels]
        return reduce(lambda a, b: merge(*a, *b), parts)[0]

    def partial(self, level: Level, layer: int, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        spec = self._specs[layer]
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        rows, ends = level.qo_indptr.tolist(), level.kv_indptr.tolist()
        page = torch.arange(level.page_size, device=q.device)
        slots = (level.kv_indices.to(q.device, torch.int64)[:, None] * level.page_size + page).flatten()
        last = level.last_page_len.tolist()
        for group in range(len(rows) - 1):
            r = slice(rows[group], rows[group + 1])
            start, end = ends[group] * level.page_size, ends[group + 1] * level.page_size
            if r.start < r.stop and start < end:
                s = slots[start : end - level.page_size + last[group]]
                out[r], lse[r] = attend(q[r], k_pool[s], v_pool[s], spec, causal=level.causal)
        return out, lse


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Softmax attention of R rows to S keys, computed in float32.

    Args:
        q: [R, H, D].
        k, v: [S, K, D]; each key head serves H / K query heads.
        causal: row i sees the keys up to S - R + i, and with a window only the last of them.

    Returns:
        The output [R, H, D] in q's dtype, and the natural log-sum-exp, float32 [R, H].
    """
    num_rows, num_heads, head_dim = q.shape
    num_keys, num_kv, _ = k.shape
    grouped = q.float().view(num_rows, num_kv, num_heads // num_kv, head_dim)     # [R, K, G, D]
    scores = torch.einsum("rkgd,skd->kgrs", grouped, k.float()) * spec.scale      # [K, G, R, S]
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if causal and (num_rows > 1 or spec.window is not None):
        newest = torch.arange(num_keys - num_rows, num_keys, device=q.device)[:, None]  # [R, 1]
        key = torch.arange(num_keys, device=q.device)                                  # [S]
        seen = key <= newest if spec.window is None else (key <= newest) & (key > newest - spec.window)
        scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)                                         # [K, G, R]
    weights = torch.exp(scores - lse[..., None])
    out = torch.einsum("kgrs,skd->rkgd", weights, v.float())                      # [R, K, G, D]
    return out.reshape(num_rows, num_heads, head_dim).to(q.dtype), lse.permute(2, 0, 1).reshape(num_rows, num_heads)

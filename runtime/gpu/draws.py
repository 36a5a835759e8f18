"""The operations of `device_draws` as kernels for a GPU: masks and noise are ours, what filters is FlashInfer's."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ..device_draws import Filters, TorchOperations
from .kernels import draw_kernel, mask_kernel
from .libraries import Missing

log = logging.getLogger("branchwise")

BLOCK = 1024
"""Scores that one program looks at."""


class GpuOperations(TorchOperations):
    """`library` is FlashInfer, or says why it is missing: then torch sorts."""

    def __init__(self, library: Any | Missing, probe: Tensor | None = None) -> None:
        """`probe`: float32 [1, n] on the GPU, to try the library out with."""
        self._library = None if isinstance(library, Missing) else library
        if self._library is not None and probe is not None:
            try:
                self._library.top_k_renorm_probs(probe, torch.ones(1, dtype=torch.int32, device=probe.device))
                self._library.top_p_renorm_probs(probe, probe[0, :1])
            except Exception as error:
                log.warning("top-k and top-p sort in torch, slower: FlashInfer's cannot be used (%r)", error)
                self._library = None

    def mask(self, x: Tensor, rows: Tensor, bits: Tensor) -> None:
        grid = len(rows), -(-x.shape[1] // BLOCK)
        mask_kernel[grid](x, rows, bits, x.shape[1], bits.shape[1], BLOCK=BLOCK)

    def keep(self, x: Tensor, filters: Filters) -> None:
        """By probabilities in float32: of tokens that are equal in it, all are kept where one is."""
        if self._library is None:
            super().keep(x, filters)
            return
        scores = x[filters.rows]
        scaled = (scores.double() / filters.temperature).float()
        left = self._library.top_k_renorm_probs(scaled.softmax(-1), filters.top_k[:, 0].int())
        nucleus = self._library.top_p_renorm_probs(left, filters.top_p[:, 0].float())
        left = torch.where(filters.top_p < 1, nucleus, left)
        least = filters.min_p.float() * left.amax(-1, keepdim=True)
        x[filters.rows] = scores.masked_fill((left <= 0) | (left < least), -torch.inf)

    def draw(self, x: Tensor, rows: Tensor, words: Tensor, temperature: Tensor) -> Tensor:
        blocks = -(-x.shape[1] // BLOCK)
        best = x.new_empty(len(rows), blocks, dtype=torch.float64)
        found = x.new_empty(len(rows), blocks, dtype=torch.int64)
        draw_kernel[len(rows), blocks](x, rows, words, temperature, best, found, x.shape[1], BLOCK=BLOCK)
        return found.gather(1, best.argmax(-1, keepdim=True))[:, 0]

"""The operations of `device_draws` as kernels for a GPU: masks and noise are ours, what filters is FlashInfer's."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_draws import Filters, TorchOperations
from .libraries import Missing

BLOCK = 1024
"""Scores that one program looks at."""


class GpuOperations(TorchOperations):
    """`library` is FlashInfer, or says why it is missing: then torch sorts."""

    def __init__(self, library: Any | Missing) -> None:
        self._library = None if isinstance(library, Missing) else library

    def mask(self, x: Tensor, rows: Tensor, bits: Tensor) -> None:
        grid = len(rows), triton.cdiv(x.shape[1], BLOCK)
        mask_kernel[grid](x, rows, bits, x.shape[1], bits.shape[1], BLOCK=BLOCK)

    def keep(self, x: Tensor, filters: Filters) -> None:
        """By probabilities in float32: of tokens that are equal in it, all are kept where one is."""
        if self._library is None:
            super().keep(x, filters)
            return
        scores = x[filters.rows]
        scaled = (scores.double() / filters.temperature).float()
        left = self._library.top_k_renorm_probs(scaled.softmax(-1), filters.top_k[:, 0].int())
        left = self._library.top_p_renorm_probs(left, filters.top_p[:, 0].float())
        least = filters.min_p.float() * left.amax(-1, keepdim=True)
        x[filters.rows] = scores.masked_fill((left <= 0) | (left < least), -torch.inf)

    def draw(self, x: Tensor, rows: Tensor, words: Tensor, temperature: Tensor) -> Tensor:
        blocks = triton.cdiv(x.shape[1], BLOCK)
        best = x.new_empty(len(rows), blocks, dtype=torch.float64)
        found = x.new_empty(len(rows), blocks, dtype=torch.int64)
        draw_kernel[len(rows), blocks](x, rows, words, temperature, best, found, x.shape[1], BLOCK=BLOCK)
        return found.gather(1, best.argmax(-1, keepdim=True))[:, 0]


@triton.jit
def mask_kernel(x, rows, bits, size, words, BLOCK: tl.constexpr):
    """x float32 [J, size], rows int64 [M], bits int32 [M, words]."""
    m = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + m.to(tl.int64) * words + v // 32, mask=v < size, other=-1)
    barred = ((word >> (v % 32)) & 1) == 0
    tl.store(x + tl.load(rows + m) * size + v, -float("inf"), mask=(v < size) & barred)


@triton.jit
def mix(x):
    """As in `sampling`, on unsigned words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def draw_kernel(x, rows, words, temperature, best, found, size, BLOCK: tl.constexpr):
    """The best sum of a block of a row's scores and noise, and whose it is.

    x float32 [J, size], rows int64 [N], words int32 [N, 2], temperature float64 [N], best float64 [N, blocks],
    found int64 [N, blocks]. Bits are those of `sampling.noise_bits`; what logarithms give may differ in its last place.
    """
    n, block = tl.program_id(0), tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(x + tl.load(rows + n) * size + v, mask=v < size, other=-float("inf")).to(tl.float64)
    first = tl.load(words + 2 * n).to(tl.uint32, bitcast=True)
    second = tl.load(words + 2 * n + 1).to(tl.uint32, bitcast=True)
    bits = mix(mix((v.to(tl.uint32) * 0x9E3779B1) ^ first) ^ second)
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    total = score / tl.load(temperature + n) - tl.log(-tl.log(uniform))
    place = n * tl.num_programs(1) + block
    tl.store(best + place, tl.max(total, 0))
    tl.store(found + place, block * BLOCK + tl.argmax(total, 0).to(tl.int64))

"""From logits to one token, for each row by itself.

The noise of a sample is a function of (seed, fork path, sample index, position, token id) and of
nothing else, computed in integers: what is drawn does not depend on who else is in the batch, nor
on the device. A token is drawn by the Gumbel-max trick: argmax of log-probability + Gumbel noise.

This is how it is meant; `draw_kernel.py` does the same for many rows at once.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_UP_TO = 1e-4
"""Temperatures up to this one take the likeliest token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request draws its tokens. `path` and `sample` tell branches and samples with one seed apart."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0
    path: tuple[int, ...] = ()
    sample: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_UP_TO

    @property
    def whole(self) -> bool:
        """Every token may be drawn."""
        return self.top_k is None and self.top_p >= 1.0 and self.min_p <= 0.0


def sample(logits: Tensor, params: SamplingParams, position: int) -> int:
    """Draw the token that comes at `position`.

    Args:
        logits: [V] of the token before it, -inf where a token cannot be drawn; one can at least.
    """
    if params.greedy:
        return int(logits.argmax())
    scaled = logits.double() / params.temperature                           # float64: small ones do not overflow
    if params.whole:
        tokens = torch.arange(len(logits), device=logits.device)
    else:
        values, order = scaled.sort(descending=True, stable=True)           # of equal ones the first go first
        tokens = order[: _kept(values, params)]
    scaled = scaled[tokens]
    return int(tokens[(scaled + gumbel(tokens, params, position)).argmax()])


def _kept(scaled: Tensor, params: SamplingParams) -> int:
    """How many of the likeliest tokens are kept: by `top_k`, then the fewest that reach `top_p`, then by `min_p`.

    Args:
        scaled: float64 [V], descending.
    """
    scaled = scaled[: params.top_k][scaled[: params.top_k] > -torch.inf]
    before = scaled.softmax(-1).cumsum(-1).roll(1)
    before[0] = 0.0
    kept = int((before < params.top_p).sum())
    if params.min_p > 0:
        kept = min(kept, int((scaled >= scaled[0] + math.log(params.min_p)).sum()))
    return kept


def gumbel(tokens: Tensor, params: SamplingParams, position: int) -> Tensor:
    """Standard Gumbel noise for each token id, [C] int64 -> [C] float64: -log(-log(u)), u uniform in (0, 1)."""
    return gumbel_of(tokens, *noise_key(params, position))


def gumbel_of(tokens: Tensor, first: int | Tensor, second: int | Tensor) -> Tensor:
    """The same for the draw of that name (`noise_key`); for several, named by words int32 [N, 1], [N, C]."""
    return -torch.log(-torch.log((noise_bits(tokens, first, second).double() + 0.5) * 2.0**-32))


def noise_bits(tokens: Tensor, first: int | Tensor, second: int | Tensor) -> Tensor:
    """32 random bits for each token id, [C] int64."""
    words = (tokens.to(torch.int32) * _GOLDEN).bitwise_xor(first)
    return _mix(_mix(words).bitwise_xor_(second)).to(torch.int64).bitwise_and_(_32)


def noise_key(params: SamplingParams, position: int) -> tuple[int, int]:
    """Two signed 32-bit words that name one draw."""
    name = repr((params.seed, params.path, params.sample, position)).encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


_32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1 - 2**32  # 2**32 divided by the golden ratio, as a signed word


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, in place, in int32, in which every input bit changes half of the output bits.

    The constants of `lowbias32` by Chris Wellons, found by search (nullprogram.com, "Prospecting for Hash Functions").
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))

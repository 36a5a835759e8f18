"""From logits to one token, for each row by itself.

The noise of a sample is a function of (seed, fork path, sample index, position, token id) and of
nothing else, computed in integers: what is drawn does not depend on who else is in the batch, nor
on the device. A token is drawn by the Gumbel-max trick: argmax of log-probability + Gumbel noise.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_UP_TO = 1e-4
"""Temperatures up to this one take the likeliest token."""

HEAD = 1024
"""How many of the likeliest tokens are looked at first."""

@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request draws its tokens. `path` and `sample` tell branches and samples with one seed apart."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    path: tuple[int, ...] = ()
    sample: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_UP_TO


def sample(logits: Tensor, params: SamplingParams, position: int, allowed: Tensor | None = None) -> int:
    """Draw the token that comes at `position`.

    Args:
        logits: [V] of the token before it.
        allowed: bool [V]; the others cannot be drawn. At least one must be allowed.
    """
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if params.greedy:
        return int(logits.argmax())
    values, tokens = logits.topk(min(HEAD, len(logits)))                    # [N], likeliest first
    tokens, values = tokens[values > -torch.inf], values[values > -torch.inf]
    scaled = values.double() / params.temperature                           # float64: small ones do not overflow
    kept = _kept(scaled, logits, params)
    if kept is None:
        values, tokens = logits.sort(descending=True, stable=True)
        scaled = values.double() / params.temperature
        kept = _kept(scaled, None, params) or 0
    if kept < len(tokens):
        tokens, scaled = tokens[:kept], scaled[:kept]
        return int(tokens[(scaled + gumbel(tokens, params, position)).argmax()])
    return _argmax_over_all(logits, tokens, scaled, params, position)


def _kept(scaled: Tensor, logits: Tensor | None, params: SamplingParams) -> int | None:
    """How many of the likeliest tokens `top_k`, then `top_p` keep: the fewest whose probabilities reach it.

    Args:
        scaled: [N], descending, float64.
        logits: [V] of all tokens, of which `scaled` are the head; None if they are all.

    Returns:
        None if the head does not tell.
    """
    count = len(scaled) if params.top_k is None else min(params.top_k, len(scaled))
    if params.top_p >= 1.0:
        return count if logits is None or params.top_k is None or params.top_k <= len(scaled) else None
    whole = scaled[:count] if params.top_k is not None or logits is None else logits.double() / params.temperature
    if params.top_k is not None and logits is not None and params.top_k > len(scaled):
        return None
    before = (scaled[:count] - whole.logsumexp(-1)).exp().cumsum(-1).roll(1)
    before[0] = 0.0
    kept = int((before < params.top_p).sum())
    return None if logits is not None and kept == len(scaled) < len(logits) else kept


def _argmax_over_all(
    logits: Tensor, tokens: Tensor, scaled: Tensor, params: SamplingParams, position: int
) -> int:
    """The token with the greatest sum of score and noise, of all of them.

    Beyond the head a score is at most the head's last, so only noise that makes up for that can win; noise rises
    with the bits that it is made of, so they are compared first.

    Args:
        logits: [V].
        tokens, scaled: the head of it, likeliest first.
    """
    if len(tokens) < HEAD:  # all that are possible
        return int(tokens[(scaled + gumbel(tokens, params, position)).argmax()])
    bits = noise_bits(torch.arange(len(logits), device=logits.device), params, position)
    sums = scaled + _gumbel(bits[tokens])
    best = int(sums.argmax())
    least = math.exp(-math.exp(min(700.0, float(scaled[-1] - sums[best])))) * 2.0**32 - 1
    rivals = (bits >= least).nonzero().squeeze(-1)
    rival_sums = logits[rivals].double() / params.temperature + _gumbel(bits[rivals])
    if len(rivals) and float(rival_sums.max()) > float(sums[best]):
        return int(rivals[rival_sums.argmax()])
    return int(tokens[best])


def gumbel(tokens: Tensor, params: SamplingParams, position: int) -> Tensor:
    """Standard Gumbel noise for each token id, [C] int64 -> [C] float64: -log(-log(u)), u uniform in (0, 1)."""
    return _gumbel(noise_bits(tokens, params, position))


def _gumbel(bits: Tensor) -> Tensor:
    return -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-32))


def noise_bits(tokens: Tensor, params: SamplingParams, position: int) -> Tensor:
    """32 random bits for each token id, [C] int64."""
    first, second = noise_key(params, position)
    words = (tokens.to(torch.int32) * _GOLDEN).bitwise_xor_(first)
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

"""From logits to one token, for each row by itself.

The noise of a sample is a function of (seed, fork path, sample index, position, token id) and of
nothing else, computed in integers: what is drawn does not depend on who else is in the batch, nor
on the device. A token is drawn by the Gumbel-max trick: argmax of log-probability + Gumbel noise.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_UP_TO = 1e-4
"""Temperatures up to this one take the likeliest token."""

NEGLIGIBLE = 30.0
"""Tokens this many nats below the likeliest are never drawn: e**-30 is under 1e-13."""


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
    least = float(logits.max()) - NEGLIGIBLE * params.temperature
    tokens = (logits > least).nonzero().squeeze(-1)                         # [C]
    scaled = logits[tokens].double() / params.temperature                   # float64: small ones do not overflow
    tokens, scaled = _truncate(tokens, scaled, params)
    return int(tokens[(scaled + gumbel(tokens, params, position)).argmax()])


def _truncate(tokens: Tensor, scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Keep the `top_k` likeliest, then the fewest of those whose probabilities reach `top_p`. All [C]."""
    if (params.top_k is None or params.top_k >= len(tokens)) and params.top_p >= 1.0:
        return tokens, scaled
    scaled, order = torch.sort(scaled, descending=True, stable=True)
    tokens = tokens[order]
    if params.top_k is not None:
        tokens, scaled = tokens[: params.top_k], scaled[: params.top_k]
    if params.top_p < 1.0:
        probs = scaled.softmax(-1)
        kept = int((probs.cumsum(-1) - probs < params.top_p).sum())
        tokens, scaled = tokens[:kept], scaled[:kept]
    return tokens, scaled


def gumbel(tokens: Tensor, params: SamplingParams, position: int) -> Tensor:
    """Standard Gumbel noise for each token id, [C] int64 -> [C] float64: -log(-log(u)), u uniform in (0, 1)."""
    first, second = noise_key(params, position)
    bits = _mix(_mix(tokens * 0x9E3779B1 & _32 ^ first) ^ second)
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


def noise_key(params: SamplingParams, position: int) -> tuple[int, int]:
    """Two 32-bit words that name one draw."""
    name = repr((params.seed, params.path, params.sample, position)).encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


_32 = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64, in which every input bit changes half of the output bits.

    The constants of `lowbias32` by Chris Wellons, found by search (nullprogram.com, "Prospecting for Hash Functions").
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D & _32
    x = (x ^ (x >> 15)) * 0x846CA68B & _32
    return x ^ (x >> 16)

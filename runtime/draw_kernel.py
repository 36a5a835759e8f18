"""Drawing tokens as compiled code: what `sampling.sample` does, for many rows at once.

A row is gone through a few times where it lies, mostly in blocks in which nothing can win; nothing is sorted but what
is kept of it. Threads share the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import float32, float64, int32, int64, types, uint32

from .attention import ragged
from .attention.compiled import kept
from .attention.ragged import add_to_counter, exp_of_negative, inline

BLOCK = 128
"""Tokens that are looked at together."""

LN_2 = math.log(2.0)
NARROWING = 32.0
"""A nucleus is looked for among tokens above some probability; if it is not there whole, above so many times less."""

WIDENINGS, SEARCHES = 8, 40
"""How often a bound is moved at most: 8 times further away each time, then halfway."""

LOWEST, ZERO, ONE = np.float32(-3.0e38), np.float32(0.0), np.float32(1.0)

_GOLDEN, _MIX_1, _MIX_2 = uint32(0x9E3779B1), uint32(0x7FEB352D), uint32(0x846CA68B)


@inline
def _mix(x: Any) -> Any:
    """As in `sampling`, on unsigned words."""
    x = uint32((x ^ (x >> uint32(16))) * _MIX_1)
    x = uint32((x ^ (x >> uint32(15))) * _MIX_2)
    return uint32(x ^ (x >> uint32(16)))


@inline
def _noise_bits(token: Any, first: Any, second: Any) -> Any:
    return _mix(_mix(uint32(uint32(token) * _GOLDEN) ^ first) ^ second)


@inline
def _gumbel(bits: Any) -> Any:
    return -math.log(-math.log((float64(bits) + 0.5) * 2.0**-32))


@inline
def _gumbel_at_most(bits: Any) -> Any:
    """A bound of the noise without a logarithm: -log(-log u) <= -log(1 - u), and 1 - u has so many zeros in front."""
    rest = uint32(~bits)
    return LN_2 * (1 + (32 if rest == 0 else _leading_zeros(rest)))


@inline
def _leading_zeros(word: Any) -> Any:
    count = 0
    for shift in (16, 8, 4, 2, 1):
        if word >> uint32(32 - shift) == 0:
            count += shift
            word = uint32(word << uint32(shift))
    return count


@inline
def _draw_from_all(x: Any, temperature: Any, first: Any, second: Any, bits: Any) -> Any:
    """The token with the greatest sum of score and noise."""
    size = len(x)
    best, found = -np.inf, -1
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        most, highest = uint32(0), -np.float32(np.inf)
        for i in range(count):
            bits[i] = _noise_bits(start + i, first, second)
        for i in range(count):
            most = max(most, bits[i])
        for i in range(count):
            highest = max(highest, x[start + i])
        if highest / temperature + _gumbel_at_most(most) <= best:
            continue
        for i in range(count):
            score = float64(x[start + i]) / temperature
            if score + _gumbel_at_most(bits[i]) > best:
                total = score + _gumbel(bits[i])
                if total > best:
                    best, found = total, start + i
    return found


@inline
def _count_from(x: Any, least: Any) -> Any:
    count = 0
    for i in range(len(x)):
        count += x[i] >= least
    return count


@inline
def _gather(x: Any, least: Any, tokens: Any) -> Any:
    """The tokens with numbers of `least` and more, ascending; how many."""
    count = 0
    for i in range(len(x)):
        if x[i] >= least:
            tokens[count] = i
            count += 1
    return count


@inline
def _likeliest_k(x: Any, highest: Any, k: Any, tokens: Any) -> Any:
    """At least the k likeliest tokens, and not many more unless scores are equal."""
    low, high = float64(highest) - 1.0, float64(highest)
    for _ in range(WIDENINGS):
        if _count_from(x, float32(low)) >= k:
            break
        low, high = highest - 8.0 * (highest - low), low
    if _count_from(x, float32(low)) < k:
        return _gather(x, LOWEST, tokens)
    for _ in range(SEARCHES):
        if _count_from(x, float32(low)) <= 2 * k + 64:
            break
        middle = 0.5 * (low + high)
        if _count_from(x, float32(middle)) >= k:
            low = middle
        else:
            high = middle
    return _gather(x, float32(low), tokens)


@inline
def _nucleus(weights: Any, whole: Any, top_p: Any, tokens: Any) -> Any:
    """At least the likeliest tokens that have `top_p` of the weight together.

    All tokens with less than (1 - top_p) / V of it have no more than 1 - top_p together, so they are never needed.
    """
    never = whole * (1.0 - top_p) / len(weights)
    least, count = whole * (1.0 - top_p) / 256, 0
    for _ in range(SEARCHES):
        count = _gather(weights, float32(least), tokens)
        inside = 0.0
        for i in range(count):
            inside += weights[tokens[i]]
        if inside > (top_p + 1e-6) * whole or least < never:
            break
        least = max(least / NARROWING, never * 0.5)
    return count


@inline
def _keep(x: Any, weights: Any, tokens: Any, count: Any, limit: Any) -> Any:
    """Bring those of the `count` tokens to the front before which, likeliest first, is less weight than `limit`.

    Of equal ones the first in the vocabulary go first. Nothing is sorted: the place is found by halves.

    Returns:
        how many they are.
    """
    start, stop, before = 0, count, 0.0
    while start < stop:
        pivot = x[tokens[(start + stop) // 2]]
        more, less, i = start, stop, start  # [start, more) is above the pivot, [more, i) equal, [less, stop) below
        above = 0.0
        while i < less:
            token = tokens[i]
            if x[token] > pivot:
                above += weights[token]
                tokens[i], tokens[more] = tokens[more], token
                more += 1
                i += 1
            elif x[token] < pivot:
                less -= 1
                tokens[i], tokens[less] = tokens[less], token
            else:
                i += 1
        if before + above >= limit:
            stop = more
            continue
        before += above
        each = float64(weights[tokens[more]])
        if before + each * (less - more - 1) >= limit:
            equal = np.sort(tokens[more:less])
            for j in range(less - more):
                tokens[more + j] = equal[j]
            return more + min(less - more, math.ceil((limit - before) / each))
        before += each * (less - more)
        start = less
    return start


@inline
def _draw_from_likeliest(
    x: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, first: Any, second: Any, tokens: Any, weights: Any
) -> Any:
    """Of the tokens that `top_k`, then `top_p`, and `min_p` leave, that with the greatest sum of score and noise."""
    highest = -np.float32(np.inf)
    for i in range(len(x)):
        highest = max(highest, x[i])
    if top_k < len(x):
        count = _likeliest_k(x, highest, top_k, tokens)
        for i in range(count):
            weights[tokens[i]] = ONE
        count = _keep(x, weights, tokens, count, float64(top_k))
    else:
        for i in range(len(x)):
            weights[i] = exp_of_negative(float32((x[i] - highest) / temperature))
        whole = float64(0.0)
        for start in range(0, len(x), BLOCK):
            part = ZERO
            for i in range(start, min(len(x), start + BLOCK)):
                part += weights[i]
            whole += part
        if top_p < 1.0:
            count = _keep(x, weights, tokens, _nucleus(weights, whole, top_p, tokens), top_p * whole)
        else:
            count = _gather(weights, float32(min_p), tokens)
    if top_k < len(x) and top_p < 1.0:
        whole = float64(0.0)
        for i in range(count):
            weights[tokens[i]] = exp_of_negative(float32((x[tokens[i]] - highest) / temperature))
            whole += weights[tokens[i]]
        count = _keep(x, weights, tokens, count, top_p * whole)
    least = -np.inf if min_p <= 0.0 else float64(highest) / temperature + math.log(min_p)
    best, found = -np.inf, -1
    for i in range(count):
        token = tokens[i]
        score = float64(x[token]) / temperature
        if score < least:
            continue
        bits = _noise_bits(token, first, second)
        if score + _gumbel_at_most(bits) > best:
            total = score + _gumbel(bits)
            if total > best:
                best, found = total, token
    return found


def kernel(folder: Path) -> Callable[..., None]:
    """The function. Threads that call it with the same `counter` share the rows. Its arguments:

        logits: float32 [L, V].
        rows: int32 [J], of the rows to draw from; no row is empty of numbers above -inf, none has a nan.
        words: uint32 [J, 2], what names the draw (`sampling.noise_key`).
        temperature, top_p, min_p: float64 [J]; top_k: int64 [J], V for none.
        counter: int32 [1], zero.
        out: int32 [J], the tokens.

    Args:
        folder: where compiled code is kept.
    """

    def draw(
        logits: Any, rows: Any, words: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, counter: Any, out: Any
    ) -> None:
        bits = np.empty(BLOCK, np.uint32)
        tokens, weights = np.empty(logits.shape[1], np.int32), np.empty(logits.shape[1], np.float32)
        while True:
            j = add_to_counter(counter, 0, 1)
            if j >= len(rows):
                break
            x, first, second = logits[rows[j]], words[j, 0], words[j, 1]
            if top_k[j] >= len(x) and top_p[j] >= 1.0 and min_p[j] <= 0.0:
                out[j] = _draw_from_all(x, temperature[j], first, second, bits)
                continue
            out[j] = _draw_from_likeliest(
                x, temperature[j], top_k[j], top_p[j], min_p[j], first, second, tokens, weights
            )

    signature = types.void(
        float32[:, ::1], int32[::1], uint32[:, ::1], float64[::1], int64[::1], float64[::1], float64[::1], int32[::1],
        int32[::1],
    )  # fmt: skip
    flags = {"reassoc", "contract", "nsz", "nnan"}
    return kept(numba.njit(nogil=True, fastmath=flags, error_model="numpy")(draw), signature, folder, ragged)

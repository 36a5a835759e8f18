"""Attention of a step as compiled code: rows that share slots, rows that have their own, windows and soft caps.

The work is a list of units, each the rows of one group, or one row, with one key head. A unit walks its slots where
they lie in the pool, in blocks, with a running softmax in float32, and merges what it finds into the output that is
there already. Where a unit has several rows they are the lanes: scores and outputs are kept transposed and every inner
loop runs over rows, so that a number of a key is read once for all of them. A single row's inner loops run over the
numbers of a head, its query heads sharing each key.

numba makes one function for each head size, number of query heads a key head, and number format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import float32, int32, int64, types, uint16, uint32
from numba.core import cgutils

from . import tiles
from .compiled import kept
from .tiles import M, products
from .units import MOST_LANES

LINE = 16
"""float32 numbers in a cache line."""
LANES = 16
"""Rows times heads are padded to a multiple of this: float32 numbers in a 512-bit register."""
SPINS = 5_000
"""About 50 microseconds: longer than what one thread has to do when another has done its part."""
BLOCK = 64
"""Keys between two updates of the running maximum."""
MASKED = np.float32(-1e30)
"""Score of a key that a row does not see: finite, so that no difference of scores is undefined."""

LOG2_E = np.float32(math.log2(math.e))
# The parts of Cephes' expf: ln 2 in two pieces, and the polynomial of exp(r) - 1 - r on [-ln 2 / 2, ln 2 / 2].
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
C0, C1, C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C3, C4, C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
ZERO, ONE, TWO, HALF, LEAST = np.float32(0.0), np.float32(1.0), np.float32(2.0), np.float32(0.5), np.float32(-87.0)

# numba comes without type information and finds the types of what it compiles itself: to a type checker it is all Any.
_Decorator = Callable[[Callable[..., Any]], Any]
_intrinsic: _Decorator = numba.extending.intrinsic

FAST = {"reassoc", "contract", "nsz", "arcp"}  # not nnan, not ninf: an empty partial result has -inf


@_intrinsic
def _as_float(context: Any, bits: Any) -> Any:
    """The float32 of these bits."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return float32(uint32), generate


@_intrinsic
def wide(context: Any, number: Any) -> Any:
    """float32 of float32, or of bfloat16 as uint16."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if number == float32:
            return args[0]
        bits = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, bits.type(16)), ir.FloatType())

    return float32(number), generate


@_intrinsic
def narrow(context: Any, number: Any, like: Any) -> Any:
    """float32 in the format of `like`; bfloat16 is rounded to the nearest, ties to even."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if like == float32:
            return args[0]
        bits = builder.bitcast(args[0], ir.IntType(32))
        odd = builder.and_(builder.lshr(bits, bits.type(16)), bits.type(1))
        return builder.trunc(
            builder.lshr(builder.add(bits, builder.add(odd, bits.type(0x7FFF))), bits.type(16)), ir.IntType(16)
        )

    return like(float32, like), generate


@_intrinsic
def add_to_counter(context: Any, counters: Any, index: Any, value: Any) -> Any:
    """Add to a counter that other threads add to, and give what it was."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        array = context.make_array(counters)(context, builder, args[0])
        return builder.atomic_rmw("add", builder.gep(array.data, [args[1]]), args[2], "acq_rel")

    return int32(counters, int64, int32), generate


@_intrinsic
def _sleep(context: Any, microseconds: Any) -> Any:
    """Give the processor up for a while."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "usleep"), args)
        return _context.get_dummy_value()

    return types.void(uint32), generate


@_intrinsic
def _prefetch(context: Any, array: Any, slot: Any, head: Any, number: Any) -> Any:
    """Ask for the cache line of a number of a key or value that will be read soon."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        there = context.make_array(array)(context, builder, args[0])
        strides = [builder.extract_value(there.strides, i) for i in range(3)]
        offset = builder.mul(args[1], strides[0])
        for index, stride in zip(args[2:], strides[1:], strict=True):
            offset = builder.add(offset, builder.mul(index, stride))
        byte = builder.inttoptr(
            builder.add(builder.ptrtoint(there.data, ir.IntType(64)), offset), ir.IntType(8).as_pointer()
        )
        kind = ir.FunctionType(ir.VoidType(), [byte.type, *[ir.IntType(32)] * 3])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [byte.type], kind)
        builder.call(hint, [byte, *(ir.Constant(ir.IntType(32), value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, int64, int64, int64), generate


inline: _Decorator = numba.njit(fastmath=FAST, error_model="numpy", inline="always")


@inline
def wait_for(counters: Any, index: Any, value: Any) -> None:
    """Wait until other threads have brought a counter to `value`.

    They are at work and nearly done, unless they have lost their processor to somebody else: then this thread's own is
    of more use to them than to it.
    """
    spins = 0
    while add_to_counter(counters, index, 0) < value:
        spins += 1
        if spins > SPINS:
            _sleep(uint32(1))


@inline
def exp_of_negative(x: Any) -> Any:
    """exp of x <= 0, to about 1e-7 of its value; 0 below -87, nan of nan."""
    n = math.floor((x if x > LEAST else LEAST) * LOG2_E + HALF)
    y = LEAST if x <= LEAST else x
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    p = ((((C0 * r + C1) * r + C2) * r + C3) * r + C4) * r + C5
    power = _as_float(uint32((int32(n) + int32(127)) << int32(23)))
    return np.float32(0.0) if x <= LEAST else (p * r * r + r + ONE) * power


@inline
def _capped(x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap)."""
    e = exp_of_negative(-TWO * abs(x) / cap)
    return math.copysign(cap * (ONE - e) / (ONE + e), x)


@inline
def _merge(lse: Any, row: Any, head: Any, highest: Any, total: Any) -> Any:
    """Bring the log-sum-exp up to date; the factors of the output before, and of the weighted sum found."""
    mine, before = highest + np.float32(math.log(total)), lse[row, head]
    if before == -np.inf:
        lse[row, head] = mine
        return np.float32(0.0), ONE / total
    top = mine if mine > before else before
    joint = top + np.float32(math.log(math.exp(mine - top) + math.exp(before - top)))
    lse[row, head] = joint
    return np.float32(math.exp(before - joint)), np.float32(math.exp(mine - joint)) / total


@inline
def attend_row(
    row: Any, start: Any, stop: Any, kh: Any, D: Any, G: Any, B: Any, slots: Any, q: Any, k: Any, v: Any, out: Any,
    lse: Any, scale: Any, cap: Any, queries: Any, output: Any, scores: Any, highest: Any, total: Any,
) -> None:  # fmt: skip
    """A row, `queries` and `output` [G, D], `scores` [G, B]."""
    for g in range(G):
        for d in range(D):
            queries[g, d] = wide(q[row, kh * G + g, d]) * scale
            output[g, d] = 0.0
        highest[g], total[g] = MASKED, 0.0
    for block in range(start, stop, B):
        n = min(B, stop - block)
        for j in range(n):
            key = k[slots[block + j], kh]
            for g in range(G):
                x = np.float32(0.0)
                for d in range(D):
                    x += queries[g, d] * wide(key[d])
                scores[g, j] = x
        for g in range(G):
            if cap > 0:
                for j in range(n):
                    scores[g, j] = _capped(scores[g, j], cap)
            for j in range(n, B):
                scores[g, j] = MASKED
            top = highest[g]
            for j in range(B):
                top = max(top, scores[g, j])
            shrink, x = exp_of_negative(highest[g] - top), np.float32(0.0)
            for j in range(B):
                scores[g, j] = exp_of_negative(scores[g, j] - top)
            for j in range(B):
                x += scores[g, j]
            highest[g], total[g] = top, total[g] * shrink + x
            for d in range(D):
                output[g, d] *= shrink
        for j in range(n):
            value = v[slots[block + j], kh]
            for g in range(G):
                p = scores[g, j]
                for d in range(D):
                    output[g, d] += p * wide(value[d])
    for g in range(G):
        before, found = _merge(lse, row, kh * G + g, highest[g], total[g])
        for d in range(D):
            old = out[row, kh * G + g, d]
            out[row, kh * G + g, d] = narrow(wide(old) * before + output[g, d] * found, old)


@inline
def attend_rows(
    r0: Any, r1: Any, start: Any, stop: Any, kh: Any, causal: Any, window: Any, D: Any, G: Any,
    slots: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: Any, cap: Any, queries: Any, output: Any,
    scores: Any, keys: Any, values: Any, highest: Any, total: Any, factor: Any, low: Any, high: Any,
    multiply_all: Any, add_all: Any,
) -> None:  # fmt: skip
    """Rows [r0, r1): lane i is row i // G and query head i % G of the key head; the last row fills up the lanes."""
    lanes = (r1 - r0) * G
    padded = (lanes + LANES - 1) // LANES * LANES
    for i in range(padded):
        row, h = min(r0 + i // G, r1 - 1), kh * G + i % G
        high[i] = stop - (r1 - 1 - row) if causal else stop
        low[i] = max(start, high[i] - window) if causal and window > 0 else start
        for d in range(D):
            queries[d, i] = wide(q[row, h, d]) * scale
            output[d, i] = 0.0
        highest[i], total[i] = MASKED, 0.0
    for block in range(low[0], stop, BLOCK):
        n = min(BLOCK, stop - block)
        whole = (n + M - 1) // M * M
        for j in range(n):
            ahead = slots[min(block + j + BLOCK, stop - 1)]
            for d in range(0, D, LINE):
                _prefetch(k, ahead, kh, d)
                _prefetch(v, ahead, kh, d)
            key, value = k[slots[block + j], kh], v[slots[block + j], kh]
            for d in range(D):
                keys[j, d], values[j, d] = wide(key[d]), wide(value[d])
        for j in range(n, whole):
            for d in range(D):
                keys[j, d], values[j, d] = ZERO, ZERO
        multiply_all(scores, keys, queries, whole, padded)
        if cap > 0:
            for j in range(n):
                for i in range(padded):
                    scores[j, i] = _capped(scores[j, i], cap)
        if causal and (block + n > high[0] or block < low[padded - 1]):
            for j in range(n):
                for i in range(padded):
                    if block + j >= high[i] or block + j < low[i]:
                        scores[j, i] = MASKED
        for j in range(n, whole):
            for i in range(padded):
                scores[j, i] = MASKED
        for i in range(padded):
            factor[i] = highest[i]
        for j in range(n):
            for i in range(padded):
                highest[i] = max(highest[i], scores[j, i])
        for i in range(padded):
            factor[i] = exp_of_negative(factor[i] - highest[i])
            total[i] *= factor[i]
        for j in range(whole):
            for i in range(padded):
                scores[j, i] = exp_of_negative(scores[j, i] - highest[i])
                total[i] += scores[j, i]
        for d in range(D):
            for i in range(padded):
                output[d, i] *= factor[i]
        add_all(output, values, scores, whole, padded)
    for i in range(lanes):
        row, h = r0 + i // G, kh * G + i % G
        before, found = _merge(lse, row, h, highest[i], total[i])
        for d in range(D):
            old = out[row, h, d]
            out[row, h, d] = narrow(wide(old) * before + output[d, i] * found, old)


def kernel(head_dim: int, repeat: int, half: bool, folder: Path) -> Callable[..., None]:
    """The function for heads of `head_dim` numbers, `repeat` of them a key head, and bfloat16 if `half`.

    Threads that call it with the same `counters` share the work; each returns when all of it is done, and no call waits
    for a thread that has not begun. Its arguments:

        units: int32 [U, 6]: first row, end row, first and end of its slots, key head, and whether it is causal: the
            last row sees all the slots, the one before it one fewer. Units of one stage are of different rows or heads.
        stages: int32 [S + 1]: stage s is units [stages[s], stages[s + 1]).
        counters: int32 [2 * S], zeros.
        slots: int32.
        window: keys a row of a causal unit sees at most, itself included; 0 for no bound.
        q, out: [T, H, D], float32 or bfloat16 as uint16; k, v: [num_slots, K, D].
        lse: float32 [T, H], of what is in `out`: -inf for nothing, with zeros there. Both are brought up to date.
        scale, cap: of the scores; cap 0 for none.

    Args:
        folder: where compiled code is kept.
    """
    D, G, B = head_dim, repeat, BLOCK
    L = max(MOST_LANES, -(-repeat // LANES) * LANES)

    multiply_all, add_all = products(D, B, L)

    def attend(
        units: Any, stages: Any, counters: Any, slots: Any, window: Any, q: Any, k: Any, v: Any, out: Any,
        lse: Any, scale: Any, cap: Any,
    ) -> None:  # fmt: skip
        queries, output = np.empty((D, L), np.float32), np.empty((D, L), np.float32)
        row_queries, row_output = np.empty((G, D), np.float32), np.empty((G, D), np.float32)
        scores, row_scores = np.empty((B, L), np.float32), np.empty((G, B), np.float32)
        keys, values = np.empty((B, D), np.float32), np.empty((B, D), np.float32)
        highest, total, factor = np.empty(L, np.float32), np.empty(L, np.float32), np.empty(L, np.float32)
        low, high = np.empty(L, np.int32), np.empty(L, np.int32)
        for stage in range(len(stages) - 1):
            while True:
                unit = stages[stage] + add_to_counter(counters, 2 * stage, 1)
                if unit >= stages[stage + 1]:
                    break
                r0, r1, start, stop, kh, causal = units[unit]
                if r1 - r0 == 1:
                    if causal and window > 0:
                        start = max(start, stop - window)
                    attend_row(
                        r0, start, stop, kh, D, G, B, slots, q, k, v, out, lse, scale, cap, row_queries, row_output,
                        row_scores, highest, total,
                    )  # fmt: skip
                else:
                    attend_rows(
                        r0, r1, start, stop, kh, causal, window, D, G, slots, q, k, v, out, lse, scale, cap,
                        queries, output, scores, keys, values, highest, total, factor, low, high, multiply_all, add_all,
                    )  # fmt: skip
                add_to_counter(counters, 2 * stage + 1, 1)
            wait_for(counters, 2 * stage + 1, stages[stage + 1] - stages[stage])

    rows = types.Array(uint16 if half else float32, 3, "C")
    signature = types.void(
        int32[:, ::1], int32[::1], int32[::1], int32[::1], int64, rows, rows, rows, rows, float32[:, ::1], float32,
        float32,
    )  # fmt: skip
    return kept(numba.njit(nogil=True, fastmath=FAST, error_model="numpy")(attend), signature, folder, tiles)

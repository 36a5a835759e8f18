"""Kernels for GPUs, in Triton's language: attention by items, keys and values to their slots, masks, draws.

Each docstring gives the shapes of what the kernel reads and writes, all of it contiguous unless it says otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import next_power_of_2

__all__ = ["attend_kernel", "draw_kernel", "mask_kernel", "merge_kernel", "next_power_of_2", "place_kernel"]


@triton.jit
def attend_kernel(
    q, k, v, part, part_lse, items, slots, scale, softcap, window,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One item and one key head: flash attention over the item's keys, a lane for each row and query head.

    q [T, HEADS, SIZE]; k, v [slots, HEADS / REPEAT, SIZE]; part [places, HEADS, SIZE], part_lse [places, HEADS].
    """
    item, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, stop = tl.load(items + 6 * item), tl.load(items + 6 * item + 1)
    begin, key = tl.load(items + 6 * item + 2), tl.load(items + 6 * item + 3)
    end, newest = tl.load(items + 6 * item + 4), tl.load(items + 6 * item + 5)
    lane = tl.arange(0, LANES)
    row, head = first + lane // REPEAT, kv_head * REPEAT + lane % REPEAT
    fine = (row < stop) & (lane < ROWS * REPEAT)
    d = tl.arange(0, WIDTH)
    inside = d < SIZE
    there = fine[:, None] & inside[None, :]
    queries = tl.load(q + (row.to(tl.int64) * HEADS + head)[:, None] * SIZE + d[None, :], mask=there, other=0.0)
    last = newest - (stop - 1 - row)  # the last key that each lane sees
    highest = tl.full([LANES], -1.0e30, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    output = tl.zeros([LANES, WIDTH], tl.float32)
    for start in range(key, end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        slot = tl.load(slots + begin + j, mask=j < end, other=0).to(tl.int64)
        at = (slot * (HEADS // REPEAT) + kv_head)[:, None] * SIZE + d[None, :]
        real = (j < end)[:, None] & inside[None, :]
        keys = tl.load(k + at, mask=real, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale  # float32 is not made less of
        if softcap > 0:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)  # softcap * tanh(scores / softcap)
        seen = (j < end)[None, :] & fine[:, None]
        if newest >= 0:
            seen = seen & (j[None, :] <= last[:, None])
            if window > 0:
                seen = seen & (j[None, :] > last[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        fade, weights = tl.exp(highest - higher), tl.exp(scores - higher[:, None])
        values = tl.load(v + at, mask=real, other=0.0)
        output = output * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        highest = higher
    found = total > 0
    sums = tl.where(found, total, 1.0)
    place = (item * ROWS + lane // REPEAT) * HEADS + head
    tl.store(part + place[:, None] * SIZE + d[None, :], output / sums[:, None], mask=there)
    tl.store(part_lse + place, tl.where(found, highest + tl.log(sums), -float("inf")), mask=fine)


@triton.jit
def merge_kernel(
    part, part_lse, starts, parts, out, lse, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """One head of one row: its parts, merged as `attention.merge` does; zeros and -inf where there is none."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    highest, total, output = -1.0e30, 0.0, tl.zeros([WIDTH], tl.float32)
    for i in range(tl.load(starts + row), tl.load(starts + row + 1)):
        place = tl.load(parts + i).to(tl.int64) * HEADS + head
        one = tl.load(part_lse + place)
        higher = tl.maximum(highest, one)
        fade, weight = tl.exp(highest - higher), tl.exp(one - higher)
        output = output * fade + weight * tl.load(part + place * SIZE + d, mask=d < SIZE, other=0.0)
        total = total * fade + weight
        highest = higher
    sums = tl.where(total > 0, total, 1.0)
    target = out + (row * HEADS + head) * SIZE + d
    tl.store(target, (output / sums).to(out.dtype.element_ty), mask=d < SIZE)
    tl.store(lse + row * HEADS + head, tl.where(total > 0, highest + tl.log(sums), -float("inf")))


@triton.jit
def place_kernel(
    qkv, cos, sin, slots, queries, keys, values, stride,
    Q: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One head of one row: turn it if it is a query or a key, and put it where it belongs.

    qkv [T, (Q + 2 K) 2 HALF], rows `stride` apart; cos, sin [T, HALF]; slots int64 [T]; queries [T, Q, 2 HALF];
    keys, values [slots, K, 2 HALF].
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    there = i < HALF
    source = qkv + row * stride + head * 2 * HALF
    a = tl.load(source + i, mask=there, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + i, mask=there, other=0.0).to(tl.float32)
    if TURNS and head < Q + K:
        c = tl.load(cos + row * HALF + i, mask=there, other=0.0).to(tl.float32)
        s = tl.load(sin + row * HALF + i, mask=there, other=0.0).to(tl.float32)
        turned = a * c - b * s
        b = b * c + a * s
        a = turned
    slot = tl.load(slots + row)
    target = queries + (row * Q + head) * 2 * HALF
    if head >= Q + K:
        target = values + (slot * K + head - Q - K) * 2 * HALF
    elif head >= Q:
        target = keys + (slot * K + head - Q) * 2 * HALF
    tl.store(target + i, a.to(target.dtype.element_ty), mask=there)
    tl.store(target + HALF + i, b.to(target.dtype.element_ty), mask=there)


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

"""A step of a Llama through all its layers as one compiled function, which several threads run together.

For steps of few rows, where what lies between the products costs as much as they do: nothing here takes the
interpreter's lock, wakes a thread, or makes a tensor. The work of each phase is cut into items that threads claim from
a counter, and a phase begins when all items of the one before are done; so a thread that begins late, or not at all,
holds nobody up. Matrices are kept in panels, [panels, inputs, WIDTH]: a tile of results reads one run of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import float32, int8, int32, int64, types

from ..attention import ragged, tiles
from ..attention.compiled import kept
from ..attention.ragged import (
    BLOCK,
    FAST,
    LANES,
    add_to_counter,
    attend_row,
    attend_rows,
    exp_of_negative,
    inline,
    wait_for,
)
from ..attention.tiles import products, tile, widest
from ..attention.units import MOST_LANES
from .fused import MOST_ROWS

WIDTH = widest() * tiles.LANES
"""Outputs of a panel."""

ROWS = 8
"""Rows of a tile where there are as many; buffers are padded to a multiple of it."""

ITEM_ROWS = 8
"""Rows of an item in the phases that go row by row."""

LINE = 16
"""int32 numbers from one counter to the next, so that no two share a cache line."""

PHASES = 7
"""Of a layer, attention's stages not counted."""

ZERO, ONE = np.float32(0.0), np.float32(1.0)


def num_counters(layers: int, stages: int) -> int:
    """The length of `counters` for a step."""
    return (layers * (PHASES + stages) + 2) * 2 * LINE


@inline
def _claim(counters: Any, phase: Any) -> Any:
    return add_to_counter(counters, 2 * phase * LINE, 1)


@inline
def _done(counters: Any, phase: Any) -> None:
    add_to_counter(counters, (2 * phase + 1) * LINE, 1)


@inline
def _wait(counters: Any, phase: Any, items: Any) -> None:
    wait_for(counters, (2 * phase + 1) * LINE, items)


@inline
def _norm(x: Any, row: Any, more: Any, adds: Any, weight: Any, eps: Any, out: Any, to: Any) -> None:
    """x[row] += more[row], if `adds`; out[to] = x[row] / sqrt(mean(x[row] ** 2) + eps) * weight."""
    size = x.shape[1]
    if adds:
        for i in range(size):
            x[row, i] += more[row, i]
    total = ZERO
    for i in range(size):
        total += x[row, i] * x[row, i]
    factor = ONE / np.float32(math.sqrt(total / np.float32(size) + eps))
    for i in range(size):
        out[to, i] = x[row, i] * factor * weight[i]


@inline
def _place(
    qkv: Any, row: Any, cos: Any, sin: Any, turns: Any, slot: Any, k_pool: Any, v_pool: Any, queries: Any
) -> None:
    """Turn a row's queries and keys by its angles, if `turns`; keys and values go to its slot."""
    heads, kv, size = queries.shape[1], k_pool.shape[1], queries.shape[2]
    half = size // 2
    for head in range(heads + kv):
        source = qkv[row, head * size : (head + 1) * size]
        target = queries[row, head] if head < heads else k_pool[slot, head - heads]
        if turns:
            for i in range(half):
                target[i] = source[i] * cos[row, i] - source[i + half] * sin[row, i]
                target[i + half] = source[i + half] * cos[row, i] + source[i] * sin[row, i]
        else:
            for i in range(size):
                target[i] = source[i]
    for head in range(kv):
        for i in range(size):
            v_pool[slot, head, i] = qkv[row, (heads + kv + head) * size + i]


def kernel(head_dim: int, repeat: int, folder: Path) -> Callable[..., None]:
    """The function for heads of `head_dim` numbers, `repeat` of them a key head, all in float32. Its arguments, for T
    rows, L layers, H query and K key heads, N hidden and I inner numbers; buffers have T padded to `ROWS`, and zeros
    where there is no row:

        counters: int32 [num_counters], zeros. Threads that call with the same ones share the work.
        x: [T, N], what the layers change. normed, more: [T, N]; qkv: [T, (H + 2K) D]; queries: [T, H, D];
            attended: [T, H D]; gated: [T, I]; last: [logit rows, N]: buffers.
        attn_norms, mlp_norms: [L, N]; final_norm: [N].
        qkv_panels, out_panels, gate_panels, up_panels, down_panels: [L, panels, inputs, WIDTH]; head_panels the same
            without L.
        cos, sin: [T, D / 2]; turns: int8 [L], whether a layer has positions.
        write_slots: int64 [T]; k_pools, v_pools: [L, slots, K, D].
        units, stages, slots, lse, window, scale, cap: as of `ragged.kernel`.
        eps: of the norms.
        logit_rows: int64 [R]; logits: [R, V], the result.

    Args:
        folder: where compiled code is kept.
    """
    D, G, most_rows = head_dim, repeat, MOST_ROWS
    L = max(MOST_LANES, -(-repeat // LANES) * LANES)
    multiply_all, add_all = products(D, L)
    tile_1, tile_4, tile_8 = (tile(rows, widest(), WIDTH, (None, 1), from_zero=True) for rows in (1, 4, ROWS))

    @inline
    def multiply(result: Any, left: Any, panel: Any, rows: Any) -> None:
        """result [rows, WIDTH] = left[:rows] @ panel [inputs, WIDTH]."""
        inputs = panel.shape[0]
        if rows == 1:
            tile_1(result, left, panel, 0, 0, inputs)
        else:
            for m in range(0, rows, ROWS):
                if rows - m <= 4:
                    tile_4(result, left, panel, m, 0, inputs)
                else:
                    tile_8(result, left, panel, m, 0, inputs)

    @inline
    def project(
        counters: Any, phase: Any, left: Any, panels: Any, out: Any, rows: Any, result: Any
    ) -> None:
        """out[:rows] = left[:rows] @ panels, all of them, together with the other threads."""
        while True:
            p = _claim(counters, phase)
            if p >= len(panels):
                break
            multiply(result, left, panels[p], rows)
            first = p * WIDTH
            count = min(WIDTH, out.shape[1] - first)
            for row in range(rows):
                for i in range(count):
                    out[row, first + i] = result[row, i]
            _done(counters, phase)
        _wait(counters, phase, len(panels))

    def step(
        counters: Any, x: Any, normed: Any, more: Any, qkv: Any, queries: Any, attended: Any, gated: Any, last: Any,
        attn_norms: Any, mlp_norms: Any, final_norm: Any, qkv_panels: Any, out_panels: Any, gate_panels: Any,
        up_panels: Any, down_panels: Any, head_panels: Any, cos: Any, sin: Any, turns: Any, write_slots: Any,
        k_pools: Any, v_pools: Any, units: Any, stages: Any, slots: Any, lse: Any, window: Any, scale: Any, cap: Any,
        eps: Any, logit_rows: Any, logits: Any,
    ) -> None:  # fmt: skip
        rows, layers, num_stages = len(write_slots), len(attn_norms), len(stages) - 1
        row_items = (rows + ITEM_ROWS - 1) // ITEM_ROWS
        result, second = np.empty((most_rows, WIDTH), np.float32), np.empty((most_rows, WIDTH), np.float32)
        q_lanes, output = np.empty((D, L), np.float32), np.empty((D, L), np.float32)
        row_queries, row_output = np.empty((G, D), np.float32), np.empty((G, D), np.float32)
        scores, row_scores = np.empty((BLOCK, L), np.float32), np.empty((G, BLOCK), np.float32)
        keys, values = np.empty((BLOCK, D), np.float32), np.empty((BLOCK, D), np.float32)
        highest, total, factor = np.empty(L, np.float32), np.empty(L, np.float32), np.empty(L, np.float32)
        low, high = np.empty(L, np.int32), np.empty(L, np.int32)
        by_head = attended.reshape(attended.shape[0], queries.shape[1], D)
        phase = 0
        for layer in range(layers):
            k_pool, v_pool = k_pools[layer], v_pools[layer]
            while True:
                item = _claim(counters, phase)
                if item >= row_items:
                    break
                for row in range(item * ITEM_ROWS, min(rows, (item + 1) * ITEM_ROWS)):
                    _norm(x, row, more, layer > 0, attn_norms[layer], eps, normed, row)
                    for head in range(lse.shape[1]):
                        lse[row, head] = -np.inf
                    for i in range(attended.shape[1]):
                        attended[row, i] = ZERO  # a NaN that the last step left would be merged into what comes
                _done(counters, phase)
            _wait(counters, phase, row_items)
            project(counters, phase + 1, normed, qkv_panels[layer], qkv, rows, result)
            phase += 2
            while True:
                item = _claim(counters, phase)
                if item >= row_items:
                    break
                for row in range(item * ITEM_ROWS, min(rows, (item + 1) * ITEM_ROWS)):
                    _place(qkv, row, cos, sin, turns[layer] != 0, write_slots[row], k_pool, v_pool, queries)
                _done(counters, phase)
            _wait(counters, phase, row_items)
            phase += 1
            for stage in range(num_stages):
                count = stages[stage + 1] - stages[stage]
                while True:
                    item = _claim(counters, phase)
                    if item >= count:
                        break
                    r0, r1, start, stop, kh, causal = units[stages[stage] + item]
                    if r1 - r0 == 1:
                        if causal and window > 0:
                            start = max(start, stop - window)
                        attend_row(
                            r0, start, stop, kh, D, G, BLOCK, slots, queries, k_pool, v_pool, by_head, lse, scale, cap,
                            row_queries, row_output, row_scores, highest, total,
                        )  # fmt: skip
                    else:
                        attend_rows(
                            r0, r1, start, stop, kh, causal, window, D, G, slots, queries, k_pool, v_pool, by_head, lse,
                            scale, cap, q_lanes, output, scores, keys, values, highest, total, factor, low, high,
                            multiply_all, add_all,
                        )  # fmt: skip
                    _done(counters, phase)
                _wait(counters, phase, count)
                phase += 1
            project(counters, phase, attended, out_panels[layer], more, rows, result)
            phase += 1
            while True:
                item = _claim(counters, phase)
                if item >= row_items:
                    break
                for row in range(item * ITEM_ROWS, min(rows, (item + 1) * ITEM_ROWS)):
                    _norm(x, row, more, True, mlp_norms[layer], eps, normed, row)
                _done(counters, phase)
            _wait(counters, phase, row_items)
            phase += 1
            gates = len(gate_panels[layer])
            while True:
                p = _claim(counters, phase)
                if p >= gates:
                    break
                multiply(result, normed, gate_panels[layer, p], rows)
                multiply(second, normed, up_panels[layer, p], rows)
                first = p * WIDTH
                count = min(WIDTH, gated.shape[1] - first)
                for row in range(rows):
                    for i in range(count):
                        g = result[row, i]
                        e = exp_of_negative(-abs(g))
                        gated[row, first + i] = g * ((ONE if g >= ZERO else e) / (ONE + e)) * second[row, i]
                _done(counters, phase)
            _wait(counters, phase, gates)
            project(counters, phase + 1, gated, down_panels[layer], more, rows, result)
            phase += 2
        wanted = len(logit_rows)
        while True:
            item = _claim(counters, phase)
            if item >= wanted:
                break
            _norm(x, logit_rows[item], more, True, final_norm, eps, last, item)
            _done(counters, phase)
        _wait(counters, phase, wanted)
        project(counters, phase + 1, last, head_panels, logits, wanted, result)

    flat, deep = float32[:, ::1], types.Array(float32, 3, "C")
    four = types.Array(float32, 4, "C")
    signature = types.void(
        int32[::1], flat, flat, flat, flat, deep, flat, flat, flat, flat, flat, float32[::1], four, four, four, four,
        four, deep, flat, flat, int8[::1], int64[::1], four, four, int32[:, ::1], int32[::1], int32[::1], flat, int64,
        float32, float32, float32, int64[::1], flat,
    )  # fmt: skip
    return kept(numba.njit(nogil=True, fastmath=FAST, error_model="numpy")(step), signature, folder, ragged, tiles)

"""Products of matrices by tiles: what the compiled kernels are made of.

A tile of the result, some rows of one to three vectors, is kept in registers while its sum is made, so nothing is
written in between. The code is given to the compiler as vectors; it does not find these by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba import int64, types

M = 4
"""Rows of a tile of attention."""

LANES = 16
"""float32 numbers in a vector: a 512-bit register, or several smaller ones."""

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INT = ir.IntType(64)

_Decorator = Callable[[Callable[..., Any]], Any]
_intrinsic: _Decorator = numba.extending.intrinsic
_inline: _Decorator = numba.njit(error_model="numpy", inline="always")


def widest() -> int:
    """Vectors of a tile: as many as there are registers for."""
    return 3 if binding.get_host_cpu_features().get("avx512f", False) else 1


def products(head_dim: int, block: int, lanes: int) -> tuple[Any, Any]:
    """Two functions, of (result, left, right, count, lanes in use), the latter a multiple of `LANES`; all float32.

    The first makes scores, `count` rows: result [block, lanes] = left [block, head_dim] @ right [head_dim, lanes].
    The second adds to outputs: result [head_dim, lanes] += left[:count].T @ right[:count], left [block, head_dim].
    `count` and `head_dim` are multiples of `M`.
    """
    most = widest()
    fresh = [tile(M, vectors, lanes, (head_dim, 1), from_zero=True) for vectors in range(1, most + 1)]
    more = [tile(M, vectors, lanes, (1, head_dim), from_zero=False) for vectors in range(1, most + 1)]
    multiply, multiply_last, multiply_two = fresh[-1], fresh[0], fresh[min(1, most - 1)]
    add, add_last, add_two = more[-1], more[0], more[min(1, most - 1)]

    @_inline
    def multiply_all(result: Any, left: Any, right: Any, count: Any, used: Any) -> None:
        whole = used // (most * LANES) * (most * LANES)
        for i in range(0, whole, most * LANES):
            for m in range(0, count, M):
                multiply(result, left, right, m, i, head_dim)
        for m in range(0, count, M):
            if used - whole == 2 * LANES:
                multiply_two(result, left, right, m, whole, head_dim)
            elif used > whole:
                multiply_last(result, left, right, m, whole, head_dim)

    @_inline
    def add_all(result: Any, left: Any, right: Any, count: Any, used: Any) -> None:
        whole = used // (most * LANES) * (most * LANES)
        for i in range(0, whole, most * LANES):
            for m in range(0, head_dim, M):
                add(result, left, right, m, i, count)
        for m in range(0, head_dim, M):
            if used - whole == 2 * LANES:
                add_two(result, left, right, m, whole, count)
            elif used > whole:
                add_last(result, left, right, m, whole, count)

    return multiply_all, add_all


def tile(rows: int, vectors: int, lanes: int, strides: tuple[int | None, int], *, from_zero: bool) -> Any:
    """A function of (result, left, right, m, i, count) that makes one tile of the result, rows m on and lanes i on,
    each number the sum of `count` terms, one at least.

    Args:
        rows, vectors: the size of the tile.
        lanes: numbers in a row of `result` and `right`.
        strides: of `left`, in numbers: to the next row of the result (None: as it lies), and to the next term of a sum.
        from_zero: the sum is the result; otherwise it is added to what is there.
    """
    to_row, to_term = strides

    @_intrinsic
    def one_tile(context: Any, result: Any, left: Any, right: Any, m: Any, i: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            arrays = [
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args[:3], args[:3], strict=True)
            ]
            there, a, b = (array.data for array in arrays)
            m, i, count = args[3:]

            def at(base: Any, *offsets: Any) -> Any:
                total = offsets[0]
                for offset in offsets[1:]:
                    total = builder.add(total, offset)
                return builder.gep(base, [total])

            def vector_at(base: Any, *offsets: Any) -> Any:
                return builder.bitcast(at(base, *offsets), _VECTOR.as_pointer())

            def number(value: int) -> Any:
                return ir.Constant(_INT, value)

            places = [
                vector_at(there, builder.mul(m, number(lanes)), i, number(row * lanes + vector * LANES))
                for row in range(rows)
                for vector in range(vectors)
            ]
            row_stride = number(to_row) if to_row is not None else builder.extract_value(arrays[1].shape, 1)
            zero = ir.Constant(_VECTOR, [ir.Constant(ir.FloatType(), 0.0)] * LANES)
            start = [zero if from_zero else builder.load(place, align=4) for place in places]
            before, body = builder.block, builder.append_basic_block("tile")
            end = builder.append_basic_block("tile.end")
            builder.branch(body)

            builder.position_at_end(body)
            term = builder.phi(_INT)
            sums = [builder.phi(_VECTOR) for _ in places]
            term.add_incoming(number(0), before)
            row_of_right = builder.mul(term, number(lanes))
            rights = [
                builder.load(vector_at(b, row_of_right, i, number(vector * LANES)), align=4)
                for vector in range(vectors)
            ]
            first = builder.add(builder.mul(m, row_stride), builder.mul(term, number(to_term)))
            added: list[Any] = []
            for row in range(rows):
                one = builder.load(at(a, first, builder.mul(number(row), row_stride)), align=4)
                same = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), one, ir.Constant(ir.IntType(32), 0))
                mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [ir.Constant(ir.IntType(32), 0)] * LANES)
                same = builder.shuffle_vector(same, ir.Constant(_VECTOR, ir.Undefined), mask)
                for vector in range(vectors):
                    product = builder.fmul(same, rights[vector], flags=("contract",))
                    added.append(builder.fadd(sums[row * vectors + vector], product, flags=("contract",)))
            after = builder.add(term, number(1))
            term.add_incoming(after, body)
            for total, value, more in zip(sums, start, added, strict=True):
                total.add_incoming(value, before)
                total.add_incoming(more, body)
            builder.cbranch(builder.icmp_signed("<", after, count), body, end)

            builder.position_at_end(end)
            for place, final in zip(places, added, strict=True):
                builder.store(final, place, align=4)
            return context.get_dummy_value()

        return types.void(result, left, right, int64, int64, int64), generate

    return one_tile



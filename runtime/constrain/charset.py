"""Sets of code points, as sorted ranges: what a class of a pattern stands for.

They serve to foresee how large an automaton becomes, so the Unicode tables need not be of the very
version that the compiling library has. Plane 16 is left out: its private characters fence patterns.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections import defaultdict
from functools import cache, lru_cache
from itertools import pairwise
from typing import TypeAlias

Charset: TypeAlias = tuple[tuple[int, int], ...]  # inclusive, sorted, neither touching nor overlapping

LAST = 0xFFFFF
EVERYTHING: Charset = ((0, 0xD7FF), (0xE000, LAST))
NEWLINE: Charset = ((10, 10),)
SPACE: Charset = (
    (9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
POSIX: dict[str, Charset] = {
    "alnum": ((48, 57), (65, 90), (97, 122)),
    "alpha": ((65, 90), (97, 122)),
    "ascii": ((0, 127),),
    "blank": ((9, 9), (32, 32)),
    "cntrl": ((0, 31), (127, 127)),
    "digit": ((48, 57),),
    "graph": ((33, 126),),
    "lower": ((97, 122),),
    "print": ((32, 126),),
    "punct": ((33, 47), (58, 64), (91, 96), (123, 126)),
    "space": ((9, 13), (32, 32)),
    "upper": ((65, 90),),
    "word": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "xdigit": ((48, 57), (65, 70), (97, 102)),
}


@lru_cache(64)
def union(*sets: Charset) -> Charset:
    merged: list[tuple[int, int]] = []
    for piece in sorted(piece for charset in sets for piece in charset):
        if merged and piece[0] <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], piece[1])
        else:
            merged.append(piece)
    return tuple(merged)


@lru_cache(64)
def negate(charset: Charset) -> Charset:
    """All characters but those of `charset`; surrogates are none."""
    edges = [(-1, -1), *union(charset, ((0xD800, 0xDFFF),)), (LAST + 1, LAST + 1)]
    return tuple((high + 1, low - 1) for (_, high), (low, _) in pairwise(edges) if high + 1 <= low - 1)


def intersect(one: Charset, other: Charset) -> Charset:
    return negate(union(negate(one), negate(other)))


@cache
def category(name: str) -> Charset | None:
    """The general category `Lu`, or all of `L`; None if there is no such category."""
    table = _categories()
    return union(*(table[known] for known in table if known.startswith(name))) or None


@cache
def digits() -> Charset:
    return _categories()["Nd"]


@cache
def word() -> Charset:
    return union(*(category(name) or () for name in ("L", "M", "Nd", "Nl", "Pc")), ((0x200C, 0x200D), (0x24B6, 0x24E9)))


@lru_cache(64)
def fold(charset: Charset) -> Charset:
    """`charset` with the other cases of its characters."""
    twins = _twins()
    cased = sorted(twins)
    inside = (cased[bisect_left(cased, low) : bisect_right(cased, high)] for low, high in charset)
    others = {twin for chars in inside for char in chars for twin in twins[char]}
    return union(charset, tuple((char, char) for char in sorted(others)))


@cache
def _categories() -> dict[str, Charset]:
    ranges: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    start, current = 0, unicodedata.category("\0")
    for code in range(1, LAST + 1):
        if (name := unicodedata.category(chr(code))) != current:
            ranges[current].append((start, code - 1))
            start, current = code, name
    ranges[current].append((start, LAST))
    return {name: tuple(pieces) for name, pieces in ranges.items() if name != "Cs"}


@cache
def _twins() -> dict[int, set[int]]:
    """Characters that differ in case alone, for each that has such twins."""
    groups: defaultdict[str, set[int]] = defaultdict(set)
    for code in range(0x1FFFF):
        char = chr(code)
        if (folded := char.casefold()) != char or char != char.upper():
            groups[folded].add(code)
    return {code: group for group in groups.values() if len(group) > 1 for code in group}

"""Which spans of a step are read once for several rows.

Attention over disjoint sets of keys merges exactly (`merge`), so the path of each segment is cut:
what many rows share is read once for all of them, level by level, and the rest with the segment's
own rows. The segments of a layout are in depth-first order, so the rows below a node are contiguous.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ..layout import Segment, Span


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [first_row, end_row) and slots that all of them attend to, or that end with their own."""

    first_row: int
    end_row: int
    slots: array[int]


@dataclass(frozen=True, slots=True)
class CostModel:
    """When a shared span is worth a level of its own: when the tokens that need not be read outweigh the merge.

    price: what one more partial result costs for a row, in tokens read.
    max_levels: of shared spans at most.
    least_saved: tokens that a level must spare, where its own launches cost something.
    """

    price: float = 32.0
    max_levels: int = 4
    least_saved: float = 0.0

    def pays(self, num_rows: int, num_tokens: int) -> bool:
        return (num_rows - 1) * num_tokens > max(self.price * num_rows, self.least_saved)


def cut(segments: Sequence[Segment], cost: CostModel) -> tuple[list[list[Group]], list[Group]]:
    """The shared groups of each level, outermost first, and for each segment what is left of its path."""
    shared: list[list[Group]] = [[] for _ in range(cost.max_levels)]
    rest: list[Group] = []
    # Segments [first, end) agree on the first `depth` spans, of which `carried` are not in a shared group.
    stack: list[tuple[int, int, int, int, tuple[Span, ...]]] = [(0, len(segments), 0, 0, ())]
    while stack:
        first, end, depth, level, carried = stack.pop()
        common = _common_depth(segments[first:end], depth)
        carried += segments[first].path[depth:common]
        num_rows = segments[end - 1].first_row + segments[end - 1].num_rows - segments[first].first_row
        tokens = sum(len(span.slots) for span in carried)
        if level < cost.max_levels and cost.pays(num_rows, tokens):
            shared[level].append(_group(segments[first:end], carried))
            level, carried = level + 1, ()
        if end - first == 1:
            rest.append(_group(segments[first:end], (*carried, *segments[first].path[common:])))
            continue
        parts = _split(segments, first, end, common)
        stack += [(a, b, common, level, carried) for a, b in reversed(parts)]
    return [groups for groups in shared if groups], rest


def _common_depth(segments: Sequence[Segment], depth: int) -> int:
    """How many leading spans all segments agree on; a segment's last span, which holds its own rows, is its own."""
    shortest = min(len(segment.path) for segment in segments) - 1
    first = segments[0].path
    while depth < shortest and all(segment.path[depth].key == first[depth].key for segment in segments):
        if any(len(segment.path[depth].slots) != len(first[depth].slots) for segment in segments):
            break
        depth += 1
    return depth


def _split(segments: Sequence[Segment], first: int, end: int, depth: int) -> list[tuple[int, int]]:
    """Runs of segments that agree on the span at `depth`; one that ends there is alone."""
    parts: list[tuple[int, int]] = []
    for index in range(first, end):
        path = segments[index].path
        key = path[depth].key if depth < len(path) - 1 else None
        previous = segments[index - 1].path if index > first else ()
        if key is not None and depth < len(previous) - 1 and previous[depth].key == key:
            parts[-1] = (parts[-1][0], index + 1)
        else:
            parts.append((index, index + 1))
    return parts


def _group(segments: Sequence[Segment], spans: Sequence[Span]) -> Group:
    slots: array[int] = array("i")
    for span in spans:
        slots.extend(span.slots)
    last = segments[-1]
    return Group(segments[0].first_row, last.first_row + last.num_rows, slots)

"""A step as a tree of segments, in plain integers.

The rows of a step are the distinct new tokens of the tree, and tokens computed before whose logits
are wanted again. Rows that follow each other on one path are a *segment*; it attends to its whole
path, its own rows included, each row up to itself. Segments are in depth-first order of the tree:
the rows below a node stand together. A backend needs nothing else to compute attention, and the
reference backend can judge the others.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .tree import Node

NO_SLOT = -1
"""Write slot of a row that is computed for its logits only: its keys and values are in the cache already."""


@dataclass(frozen=True, slots=True)
class Span:
    """Slots on a path that belong to one node; two paths share a span if the keys are equal."""

    key: int
    slots: array[int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [first_row, first_row + num_rows) of a step, and the slots of their path, oldest first; theirs come last."""

    first_row: int
    num_rows: int
    path: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A place in the tree whose logits are wanted: `offset` tokens into `node`, which is position `position`."""

    node: Node
    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class Layout:
    """One forward pass. Row r computes `tokens[r]` at `positions[r]` and writes its K/V to `write_slots[r]`."""

    tokens: array[int]
    positions: array[int]
    write_slots: array[int]
    segments: tuple[Segment, ...]
    logit_rows: array[int]  # ascending: the rows whose logits are wanted
    logit_of: array[int]    # for each `Wanted`, in order: its index in `logit_rows`

    @property
    def num_written(self) -> int:
        """Rows that compute a token for the first time."""
        return sum(slot != NO_SLOT for slot in self.write_slots)


def build_layout(fresh: Sequence[Node], wanted: Sequence[Wanted]) -> Layout:
    """Lay out one step.

    Args:
        fresh: the nodes with fresh tokens, parents before children.
        wanted: where logits are wanted; places that coincide share one row.
    """
    units = [(node, len(node) - node.fresh, len(node), True) for node in fresh]
    again: dict[Node, set[int]] = defaultdict(set)
    for want in wanted:
        if want.offset < len(want.node) - want.node.fresh:
            again[want.node].add(want.offset)
    units += [(node, *run, False) for node, offsets in again.items() for run in _runs(sorted(offsets))]
    builder = _Builder()
    for node, first, end, is_fresh in sorted(units, key=lambda unit: [id(n) for n in unit[0].path()]):
        builder.add(node, first, end, fresh=is_fresh)
    rows = [builder.row_of[want.node, want.offset] for want in wanted]
    logit_rows = sorted(set(rows))
    index = {row: i for i, row in enumerate(logit_rows)}
    return Layout(
        builder.tokens,
        builder.positions,
        builder.write_slots,
        tuple(builder.segments),
        array("i", logit_rows),
        array("i", [index[row] for row in rows]),
    )


class _Builder:
    def __init__(self) -> None:
        self.tokens, self.positions, self.write_slots = array("i"), array("i"), array("i")
        self.segments: list[Segment] = []
        self.row_of: dict[tuple[Node, int], int] = {}

    def add(self, node: Node, first: int, end: int, *, fresh: bool) -> None:
        """Add the rows of tokens [first, end) of `node`."""
        above = node.path()[:-1]
        start = sum(map(len, above))
        path = [Span(id(n), n.slots) for n in above]
        path.append(Span(id(node), node.slots if end == len(node.slots) else node.slots[:end]))
        row = len(self.tokens)
        self.segments.append(Segment(row, end - first, tuple(path)))
        self.row_of |= {(node, offset): row + offset - first for offset in range(first, end)}
        self.tokens.extend(node.tokens[first:end])
        self.positions.extend(range(start + first, start + end))
        self.write_slots.extend(node.slots[first:end] if fresh else [NO_SLOT] * (end - first))


def _runs(ordered: Sequence[int]) -> list[tuple[int, int]]:
    """[first, end) of the runs of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for value in ordered:
        if runs and runs[-1][1] == value:
            runs[-1] = (runs[-1][0], value + 1)
        else:
            runs.append((value, value + 1))
    return runs

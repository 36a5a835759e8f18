"""The radix tree at one moment, as values that any thread may keep, and its picture: an SVG that needs nothing else.

A box is a node, as wide as the root of its tokens, in the colour of what keeps it; what hangs below it stands to its
right. Boxes have names that survive splits (what the whole path to their end says), so a film can follow them.
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from .tree import Node, RadixTree

ROW, BOX, GAP, MARGIN, LETTER = 38, 28, 34, 14, 7.3  # pixels
ROOT_WIDTH = 46
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
"""Control characters as their symbols: XML has no way to say them."""
CONTROL = re.compile(r"<\|[\w-]{1,40}\|>")
STYLE = """
.bw-tree{--ink:#1f2328;--faint:#6e7781;--line:#c4cbd3;--paper:#fff;--protected:#ffdf8a;--pinned:#a5d8cf;
--evictable:#dbe7f6;--gone:#f3f4f6;--edge:#8aa4c4;color:var(--ink);font:12px ui-monospace,Menlo,Consolas,monospace}
@media(prefers-color-scheme:dark){.bw-tree{--ink:#e6edf3;--faint:#9198a1;--line:#444c56;--paper:#0d1117;
--protected:#7a5b0b;--pinned:#1d5f55;--evictable:#22395a;--gone:#21262d;--edge:#5b7ba6}}
[data-jp-theme-light="true"] .bw-tree,.vscode-light .bw-tree{--ink:#1f2328;--faint:#6e7781;--line:#c4cbd3;--paper:#fff;
--protected:#ffdf8a;--pinned:#a5d8cf;--evictable:#dbe7f6;--gone:#f3f4f6;--edge:#8aa4c4}
[data-jp-theme-light="false"] .bw-tree,.vscode-dark .bw-tree{--ink:#e6edf3;--faint:#9198a1;--line:#444c56;
--paper:#0d1117;--protected:#7a5b0b;--pinned:#1d5f55;--evictable:#22395a;--gone:#21262d;--edge:#5b7ba6}
.bw-tree svg{max-width:100%;height:auto;display:block}.bw-tree text{fill:var(--ink);font:12px ui-monospace,Menlo,
Consolas,monospace;white-space:pre}.bw-tree .count{fill:var(--faint);font-size:10px}.bw-tree rect{stroke:var(--edge)}
.bw-tree rect:hover{stroke-width:2}.bw-tree path{fill:none;stroke:var(--line);stroke-width:1.5}
.bw-tree .protected{fill:var(--protected)}.bw-tree .pinned{fill:var(--pinned)}.bw-tree .evictable{fill:var(--evictable)}
.bw-tree .root{fill:var(--paper)}.bw-tree .gone{fill:var(--gone);stroke-dasharray:4 3}
.bw-tree p{margin:4px 0 8px 14px;color:var(--faint)}.bw-tree i{display:inline-block;width:11px;height:11px;
border:1px solid var(--edge);border-radius:3px;margin:0 5px -1px 14px}
.bw-tree i.protected{background:var(--protected)}.bw-tree i.pinned{background:var(--pinned)}
.bw-tree i.evictable{background:var(--evictable)}
"""


@dataclass(frozen=True, slots=True)
class Box:
    """One node: `key` names it, and `parent` the node above it. A root has no tokens and no parent."""

    key: str
    parent: str | None
    text: str
    num_tokens: int
    kept_by: str  # "protected", "pinned" or "evictable"; "root"
    slots: str = ""
    locks: int = 0
    pins: int = 0
    hits: int = 0

    @property
    def hover(self) -> str:
        if self.kept_by == "root":
            return self.text
        pins = f", {self.pins} pins" if self.pins else ""
        return (
            f"{self.text}\n{self.num_tokens} tokens, {self.kept_by}; slots {self.slots}; "
            f"{self.locks} locks{pins}; used {self.hits} times"
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box stands, in pixels, and what is written in it."""

    x: float
    y: float
    width: float
    label: str


@dataclass(frozen=True)
class TreePicture:
    """The tree at one moment. `repr` is text; a notebook shows the SVG."""

    boxes: tuple[Box, ...]  # depth first, parents before children
    num_slots: int
    free_slots: int
    host_tokens: int = 0  # that were evicted, and are kept in host memory
    disk_tokens: int = 0  # and in files

    def __repr__(self) -> str:
        depth: dict[str | None, int] = {None: -1}
        lines = []
        for box in self.boxes:
            depth[box.key] = depth[box.parent] + 1
            text = shortened(box.text, 60)
            count = f"  {box.num_tokens} tokens, {box.kept_by}, used {box.hits} times" if box.parent else ""
            lines.append(f"{'  ' * depth[box.key]}{text}{count}")
        return "\n".join([*lines, self.summary])

    def _repr_html_(self) -> str:
        legend = "".join(f'<i class="{name}"></i>{said}' for name, said in LEGEND.items())
        summary = html.escape(self.summary)
        return f'<div class="bw-tree"><style>{STYLE}</style>{self.svg(styled=False)}<p>{summary}{legend}</p></div>'

    @property
    def summary(self) -> str:
        """How many tokens lie in how many nodes, in words."""
        nodes = sum(box.parent is not None for box in self.boxes)
        tokens = sum(box.num_tokens for box in self.boxes)
        said = f"{tokens} tokens in {nodes} nodes; {self.free_slots} of {self.num_slots} slots are free"
        places = {"in host memory": self.host_tokens, "on disk": self.disk_tokens}
        evicted = ", ".join(f"{count} {where}" for where, count in places.items() if count)
        return f"{said}; of those evicted, {evicted}" if evicted else said

    def joined(self) -> TreePicture:
        """Nodes of one token that follow each other without a branch, used alike, as one, named as the last of them.

        Where an answer is given again, token by token, it leaves such a chain.
        """
        children = Counter(box.parent for box in self.boxes)
        chains = dict[str, Box]()  # by the key of the last node so far: what begins or goes on there
        drawn = dict[str, Box]()
        for box in self.boxes:  # parents come before their children
            above = chains.get(box.parent or "")
            if box.num_tokens == 1 and above is not None and children[box.parent] == 1 and _alike(above, box):
                del drawn[above.key]
                box = replace(
                    box,
                    parent=above.parent,
                    text=above.text + box.text,
                    num_tokens=above.num_tokens + 1,
                    slots=f"{above.slots}, {box.slots}",
                )
                chains[box.key] = box
            elif box.num_tokens == 1:
                chains[box.key] = box
            drawn[box.key] = box
        return replace(self, boxes=tuple(drawn.values()))

    def places(self) -> dict[str, Place]:
        """Where each box stands, by its key: a leaf has a row of its own, a parent the middle of its children's."""
        children: dict[str | None, list[Box]] = {}
        for box in self.boxes:
            children.setdefault(box.parent, []).append(box)
        left, right, rows, row = dict[str, float](), dict[str, float](), dict[str, float](), 0
        for box in self.boxes:
            left[box.key] = MARGIN if box.parent is None else right[box.parent] + GAP
            right[box.key] = left[box.key] + _width(box)
        for box in reversed(self.boxes):
            below = children.get(box.key)
            if below:
                rows[box.key] = (rows[below[0].key] + rows[below[-1].key]) / 2
            else:
                rows[box.key], row = row, row + 1
        return {
            box.key: Place(
                round(left[box.key], 1), round(MARGIN + (row - 1 - rows[box.key]) * ROW, 1), _width(box), _label(box)
            )
            for box in self.boxes
        }

    def svg(self, *, styled: bool = True) -> str:
        """The picture, chains `joined`; `styled` with its own style sheet, as a file of its own needs."""
        drawn = self.joined()
        places = drawn.places()
        width = max(place.x + place.width for place in places.values()) + MARGIN
        height = max(place.y for place in places.values()) + BOX + MARGIN
        parts = list(drawn._drawn(places))
        style = f"<style>{STYLE}</style>" if styled else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="bw-tree" role="img" aria-label="{self.summary}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">{style}{"".join(parts)}</svg>'
        )

    def _drawn(self, places: dict[str, Place]) -> Iterator[str]:
        for box in self.boxes:
            if box.parent is not None:
                yield f'<path d="{curve(places[box.parent], places[box.key])}"/>'
        for box in self.boxes:
            at = places[box.key]
            count = "" if box.parent is None else (
                f'<text class="count" x="{at.width - 6:.1f}" y="18" text-anchor="end">{box.num_tokens}</text>'
            )
            yield (
                f'<g transform="translate({at.x} {at.y})"><title>{html.escape(box.hover.translate(VISIBLE))}</title>'
                f'<rect class="{box.kept_by}" width="{at.width}" height="{BOX}" rx="6"/>'
                f'<text x="8" y="18">{html.escape(at.label.translate(VISIBLE))}</text>{count}</g>'
            )


def _alike(above: Box, below: Box) -> bool:
    """Whether nothing but where they end tells two nodes apart."""
    return (above.kept_by, above.locks, above.pins, above.hits) == (below.kept_by, below.locks, below.pins, below.hits)


LEGEND = {"protected": "in use", "pinned": "pinned", "evictable": "cached, may be evicted"}


def picture(
    tree: RadixTree, spell: Callable[[Sequence[int]], str], evicted: tuple[int, int] = (0, 0)
) -> TreePicture:
    """The tree now. On the engine's thread only.

    Args:
        spell: makes text of tokens.
        evicted: tokens that are kept in host memory, and on disk.
    """
    boxes = list[Box]()
    for root in tree.roots():
        digest = _digest(root.namespace)
        boxes.append(_root(root.namespace))
        stack: list[tuple[Node, str, blake2b]] = [(c, boxes[-1].key, digest) for c in [*root.children.values()][::-1]]
        while stack:
            node, parent, above = stack.pop()
            digest = above.copy()
            digest.update(node.tokens.tobytes())
            key = digest.hexdigest()
            boxes.append(
                Box(
                    key, parent, spell(node.tokens), len(node), node.kept_by,
                    _ranges(node.slots), node.lock, node.pins, node.hits,
                )
            )  # fmt: skip
            stack += [(child, key, digest) for child in [*node.children.values()][::-1]]
    return TreePicture(tuple(boxes or [_root(None)]), tree.pool.num_slots, tree.pool.num_free, *evicted)


def _digest(namespace: Hashable) -> blake2b:
    return blake2b(repr(namespace).encode(), digest_size=8)


def _root(namespace: Hashable) -> Box:
    name = "root" if namespace is None else f"root of {namespace!r}"
    return Box(_digest(namespace).hexdigest(), None, name, 0, "root")


def curve(above: Place, below: Place) -> str:
    """The line from the right of one box to the left of another, as an SVG path."""
    start, end, middle = above.x + above.width, below.x, (above.x + above.width + below.x) / 2
    from_y, to_y = above.y + BOX / 2, below.y + BOX / 2
    return f"M{start:.1f} {from_y:.1f}C{middle:.1f} {from_y:.1f} {middle:.1f} {to_y:.1f} {end:.1f} {to_y:.1f}"


def shortened(text: str, most: int) -> str:
    """`text` on one line, its middle left out where it is longer than `most`; a control token like <|end|> is a ◆."""
    line = CONTROL.sub("◆", text).strip(" ").replace("\n", "↵")
    half = (most - 1) // 2
    return line if len(line) <= most else f"{line[: most - 1 - half]}…{line[len(line) - half :] if half else ''}"


def _width(box: Box) -> float:
    if box.text == "root" and box.parent is None:
        return ROOT_WIDTH
    return round(min(460.0, 56 + 36 * math.sqrt(box.num_tokens)), 1)


def _label(box: Box) -> str:
    count = len(str(box.num_tokens)) * 6.5 + 6 if box.parent is not None else 0
    return shortened(box.text, max(1, int((_width(box) - 14 - count) / LETTER)))


def _ranges(slots: Sequence[int]) -> str:
    """Slots as runs: `3-9, 12`; of many runs the first six."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    more = f", and {len(runs) - 6} more runs" if len(runs) > 6 else ""
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:6]) + more

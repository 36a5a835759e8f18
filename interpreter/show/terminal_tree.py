"""The cache for the terminal: a node a line, its size as a bar, in the colour of what keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.text import Text
from rich.tree import Tree

from branchwise.runtime.picture import Box, TreePicture, shortened

KEPT = {"protected": "yellow", "pinned": "cyan", "evictable": "blue"}
MOST_BAR, TEXT = 16, 44  # characters


def tree_as_rich(picture: TreePicture, before: TreePicture | None = None) -> Tree:
    """The tree; text that was not in `before` is marked with a plus, nodes are listed of which the end is gone.

    Nodes that were only split or joined since then are neither.
    """
    picture = picture.joined()
    now = _paths(picture.boxes)
    before = before.joined() if before is not None else None
    old = _paths(before.boxes) if before is not None else {}
    places: dict[str, Tree] = {}
    top = Tree(Text("root", "bold"), guide_style="dim")
    for box in picture.boxes:
        if box.parent is None:
            places[box.key] = top
        else:
            new = before is not None and not _begins_any(now[box.key], old.values())
            places[box.key] = places[box.parent].add(_node(box, new=new))
    for box in before.boxes if before is not None else ():
        if box.parent in places and not _begins_any(old[box.key], now.values()):
            places[box.parent].add(_gone(box))
    return top


def _paths(boxes: Iterable[Box]) -> dict[str, str]:
    """By a box's key, the text from its root to its end."""
    paths: dict[str, str] = {}
    for box in boxes:
        paths[box.key] = f"{paths[box.parent]}{box.text}" if box.parent is not None else f"{box.text}\0"
    return paths


def _begins_any(path: str, others: Iterable[str]) -> bool:
    return any(other.startswith(path) for other in others)


def _node(box: Box, *, new: bool) -> Text:
    size = "▇" * min(MOST_BAR, max(1, round(math.sqrt(box.num_tokens) * 1.6)))
    used = f" · used {box.hits}×" if box.hits > 1 else ""
    line = Text(no_wrap=True, overflow="ellipsis").append(f"{size} ", KEPT[box.kept_by])
    line.append(f"{box.num_tokens} ", "bold")
    line.append(f"+ {shortened(box.text, TEXT)}" if new else shortened(box.text, TEXT), "green" if new else "")
    return line.append(used, "dim")


def _gone(box: Box) -> Text:
    text = f"✂ {shortened(box.text, TEXT)} (evicted, or its end)"
    return Text(text, "red", no_wrap=True, overflow="ellipsis")

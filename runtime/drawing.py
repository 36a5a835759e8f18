"""The radix tree as a picture's source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .tree import Node, RadixTree

COLOURS = {"protected": "#f4c95d", "pinned": "#9bc1bc", "evictable": "#e6ebe0"}
LONGEST_LABEL = 40


def as_dot(tree: RadixTree, spell: Callable[[Sequence[int]], str]) -> str:
    """The tree for Graphviz: a box a node, its text shortened, its colour by what keeps it, its size in tokens.

    Args:
        spell: tokens to text.
    """
    names: dict[Node, str] = {}
    lines = ["digraph radix_tree {", '  node [shape=box, style="rounded,filled", fontname="monospace"];']
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None, f"{node!r} is in no tree"
        if parent not in names:
            names[parent] = f"n{len(names)}"
            lines.append(f'  {names[parent]} [label="root", fillcolor=white];')
        names[node] = f"n{len(names)}"
        label = _escaped(f"{_shortened(spell(node.tokens))}\n{len(node)} tokens")
        lines.append(f'  {names[node]} [label="{label}", fillcolor="{COLOURS[node.kept_by]}"];')
        lines.append(f"  {names[parent]} -> {names[node]};")
    return "\n".join([*lines, "}"])


def _shortened(text: str) -> str:
    half = LONGEST_LABEL // 2
    return text if len(text) <= LONGEST_LABEL else f"{text[:half]}…{text[-half:]}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

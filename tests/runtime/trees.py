"""Random steps for tests: a tree with running sequences, laid out as the scheduler would."""

from __future__ import annotations

import random
from array import array

from branchwise.runtime.layout import Layout, Wanted, build_layout
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import Node, RadixTree


def random_step(
    rng: random.Random, num_slots: int = 256, page_size: int = 1
) -> tuple[RadixTree, list[tuple[list[int], Node]], Layout]:
    """Sequences over three tokens, some cached in part; all are computed to their end in one step.

    Returns the tree, each sequence with the node or tail it ends in, and the layout; logits are wanted at every end.
    """
    tree = RadixTree(SlotPool(num_slots, page_size))
    for _ in range(rng.randint(0, 4)):
        tokens = _tokens(rng)
        tree.unlock(place(tree, tokens[: len(tokens) // page_size * page_size]))
    tree.commit()
    sequences = []
    for _ in range(rng.randint(1, 8)):
        tokens = _tokens(rng)
        sequences.append((tokens, place(tree, tokens)))
    wanted = [Wanted(node, len(node) - 1, len(tokens) - 1) for tokens, node in sequences]
    return tree, sequences, build_layout(tree.fresh_nodes(), wanted)


def decode_step(rng: random.Random, branches: int, num_slots: int = 256, page_size: int = 1) -> Layout:
    """A row for each branch, over a prefix that all share and perhaps one that half of them share."""
    tree = RadixTree(SlotPool(num_slots, page_size))
    prefix = list(range(page_size * rng.randint(1, 3)))
    ends = []
    for i in range(branches):
        half = [300 + i % 2] * page_size * rng.randint(0, 1)
        ends.append(place(tree, [*prefix, *half, *range(400 + 20 * i, 400 + 20 * i + page_size * rng.randint(1, 3))]))
    tree.commit()
    for i, node in enumerate(ends):
        tree.append(node, array("i", [1000 + i]))
    fresh = tree.fresh_nodes()
    return build_layout(fresh, [Wanted(node, len(node) - 1, sum(map(len, node.path())) - 1) for node in fresh])


def _tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(3) for _ in range(rng.randint(1, 12))]


def place(tree: RadixTree, tokens: list[int]) -> Node:
    """Lock and append a sequence; returns the node or tail it ends in."""
    sequence = array("i", tokens)
    found = tree.match(sequence)
    node = tree.lock(found)
    if found.length == len(sequence):
        return node
    node, tail = tree.append(node, sequence[found.length :])
    return tail or node

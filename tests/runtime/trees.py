"""Random steps for tests: a tree with running sequences, laid out as the scheduler would."""

from __future__ import annotations

import random
from array import array

from branchwise.runtime.layout import Layout, Wanted, build_layout
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import Node, RadixTree


def random_step(rng: random.Random, num_slots: int = 256) -> tuple[RadixTree, list[tuple[list[int], Node]], Layout]:
    """Sequences over three tokens, some cached in part; all are computed to their end in one step.

    Returns the tree, each sequence with the node it ends in, and the layout; logits are wanted at every end.
    """
    tree = RadixTree(SlotPool(num_slots))
    for _ in range(rng.randint(0, 4)):
        tree.unlock(_place(tree, _tokens(rng)))
    tree.commit()
    sequences = []
    for _ in range(rng.randint(1, 8)):
        tokens = _tokens(rng)
        sequences.append((tokens, _place(tree, tokens)))
    wanted = [Wanted(node, len(node) - 1, len(tokens) - 1) for tokens, node in sequences]
    return tree, sequences, build_layout(tree.fresh_nodes(), wanted)


def _tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(3) for _ in range(rng.randint(1, 12))]


def _place(tree: RadixTree, tokens: list[int]) -> Node:
    sequence = array("i", tokens)
    found = tree.match(sequence)
    node = tree.lock(found)
    return tree.append(node, sequence[found.length :])[0] if found.length < len(sequence) else node

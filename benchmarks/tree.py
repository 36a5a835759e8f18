"""What the operations of the radix tree cost, and what it does to memory: `python benchmarks/tree.py`.

Beside it, measured the same way, a trie as one would write it in an afternoon: a dictionary for each
token, and the least recently used leaf found by looking at all of them.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from branchwise.runtime.errors import OutOfSlots
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import Match, Node, RadixTree

PROMPT = 8192
EDGE = 16
MANY = 1_000_000
VOCAB = 128_000


class Trie:
    """A dictionary for each token: children, slot, last use."""

    def __init__(self) -> None:
        self.root = TrieNode(None, -1)
        self.clock = 0

    def match(self, tokens: array[int]) -> list[int]:
        node, slots = self.root, []
        self.clock += 1
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                break
            child.last_use = self.clock
            slots.append(child.slot)
            node = child
        return slots

    def append(self, node: TrieNode, token: int, slot: int) -> TrieNode:
        child = node.children[token] = TrieNode(node, token)
        child.slot = slot
        return child

    def evict(self) -> None:
        """Drop the least recently used leaf."""
        leaf = min((node for node in self.nodes() if not node.children), key=lambda node: node.last_use)
        assert leaf.parent is not None
        del leaf.parent.children[leaf.token]

    def nodes(self) -> Iterator[TrieNode]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


class TrieNode:
    __slots__ = ("children", "last_use", "parent", "slot", "token")

    def __init__(self, parent: TrieNode | None, token: int) -> None:
        self.parent, self.token = parent, token
        self.children: dict[int, TrieNode] = {}
        self.slot = self.last_use = 0


# ----------------------------------------------------------------------------------------------------- what is grown


def grow(tree: RadixTree, num_nodes: int, edge: int, rng: random.Random) -> list[Node]:
    """Add nodes below a random one of the first thousand, which hang below each other."""
    nodes: list[Node] = []
    for i in range(num_nodes):
        above = rng.choice(nodes) if nodes else tree.root()
        node = tree.lock(Match(above, len(above), 0))
        node.sealed = True
        node, _ = tree.append(node, _edge(i, edge, rng))
        tree.commit()
        tree.unlock(node)
        if i < 1000:
            nodes.append(node)
    return nodes


def _edge(number: int, length: int, rng: random.Random) -> array[int]:
    """An edge like no other: its first token is its number."""
    return array("i", [number, *(rng.randrange(VOCAB) for _ in range(length - 1))])


def add_prompts(tree: RadixTree, count: int, rng: random.Random) -> list[array[int]]:
    """Prompts of `PROMPT` tokens on eight edges each: a chat of eight turns."""
    prompts = []
    for i in range(count):
        prompt, node = array("i"), tree.lock(Match(tree.root(), 0, 0))
        for turn in range(8):
            part = _edge(-1 - 8 * i - turn, PROMPT // 8, rng)
            node, _ = tree.append(node, part)
            node.sealed = True
            prompt += part
        tree.unlock(node)
        prompts.append(prompt)
    tree.commit()
    return prompts


def median_us(operation: Callable[[], object], repeat: int) -> float:
    return statistics.median(_times(operation, repeat)) * 1e6


def _times(operation: Callable[[], object], repeat: int) -> Iterator[float]:
    for _ in range(repeat):
        start = time.perf_counter()
        operation()
        yield time.perf_counter() - start


# ------------------------------------------------------------------------------------------------------ measurements


def match_us(rng: random.Random) -> tuple[float, float, float]:
    """A prompt that is cached whole, one that leaves its path in its last edge, and the first in a trie."""
    tree = RadixTree(SlotPool(4_000_000))
    grow(tree, 100_000, EDGE, rng)
    prompts = add_prompts(tree, 64, rng)
    trie, slots = Trie(), iter(range(10**9))
    for prompt in prompts:
        node = trie.root
        for token in prompt:
            node = trie.append(node, token, next(slots))
    whole = median_us(lambda: tree.match(rng.choice(prompts)), 2000)
    plain = median_us(lambda: trie.match(rng.choice(prompts)), 200)
    for prompt in prompts:
        prompt[-rng.randint(1, 1000)] = VOCAB
    return whole, median_us(lambda: tree.match(rng.choice(prompts)), 2000), plain


def append_us(rng: random.Random) -> tuple[float, float, float]:
    """One token of one of 64 sequences that decode; one with its share of `commit`; one in a trie.

    Timed a step of 64 at a time, as the scheduler calls it: with the array of the one token cut from a longer one.
    """
    tree = RadixTree(SlotPool(1_000_000))
    grow(tree, 10_000, EDGE, rng)
    sequences: list[Node] = []
    for i in range(64):
        root = tree.lock(Match(tree.root(), 0, 0))
        node, _ = tree.append(root, _edge(-1 - i, 200, rng))
        sequences.append(node)
    tree.commit()
    tokens = array("i", [rng.randrange(VOCAB) for _ in range(1001)])
    appended, committed = [], []
    for position in range(1000):
        start = time.perf_counter()
        for i, node in enumerate(sequences):
            sequences[i], _ = tree.append(node, tokens[position : position + 1], None)
        appended.append(time.perf_counter() - start)
        tree.commit()
        committed.append(time.perf_counter() - start)
    trie = Trie()
    leaves = [trie.append(trie.root, i, i) for i in range(64)]
    plain = []
    for position in range(1000):
        start = time.perf_counter()
        for i, leaf in enumerate(leaves):
            leaves[i] = trie.append(leaf, tokens[position], position)
        plain.append(time.perf_counter() - start)
    appended_us, committed_us, plain_us = (
        statistics.median(times) / 64 * 1e6 for times in (appended, committed, plain)
    )
    return appended_us, committed_us, plain_us


def evict_us(num_nodes: int, rng: random.Random) -> float:
    tree = RadixTree(SlotPool(EDGE * num_nodes))
    grow(tree, num_nodes, EDGE, rng)
    return median_us(lambda: tree.evict(EDGE), num_nodes // 4)


def evict_plain_us(num_nodes: int, rng: random.Random) -> float:
    trie, nodes = Trie(), list[TrieNode]()
    for i in range(num_nodes):
        node = rng.choice(nodes) if nodes else trie.root
        for token in _edge(i, EDGE, rng):
            node = trie.append(node, token, 0)
        node.last_use = i
        if i < 1000:
            nodes.append(node)
    return median_us(trie.evict, 5)


def memory_of(kind: str) -> int:
    """Bytes that a million nodes take, in a process of their own."""
    done = subprocess.run(
        [sys.executable, __file__, "--grow", kind], capture_output=True, text=True, check=True, env=os.environ
    )
    return int(done.stdout)


def grow_and_print(kind: str) -> None:
    rng = random.Random(0)
    before = _resident()
    if kind == "tree":
        tree = RadixTree(SlotPool(4 * MANY))
        grow(tree, MANY, 4, rng)
    else:
        trie = Trie()
        for i in range(MANY // 4):
            below = trie.root
            for token in _edge(i, 4, rng):
                below = trie.append(below, token, 0)
    print(_resident() - before)


def _resident() -> int:
    """Bytes of this process that are in memory, as Linux counts them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def contiguity(rng: random.Random, *, full: bool, operations: int = 10_000) -> tuple[int, int, float]:
    """Spans longer than 64 slots after random work; those that are one run; slots a run on average in all of them.

    An operation computes a prompt below one that came before, or a new one; or one to 32 tokens of every sequence
    that runs, twelve at most; or ends one; or, unless the pool is to be `full` all the time, evicts.
    """
    tree = RadixTree(SlotPool(65_536))
    known: list[array[int]] = [array("i")]
    running: list[tuple[array[int], Node]] = []
    for number in range(operations):
        match rng.choice(("prompt", "decode", "finish", "evict")):
            case "prompt" if len(running) < 12:
                tokens = rng.choice(known)[: rng.randint(0, 2000)] + _edge(number, rng.randint(20, 800), rng)
                node = _compute(tree, tokens)
                if node is not None:
                    running.append((tokens, node))
            case "decode":
                for _ in range(rng.randint(1, 32)):
                    running = [_decode(tree, tokens, node, rng) for tokens, node in running]
                    tree.commit()
            case "finish" if running:
                tokens, node = running.pop(rng.randrange(len(running)))
                tree.unlock(node)
                known = [*known[-40:], tokens]
            case "evict" if not full:
                tree.evict(rng.randint(1, 2000))
    spans = [node.slots for node in tree.nodes() if len(node.slots) > 64]
    runs = [1 + sum(b != a + 1 for a, b in itertools.pairwise(slots)) for slots in spans]
    return len(spans), sum(run == 1 for run in runs), sum(map(len, spans)) / sum(runs)


def _compute(tree: RadixTree, tokens: array[int]) -> Node | None:
    found = tree.match(tokens)
    node = tree.lock(found)
    try:
        node, _ = tree.append(node, tokens[found.length :])
    except OutOfSlots:
        tree.unlock(node)
        return None
    tree.commit()
    node.sealed = True
    return node


def _decode(tree: RadixTree, tokens: array[int], node: Node, rng: random.Random) -> tuple[array[int], Node]:
    token = array("i", [rng.randrange(VOCAB)])
    found = tree.match(token, node)
    if found.length:
        return tokens, node
    return tokens + token, tree.append(node, token)[0]


def main() -> None:
    if sys.argv[1:2] == ["--grow"]:
        grow_and_print(sys.argv[2])
        return
    rng = random.Random(0)
    whole, parting, plain_match = match_us(rng)
    append, committed, plain_append = append_us(rng)
    evict = [evict_us(count, rng) for count in (1000, 10_000, 100_000)]
    plain_evict = evict_plain_us(1000, rng)
    memory, plain_memory = (memory_of(kind) / 2**20 for kind in ("tree", "trie"))
    roomy, full = contiguity(rng, full=False), contiguity(rng, full=True)
    rows = [
        (f"match {PROMPT:,} tokens among 100,000 nodes", f"{whole:.1f} us", "60 us", f"{plain_match:.0f} us"),
        ("the same, leaving its path in the last edge", f"{parting:.1f} us", "60 us", "-"),
        ("append one decoded token", f"{append:.2f} us", "1.5 us", f"{plain_append:.2f} us"),
        ("the same, with its share of `commit`", f"{committed:.2f} us", "-", "-"),
        ("evict one leaf of 1,000 nodes", f"{evict[0]:.1f} us", "10 us", f"{plain_evict:.0f} us"),
        ("... of 10,000", f"{evict[1]:.1f} us", "10 us", "-"),
        ("... of 100,000", f"{evict[2]:.1f} us", "10 us", "-"),
        ("a million nodes (tree: of 4 tokens; trie: of 1)", f"{memory:.0f} MB", "1024 MB", f"{plain_memory:.0f} MB"),
        ("spans over 64 slots that are one run", f"{roomy[1]} of {roomy[0]}", "most", "-"),
        ("... and slots a run in them", f"{roomy[2]:.0f}", "-", "-"),
        ("the same in a pool that is always full", f"{full[1]} of {full[0]}", "-", "-"),
        ("... and slots a run in them", f"{full[2]:.0f}", "-", "-"),
    ]
    print("| operation (median) | radix tree | target | plain trie |\n|---|---:|---:|---:|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    others = {"sglang": "SGLang's RadixCache", "minisgl": "mini-sglang's RadixPrefixCache"}
    for module, name in others.items():
        there = importlib.util.find_spec(module) is not None
        print(f"\n{name}: {'importable, but not measured' if there else 'not importable here'}")
    print(f"\n{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()

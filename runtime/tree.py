"""The radix tree: every token sequence that has slots, each common prefix once.

An edge holds tokens and the slots in which their keys and values lie. The tree owns the slots of
its edges: it takes them from the pool when tokens are added and gives them back when they are
evicted. It knows integers only: no tensors, no requests, no model.

A sequence that is being computed *locks* the path from the root to the node where it ends. What no
sequence locks is kept for later and evicted, leaves first, when slots are needed.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .errors import OutOfSlots
from .slots import SlotPool

Tokens = array  # array("i"): compares and slices as one block of memory


class Node:
    """One edge of the tree and the place where it ends."""

    __slots__ = ("children", "fresh", "last_use", "lock", "parent", "sealed", "slots", "tokens")

    def __init__(self, parent: Node | None, tokens: array[int], slots: array[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, Node] = {}
        self.lock = 0        # sequences that end here or below
        self.last_use = 0    # set when a lock is taken
        self.fresh = 0       # trailing tokens that the step in progress computes
        self.sealed = False  # a prompt ends here: what follows opens a child, so that it can be evicted first

    def __len__(self) -> int:
        return len(self.tokens)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{_short(self.tokens)} slots={_short(self.slots)} locks={self.lock}"

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """Where a walk along given tokens ended: `used` tokens into `node`, after `length` tokens."""

    node: Node
    used: int
    length: int


class RadixTree:
    """Invariants: children differ in their first token; slots of the pool are free or in exactly one
    node; `evictable + protected` is the number of slots in the tree; a parent's locks are at least
    the sum of its children's."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.root = Node(None, array("i"), array("i"))
        self.evictable = 0  # slots in nodes that no sequence locks
        self.protected = 0  # slots in nodes that some sequence locks
        self.evicted = 0    # slots taken back so far
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (last use, tie, leaf); entries go stale
        self._tie = 0
        self._fresh: list[Node] = []

    def match(self, tokens: Sequence[int], start: Node | None = None) -> Match:
        """Follow `tokens` down from the end of `start` (the root by default) as far as they go.

        A query: it changes nothing. `tokens` should be an `array("i")`.
        """
        node = start or self.root
        used, length = len(node), 0
        while length < len(tokens):
            child = node.children.get(tokens[length])
            if child is None:
                break
            common = _common_prefix(child.tokens, tokens, length)
            node, used, length = child, common, length + common
            if common < len(child):
                break
        return Match(node, used, length)

    def lock(self, found: Match, held: Node | None = None) -> Node:
        """Lock the path to `found`, splitting its node if it ends inside; returns the node that ends there.

        `held` is the node above it that the sequence has locked already, if any; its lock moves down.
        """
        node = found.node if found.used == len(found.node) else self._split(found.node, found.used)
        self._clock += 1
        step: Node | None = node
        while step is not None and step is not held:
            if step.lock == 0:
                self.evictable -= len(step)
                self.protected += len(step)
            step.lock += 1
            step.last_use = self._clock
            step = step.parent
        return node

    def unlock(self, node: Node) -> None:
        """Give up one lock on the path to `node`."""
        step: Node | None = node
        while step is not None:
            assert step.lock > 0, f"{step!r} is unlocked more often than locked"
            step.lock -= 1
            if step.lock == 0:
                self.protected -= len(step)
                self.evictable += len(step)
                self._offer(step)
            step = step.parent

    def append(self, node: Node, tokens: array[int]) -> Node:
        """Add `tokens` after `node`, which the caller holds; returns the node where they end, locked instead.

        The leaf grows in place if only the caller uses it; otherwise a child opens. Slots come from
        the pool, by eviction if need be. Until `commit`, the tokens are fresh.

        Raises:
            OutOfSlots: the pool and what can be evicted do not suffice; nothing has changed then.
        """
        assert node.lock and tokens and tokens[0] not in node.children, f"cannot append {_short(tokens)} to {node!r}"
        self.reserve(len(tokens))
        slots = self.pool.allocate(len(tokens), after=node.slots[-1] if node.slots else None)
        if node.children or node.lock > 1 or node.sealed or node is self.root:
            node = self._open_child(node, tokens, slots)
        else:
            node.tokens.extend(tokens)
            node.slots.extend(slots)
        if node.fresh == 0:
            self._fresh.append(node)
        node.fresh += len(tokens)
        self.protected += len(tokens)
        return node

    def reserve(self, count: int) -> None:
        """Evict until `count` slots are free.

        Raises:
            OutOfSlots: not even evicting everything that is unlocked would do; nothing has changed then.
        """
        if count > self.pool.num_free + self.evictable:
            raise OutOfSlots(wanted=count, free=self.pool.num_free, evictable=self.evictable)
        if count > self.pool.num_free:
            self.evict(count - self.pool.num_free)

    def evict(self, count: int) -> int:
        """Give back up to `count` unlocked slots, from the ends of the least recently used leaves; returns how many."""
        done = 0
        while done < count and self._leaves:
            last_use, _, leaf = heapq.heappop(self._leaves)
            if leaf.parent is None or leaf.children or leaf.lock or leaf.last_use != last_use:
                continue
            parent, size = leaf.parent, min(len(leaf), count - done)
            self._cut_tail(leaf, size)
            self.evictable -= size
            done += size
            self._offer(leaf if len(leaf) else parent)
        self.evicted += done
        return done

    def reset(self) -> int:
        """Evict everything that is unlocked; returns the number of slots given back."""
        return self.evict(self.evictable)

    def fresh_nodes(self) -> list[Node]:
        """The nodes that hold fresh tokens, parents before children."""
        return sorted(self._fresh, key=lambda node: len(node.path()))

    def commit(self) -> None:
        """The step in progress succeeded: its tokens are computed. Chains that nothing branches off become one node."""
        for node in self._fresh:
            node.fresh = 0
        for node in self._fresh:
            self._absorb_parent(node)
        self._fresh.clear()

    def abandon(self) -> None:
        """The step in progress failed: remove its tokens. No sequence may lock them any more."""
        for node in reversed(self.fresh_nodes()):
            assert node.lock == 0 and not node.children, f"{node!r} is in use"
            size = node.fresh
            node.fresh = 0
            self._cut_tail(node, size)
            self.evictable -= size
        self._fresh.clear()

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, depth first, parents before children."""
        stack = list(self.root.children.values())[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(list(node.children.values())[::-1])

    def check(self) -> None:
        """Assert the invariants of the class. Walks the whole tree."""
        self.pool.check()
        nodes = list(self.nodes())
        for node in nodes:
            assert node.parent is not None, f"{node!r} has no parent"
            assert node.parent.children[node.tokens[0]] is node, f"{node!r} hangs in the wrong place"
            assert 0 < len(node) == len(node.slots), f"{node!r} has no or too few slots"
            assert 0 <= node.fresh <= len(node), f"{node!r} has {node.fresh} fresh tokens"
            assert node.lock >= sum(child.lock for child in node.children.values()), f"{node!r} has too few locks"
        for state, count in (("evictable", self.evictable), ("protected", self.protected)):
            real = sum(len(node) for node in nodes if (node.lock == 0) == (state == "evictable"))
            assert real == count, f"{state}: counted {count}, in the tree {real}"
        held = [slot for node in nodes for slot in node.slots]
        assert len(held) == len(set(held)), "a slot is in two places"
        assert self.pool.free_slots().isdisjoint(held), "a free slot is in the tree"
        assert self.pool.num_free + len(held) == self.pool.num_slots, "slots were lost"

    def render(self) -> str:
        """The tree as indented text, one node a line."""
        lines = ["root"]
        for node in self.nodes():
            lines.append("  " * len(node.path()) + repr(node))
        return "\n".join(lines)

    def _open_child(self, parent: Node, tokens: array[int], slots: array[int]) -> Node:
        child = Node(parent, array("i", tokens), slots)
        child.lock, child.last_use = 1, parent.last_use
        parent.children[tokens[0]] = child
        return child

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` in two; returns the new upper half. Who held `node` still holds the same end."""
        assert node.parent is not None and 0 < at < len(node), f"cannot split {node!r} at {at}"
        upper = Node(node.parent, node.tokens[:at], node.slots[:at])
        upper.lock, upper.last_use = node.lock, node.last_use
        upper.fresh = max(0, node.fresh - (len(node) - at))
        if upper.fresh:
            self._fresh.append(upper)
        node.fresh = min(node.fresh, len(node) - at)
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _absorb_parent(self, node: Node) -> None:
        """Join `node` with its parent if no sequence, prompt or branch ends between them."""
        parent = node.parent
        if parent is None or parent.parent is None or parent.sealed:
            return
        if len(parent.children) > 1 or parent.lock != node.lock:
            return
        node.tokens, node.slots = parent.tokens + node.tokens, parent.slots + node.slots
        node.parent = parent.parent
        node.parent.children[node.tokens[0]] = node
        parent.parent = None

    def _cut_tail(self, leaf: Node, size: int) -> None:
        """Free the last `size` slots of a leaf; a leaf that becomes empty leaves the tree."""
        keep = len(leaf) - size
        self.pool.free(leaf.slots[keep:])
        if keep == 0 and leaf.parent is not None:
            del leaf.parent.children[leaf.tokens[0]]
            leaf.parent = None
        del leaf.tokens[keep:], leaf.slots[keep:]
        leaf.sealed = False

    def _offer(self, node: Node) -> None:
        """Remember `node` for eviction, if it is an unlocked leaf now."""
        if node.lock == 0 and not node.children and node.parent is not None:
            self._tie += 1
            heapq.heappush(self._leaves, (node.last_use, self._tie, node))


def _common_prefix(edge: array[int], tokens: Sequence[int], start: int) -> int:
    """How many tokens of `edge` stand in `tokens` from `start` on."""
    size = min(len(edge), len(tokens) - start)
    if edge[:size] == tokens[start : start + size]:
        return size
    low, high = 0, size  # edge[:low] is common, edge[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low


def _short(values: Sequence[int], limit: int = 8) -> str:
    """`values` on one line, the middle left out if there are many."""
    shown = list(values)
    return str(shown) if len(shown) <= limit else f"[{', '.join(map(str, shown[:3]))}, ... {len(shown)} in all]"

"""The radix tree: every token sequence that has slots, each common prefix once.

An edge holds tokens and the slots in which their keys and values lie. The tree owns the slots of
its edges: it takes them from the pool when tokens are added and gives them back when they are
evicted. It knows integers only: no tensors, no requests, no model.

A sequence that is being computed *locks* the path from the root to the node where it ends. What no
sequence locks is kept for later and evicted, leaves first, when slots are needed.

What may still be taken back has slots, but no place in the tree: it is the sequence's *tail*, a node
below the path that nobody else finds. With pages of several slots, edges are whole pages, and the tail
is first of all the tokens that do not fill a page; they join the tree when their page is full. Drafts,
tokens that are computed on the guess that they will be sampled, come last in it for one step.
"""

from __future__ import annotations

import heapq
import logging
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .errors import OutOfSlots
from .policies import EVICTION, EvictionOrder, guarded, lru
from .slots import SlotPool

log = logging.getLogger("branchwise")

Key: TypeAlias = int | bytes
"""The first page of an edge: its token, or the bytes of its tokens."""

OnEvict: TypeAlias = Callable[[Hashable, "array[int]", "array[int]", "array[int]"], None]
"""Hears of tokens that are evicted: their namespace, the tokens before them, they themselves, their slots."""

EVICTED_TOGETHER = 64
"""If somebody copies what is evicted, at least so many slots go at once, where there are so many: each copy costs."""

_NO_CHILDREN: dict[Key, Node] = {}  # of all leaves together; never written to


class Node:
    """One edge of the tree and the place where it ends. Only the tree writes to it."""

    __slots__ = (
        "children", "created", "fresh", "hits", "last_use", "lock", "parent", "pins", "priority", "sealed", "slots",
        "tokens",
    )  # fmt: skip

    def __init__(self, parent: Node | None, tokens: array[int], slots: array[int], created: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children = _NO_CHILDREN
        self.lock = 0        # sequences that end here or below
        self.pins = 0        # pins of prefixes that end here or below
        self.fresh = 0       # trailing tokens that the step in progress computes
        self.sealed = False  # a prompt ends here: what follows opens a child, so that it can be evicted first
        self.created = self.last_use = created  # ticks of the tree's clock; `last_use` is set when a lock is taken
        self.hits = 0        # locks taken so far
        self.priority = 0    # the highest of the sequences that used it

    def __len__(self) -> int:
        return len(self.tokens)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        pins = f" pins={self.pins}" if self.pins else ""
        return f"{_short(self.tokens)} slots={_short(self.slots)} locks={self.lock}{pins}"

    @property
    def kept_by(self) -> str:
        """What keeps it from eviction: "protected" by a lock, "pinned", or nothing: "evictable"."""
        return "protected" if self.lock else "pinned" if self.pins else "evictable"

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Root(Node):
    """Where the sequences of one namespace begin."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, array("i"), array("i"), 0)
        self.namespace = namespace


@dataclass(frozen=True, slots=True)
class Match:
    """Where a walk along given tokens ended: `used` tokens into `node`, after `length` tokens."""

    node: Node
    used: int
    length: int


class RadixTree:
    """Invariants: children differ in their first page; every slot of the pool is free, in exactly one node, or
    held by a tail; `evictable + protected + pinned` is the number of slots in nodes; a parent has at least the
    locks and pins of its children together."""

    def __init__(self, pool: SlotPool, order: EvictionOrder = lru) -> None:
        """`order` says which unlocked leaf goes first: one of `policies.EVICTION`, or a function like those."""
        self.pool = pool
        self.page_size = pool.page_size
        self.evictable = 0  # slots in nodes that nothing keeps
        self.protected = 0  # slots in nodes that some sequence locks
        self.pinned = 0     # slots in nodes that are only pinned
        self.held = 0       # slots of tails
        self.evicted = 0    # slots taken back so far
        self.on_evict: OnEvict | None = None  # called while the slots still hold what is evicted
        self._order = order if order in EVICTION.values() else guarded(order, lru, "eviction")
        self._roots: dict[Hashable, Root] = {}
        self._clock = 0
        self._leaves: list[tuple[Any, int, Node]] = []  # heap of (order, tie, unlocked leaf); entries go stale
        self._most_leaves = 1024  # entries in it before those that are stale are thrown out
        self._tie = 0
        self._fresh: list[Node] = []

    def root(self, namespace: Hashable = None) -> Node:
        """Where the sequences of a namespace begin. Nothing is shared between two of them."""
        return self._roots.get(namespace) or self._roots.setdefault(namespace, Root(namespace))

    def match(self, tokens: array[int], start: Node | None = None) -> Match:
        """Follow `tokens` down from the end of `start` (the common root by default) as far as whole pages go.

        A query: it changes nothing.
        """
        node = start or self.root()
        page, used, length = self.page_size, len(node), 0
        while length < len(tokens):
            child = node.children.get(tokens[length] if page == 1 else tokens[length : length + page].tobytes())
            if child is None:
                break
            common = common_prefix(child.tokens, tokens, length) // page * page
            node, used, length = child, common, length + common
            if common < len(child):
                break
        return Match(node, used, length)

    def evictable_on(self, found: Match) -> int:
        """How many slots of the path to `found` nothing keeps: what a lock on it would protect."""
        unkept = sum(len(node) for node in found.node.path() if node.kept_by == "evictable")
        return unkept - (len(found.node) - found.used) if found.node.kept_by == "evictable" else unkept

    def lock(self, found: Match, held: Node | None = None, priority: int = 0) -> Node:
        """Lock the path to `found`, splitting its node if it ends inside; returns the node that ends there.

        `held` is the node above it that the sequence has locked already, if any; its lock moves down.
        """
        node = self._end(found)
        self._clock += 1
        step: Node | None = node
        while step is not None and step is not held:
            self._leave(step)
            step.lock += 1
            step.hits += 1
            step.last_use = self._clock
            step.priority = max(step.priority, priority)
            self._enter(step)
            step = step.parent
        return node

    def unlock(self, node: Node, upto: Node | None = None) -> None:
        """Give up one lock on the path to `node`, up to but not on `upto`."""
        step: Node | None = node
        while step is not None and step is not upto:
            assert step.lock > 0, f"{step!r} is unlocked more often than locked"
            self._leave(step)
            step.lock -= 1
            self._enter(step)
            step = step.parent

    def truncate(self, node: Node, count: int) -> Node:
        """Move the end of the caller's sequence `count` tokens up its path, and its lock with it.

        What it leaves stays cached, or with those who share it. Returns the node where it ends now.
        """
        end = node
        while count >= len(end) and end.parent is not None:
            count, end = count - len(end), end.parent
        if count:
            end = self._split(end, len(end) - count)
        self.unlock(node, upto=end)
        return end

    def pin(self, found: Match) -> Node:
        """Keep the path to `found` from eviction until `unpin`; returns the node that ends there."""
        node = self._end(found)
        self._pin(node, 1)
        return node

    def unpin(self, node: Node) -> None:
        """Take back one pin."""
        self._pin(node, -1)

    def append(
        self, node: Node, tokens: array[int], tail: Node | None = None, *, drafts: int = 0
    ) -> tuple[Node, Node | None]:
        """Add `tokens` after the caller's `tail`, or after `node`, which it holds; returns its new node and tail.

        The leaf grows in place if only the caller uses it; otherwise a child opens. Slots come from
        the pool, by eviction if need be. Until `commit`, the tokens are fresh. The last `drafts` of them
        stay in the tail, whatever pages they fill, until `keep` says how many of them count.

        Raises:
            OutOfSlots: the pool and what can be evicted do not suffice; nothing has changed then.
        """
        assert node.lock and tokens, f"cannot append {_short(tokens)} to {node!r}"
        if self.page_size == 1 and not drafts:  # no tails; this is what every decoded token comes by
            self.reserve(len(tokens))
            slots = self.pool.allocate(len(tokens), after=node.slots[-1] if node.slots else None)
            return self._attach(node, tokens, slots, 0), None
        page, started = self.page_size, len(tail) if tail else 0
        total = started + len(tokens)
        whole = (total - drafts) // page * page
        count = -(-total // page) * page - (len(tail.slots) if tail else 0)
        last = tail.slots[-1] if tail else node.slots[-1] if node.slots else None
        slots = array("i")
        if count:
            self.reserve(count)
            slots = self.pool.allocate(count, after=last)
        if tail is not None:
            fresh_before, tokens, slots = tail.fresh, tail.tokens + tokens, tail.slots + slots
            self._forget_tail(tail)
            started -= fresh_before
        if whole:
            node = self._attach(node, tokens[:whole], slots[:whole], started)
        if whole == total:
            return node, None
        tail = Node(node, tokens[whole:], slots[whole:], self._clock)
        tail.fresh = total - max(whole, started)
        self._fresh.append(tail)
        self.held += len(tail.slots)
        return node, tail

    def keep(self, node: Node, tail: Node, count: int) -> tuple[Node, Node | None]:
        """The first `count` tokens of the caller's computed `tail` count, the others do not; returns node and tail.

        What fills pages joins the tree. If somebody was there first, the caller moves on to theirs, and its own
        slots are free again.
        """
        assert not tail.fresh and count <= len(tail), f"cannot keep {count} tokens of {tail!r}"
        self._forget_tail(tail)
        whole = count // self.page_size * self.page_size
        found = self.match(tail.tokens[:whole], node)
        if found.length:
            node = self.lock(found, node, node.priority)
        if found.length < whole:
            more = slice(found.length, whole)
            node = self._attach(node, tail.tokens[more], tail.slots[more], whole - found.length)
        end = -(-count // self.page_size) * self.page_size
        self.pool.free(tail.slots[: found.length] + tail.slots[end:])
        if whole == count:
            return node, None
        rest = Node(node, tail.tokens[whole:count], tail.slots[whole:end], self._clock)
        self.held += len(rest.slots)
        return node, rest

    def insert(self, node: Node, tokens: array[int], fill: Callable[[array[int]], None]) -> Node:
        """Add whole pages of `tokens` that need not be computed after `node`, which the caller holds.

        Args:
            fill: called with their slots, to put their keys and values there. If it raises, they are not added.

        Returns the caller's new node.

        Raises:
            OutOfSlots: as `append`.
        """
        assert node.lock and not node.fresh, f"cannot insert {_short(tokens)} after {node!r}"
        self.reserve(len(tokens))
        slots = self.pool.allocate(len(tokens), after=node.slots[-1] if node.slots else None)
        try:
            fill(slots)
        except BaseException:
            self.pool.free(slots)
            raise
        return self._attach(node, tokens, slots, len(tokens))

    def drop_tail(self, tail: Node) -> None:
        """Give the slots of a tail back."""
        self._forget_tail(tail)
        self.pool.free(tail.slots)

    def reserve(self, count: int) -> None:
        """Evict until `count` slots are free.

        Raises:
            OutOfSlots: not even evicting everything that nothing keeps would do; nothing has changed then.
        """
        free = self.pool.num_free
        if count > free + self.evictable:
            raise OutOfSlots(wanted=count, free=free, evictable=self.evictable)
        if count > free:
            together = max(self.pool.num_slots // 256, EVICTED_TOGETHER if self.on_evict else 0)
            self.evict(max(count - free, together))  # one slot at a time would come from everywhere, in no run

    def evict(self, count: int) -> int:
        """Give back `count` slots that nothing keeps, in whole pages, from the ends of leaves. Returns how many."""
        done = 0
        while done < count and self._leaves:
            order, _, leaf = heapq.heappop(self._leaves)
            if not self._is_next(leaf, order):
                continue
            pages = -(-(count - done) // self.page_size)
            parent, size = leaf.parent, min(len(leaf), pages * self.page_size)
            if self.on_evict is not None:
                self._announce(leaf, size, self.on_evict)
            self._cut(leaf, size)
            self.evictable -= size
            done += size
            self._offer(leaf if len(leaf) else parent)
        self.evicted += done
        return done

    def reset(self) -> int:
        """Evict everything that nothing keeps, without a word to `on_evict`; returns the number of slots given back."""
        on_evict, self.on_evict = self.on_evict, None
        try:
            return self.evict(self.evictable)
        finally:
            self.on_evict = on_evict

    def forget(self, node: Node, keep: int) -> None:
        """Give back what follows the first `keep` tokens of `node`, whole pages, and all below it, which nothing keeps.

        `on_evict` hears nothing of it.
        """
        below = [node]
        for upper in below:  # grows while it is walked
            below += upper.children.values()
        parent = node.parent
        for leaf in reversed(below):
            assert leaf.kept_by == "evictable", f"{leaf!r} is in use"
            size = len(leaf) - (keep if leaf is node else 0)
            self._cut(leaf, size)
            self.evictable -= size
        self._offer(node if len(node) else parent)

    def fresh_nodes(self) -> list[Node]:
        """The nodes and tails that hold fresh tokens, parents before children."""
        return sorted((node for node in self._fresh if node.fresh), key=lambda node: len(node.path()))

    def commit(self) -> None:
        """The step in progress succeeded: its tokens are computed. Chains that nothing branches off become one node."""
        for node in self._fresh:
            node.fresh = 0
        for node in self._fresh:
            self._absorb_parent(node)
        self._fresh.clear()

    def abandon(self) -> None:
        """The step in progress failed: remove its tokens. Who placed them must have let go of them before."""
        for node in reversed(self.fresh_nodes()):
            assert node.lock == 0 and not node.children, f"{node!r} is in use"
            size = -(-node.fresh // self.page_size) * self.page_size  # a page that is fresh in part goes whole
            node.fresh = 0
            self._cut(node, size)
            self.evictable -= size
        self._fresh.clear()

    def roots(self) -> list[Root]:
        """Where the sequences of each namespace begin, in order of age."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """All nodes but roots and tails, depth first, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()][::-1]
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
            assert node.parent.children[self._key(node.tokens)] is node, f"{node!r} hangs in the wrong place"
            assert 0 < len(node) == len(node.slots), f"{node!r} has no or too few slots"
            assert len(node) % self.page_size == 0, f"{node!r} does not fill its pages"
            assert 0 <= node.fresh <= len(node), f"{node!r} has {node.fresh} fresh tokens"
            assert node.lock >= sum(child.lock for child in node.children.values()), f"{node!r} has too few locks"
            assert node.pins >= sum(child.pins for child in node.children.values()), f"{node!r} has too few pins"
        counted = {"protected": self.protected, "pinned": self.pinned, "evictable": self.evictable}
        for state, count in counted.items():
            real = sum(len(node) for node in nodes if node.kept_by == state)
            assert real == count, f"{state}: counted {count}, in the tree {real}"
        slots = [slot for node in nodes for slot in node.slots]
        assert len(slots) == len(set(slots)), "a slot is in two places"
        assert self.pool.free_slots().isdisjoint(slots), "a free slot is in the tree"
        assert self.pool.num_free + len(slots) + self.held == self.pool.num_slots, "slots were lost"

    def render(self) -> str:
        """The tree as indented text, one node a line."""
        lines: list[str] = []
        for root in self._roots.values():
            lines.append("root" if root.namespace is None else f"root of {root.namespace!r}")
            lines += _lines(root, 1)
        return "\n".join(lines)

    def _key(self, tokens: array[int]) -> Key:
        return tokens[0] if self.page_size == 1 else tokens[: self.page_size].tobytes()

    def _end(self, found: Match) -> Node:
        return found.node if found.used == len(found.node) else self._split(found.node, found.used)

    def _leave(self, node: Node) -> None:
        """Take a node out of the count that it is in, before its locks or pins change."""
        if node.lock:
            self.protected -= len(node)
        elif node.pins:
            self.pinned -= len(node)
        else:
            self.evictable -= len(node)

    def _enter(self, node: Node) -> None:
        """Count a node where it belongs now."""
        if node.lock:
            self.protected += len(node)
        elif node.pins:
            self.pinned += len(node)
        else:
            self.evictable += len(node)
            self._offer(node)

    def _pin(self, node: Node, change: int) -> None:
        step: Node | None = node
        while step is not None:
            assert step.pins + change >= 0, f"{step!r} is unpinned more often than pinned"
            self._leave(step)
            step.pins += change
            self._enter(step)
            step = step.parent

    def _attach(self, node: Node, tokens: array[int], slots: array[int], started: int) -> Node:
        """Add whole pages after `node`, all fresh but the first `started` tokens; returns where they end."""
        if node.lock > 1 or node.children or node.sealed or node.parent is None or node.pins:
            assert self._key(tokens) not in node.children, f"{_short(tokens)} is below {node!r} already"
            self._clock += 1
            child = Node(node, tokens[:], slots, self._clock)
            child.lock, child.hits, child.priority = 1, 1, node.priority
            self._hang(child, node)
            node = child
        else:
            node.tokens.extend(tokens)
            node.slots.extend(slots)
        if node.fresh == 0 and started < len(tokens):
            self._fresh.append(node)
        node.fresh += len(tokens) - started
        self.protected += len(tokens)
        return node

    def _hang(self, child: Node, parent: Node) -> None:
        if not parent.children:
            parent.children = {}
        parent.children[self._key(child.tokens)] = child

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` in two; returns the new upper half. Who held `node` still holds the same end."""
        assert node.parent is not None and 0 < at < len(node), f"cannot split {node!r} at {at}"
        upper = Node(node.parent, node.tokens[:at], node.slots[:at], node.created)
        upper.lock, upper.pins, upper.hits = node.lock, node.pins, node.hits
        upper.last_use, upper.priority = node.last_use, node.priority
        upper.fresh = max(0, node.fresh - (len(node) - at))
        if upper.fresh:
            self._fresh.append(upper)
        node.fresh = min(node.fresh, len(node) - at)
        self._hang(upper, node.parent)
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        self._hang(node, upper)
        return upper

    def _absorb_parent(self, node: Node) -> None:
        """Join `node` with its parent if no sequence, pin, prompt or branch ends between them."""
        parent = node.parent
        if parent is None or parent.parent is None or parent.sealed or len(parent.children) != 1:
            return
        if parent.lock != node.lock or parent.pins != node.pins:
            return
        node.tokens, node.slots = parent.tokens + node.tokens, parent.slots + node.slots
        node.parent = parent.parent
        self._hang(node, node.parent)
        parent.parent = None

    def _announce(self, leaf: Node, size: int, on_evict: OnEvict) -> None:
        assert not leaf.fresh, f"{leaf!r} is evicted before it is computed"
        above, keep = leaf.path()[:-1], len(leaf) - size
        root = above[0].parent if above else leaf.parent
        assert isinstance(root, Root), f"{leaf!r} is below no root"
        before: array[int] = array("i")
        for node in above:
            before += node.tokens
        try:
            on_evict(root.namespace, before + leaf.tokens[:keep], leaf.tokens[keep:], leaf.slots[keep:])
        except Exception:
            log.exception("%d tokens are evicted and kept nowhere else", size)

    def _cut(self, leaf: Node, size: int) -> None:
        """Free the last `size` slots of a leaf; a leaf that becomes empty leaves the tree."""
        keep, parent = len(leaf) - size, leaf.parent
        self.pool.free(leaf.slots[keep:])
        if keep == 0 and parent is not None:
            del parent.children[self._key(leaf.tokens)]
            leaf.parent = None
            if isinstance(parent, Root) and not parent.children and not parent.lock:
                del self._roots[parent.namespace]
        del leaf.tokens[keep:], leaf.slots[keep:]
        leaf.sealed = False

    def _forget_tail(self, tail: Node) -> None:
        tail.parent, tail.fresh = None, 0
        self.held -= len(tail.slots)

    def _is_evictable_leaf(self, node: Node) -> bool:
        return not (node.lock or node.pins or node.children or node.parent is None)

    def _offer(self, node: Node | None) -> None:
        """Remember `node` for eviction, if it can be."""
        if node is not None and self._is_evictable_leaf(node):
            self._tie += 1
            heapq.heappush(self._leaves, (self._order(node), self._tie, node))
            if len(self._leaves) > self._most_leaves:
                true = {leaf: (order, tie, leaf) for order, tie, leaf in self._leaves if self._is_next(leaf, order)}
                self._leaves = list(true.values())
                heapq.heapify(self._leaves)
                self._most_leaves = 2 * len(self._leaves) + 1024

    def _is_next(self, leaf: Node, order: Any) -> bool:
        """Whether an entry of the heap is still true."""
        return self._is_evictable_leaf(leaf) and bool(self._order(leaf) == order)


def common_prefix(edge: array[int], tokens: array[int], start: int) -> int:
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


def _lines(node: Node, depth: int) -> Iterator[str]:
    stack = [(child, depth) for child in list(node.children.values())[::-1]]
    while stack:
        node, depth = stack.pop()
        yield "  " * depth + repr(node)
        stack += [(child, depth + 1) for child in list(node.children.values())[::-1]]


def _short(values: Sequence[int], limit: int = 8) -> str:
    """`values` on one line, the middle left out if there are many."""
    shown = list(values)
    return str(shown) if len(shown) <= limit else f"[{', '.join(map(str, shown[:3]))}, ... {len(shown)} in all]"

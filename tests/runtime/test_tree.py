"""The radix tree against a dictionary of prefixes, and the worked examples of the field."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from branchwise.runtime.errors import OutOfSlots
from branchwise.runtime.policies import EVICTION
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import Node, RadixTree


def put(tree: RadixTree, tokens: Sequence[int]) -> Node:
    """Compute a sequence: walk what is there, add the rest; it stays locked."""
    sequence = array("i", tokens)
    found = tree.match(sequence)
    node = tree.lock(found)
    if found.length < len(sequence):
        node, _ = tree.append(node, sequence[found.length :])
    tree.commit()
    return node


def cache(tree: RadixTree, tokens: Sequence[int]) -> list[int]:
    """Compute a sequence and let go of it; returns its slots."""
    node = put(tree, tokens)
    slots = slots_of(node)
    tree.unlock(node)
    return slots


def slots_of(node: Node) -> list[int]:
    return [slot for n in node.path() for slot in n.slots]


def hits(tree: RadixTree, tokens: Sequence[int]) -> int:
    return tree.match(array("i", tokens)).length


def shape(node: Node) -> object:
    """A node as nested tuples of tokens, children in order of their first token."""
    return (*node.tokens, *(shape(child) for _, child in sorted(node.children.items())))


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree(SlotPool(64))


def test_three_sequences_with_common_prefixes_take_their_textbook_shape(tree: RadixTree) -> None:
    a = cache(tree, [101, 11, 12, 21, 22])
    b = cache(tree, [101, 11, 12, 31, 32])
    cache(tree, [101, 11, 99])
    assert shape(tree.root()) == ((101, 11, (12, (21, 22), (31, 32)), (99,)),)
    assert slots_of(put(tree, [101, 11, 12, 21, 22])) == a
    assert slots_of(put(tree, [101, 11, 12, 31, 32])) == b
    assert a[:3] == b[:3]
    tree.check()


def test_suffixes_take_exactly_their_own_slots_and_go_first(tree: RadixTree) -> None:
    prefix = put(tree, [1, 2, 3, 4])
    assert (tree.protected, tree.evictable) == (4, 0)
    tree.unlock(prefix)
    assert (tree.protected, tree.evictable) == (0, 4)
    first = put(tree, [1, 2, 3, 4, 5, 6])
    second = put(tree, [1, 2, 3, 4, 7, 8, 9])
    assert (tree.protected, tree.pool.num_free) == (9, 55)
    tree.unlock(first)
    assert (tree.protected, tree.evictable) == (7, 2)
    assert tree.evict(2) == 2
    assert hits(tree, [1, 2, 3, 4, 5, 6]) == 4
    assert hits(tree, [1, 2, 3, 4, 7, 8, 9]) == 7
    tree.unlock(second)
    tree.check()


def test_a_match_changes_nothing(tree: RadixTree) -> None:
    cache(tree, [1, 2, 3, 4])
    before = tree.render()
    found = tree.match(array("i", [1, 2, 9]))
    assert (found.length, found.used) == (2, 2)
    assert tree.render() == before


def test_a_locked_prefix_survives_eviction(tree: RadixTree) -> None:
    cache(tree, [1, 2, 3, 4])
    holder = tree.lock(tree.match(array("i", [1, 2])))
    assert tree.evict(10) == 2
    assert hits(tree, [1, 2, 3, 4]) == 2
    tree.unlock(holder)
    assert tree.reset() == 2
    assert tree.pool.num_free == 64


def test_the_least_recently_used_leaf_goes_first_and_from_its_end(tree: RadixTree) -> None:
    cache(tree, [1, 2, 3])
    cache(tree, [4, 5, 6])
    cache(tree, [1, 2, 3])  # used again
    tree.evict(1)
    assert (hits(tree, [1, 2, 3]), hits(tree, [4, 5, 6])) == (3, 2)
    tree.evict(3)
    assert (hits(tree, [1, 2, 3]), hits(tree, [4, 5, 6])) == (2, 0)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "bcad"),
        ("mru", "dacb"),
        ("lfu", "bcda"),
        ("slru", "bcda"),
        ("fifo", "abcd"),
        ("filo", "dcba"),
        ("priority", "bcda"),
    ],
)
def test_each_eviction_policy_has_its_order(policy: str, order: str) -> None:
    tree = RadixTree(SlotPool(64), EVICTION[policy])
    leaves = {name: [10 * i, 10 * i + 1] for i, name in enumerate("abcd", 1)}
    for name, tokens in leaves.items():
        if name == "d":
            cache(tree, leaves["a"])  # used again, before the last one comes
        node = tree.lock(tree.match(array("i")), priority=0)
        node, _ = tree.append(node, array("i", tokens))
        tree.commit()
        tree.unlock(node)
    tree.unlock(tree.lock(tree.match(array("i", leaves["a"])), priority=3) if policy == "priority" else put(tree, [99]))
    gone = []
    while len(gone) < 4:
        tree.evict(1)
        gone += [name for name, tokens in leaves.items() if name not in gone and not hits(tree, tokens)]
    assert "".join(gone) == order


def test_a_leaf_that_two_use_opens_a_child_and_is_one_node_again_when_both_have_moved_on(tree: RadixTree) -> None:
    one = put(tree, [1, 2, 3])
    two = put(tree, [1, 2, 3])
    assert one is two
    one, _ = tree.append(one, array("i", [4]))
    assert one is not two
    found = tree.match(array("i", [4]), two)
    two = tree.lock(found, two)
    assert one is two and two.lock == 2
    tree.commit()
    assert shape(tree.root()) == ((1, 2, 3, 4),)
    tree.check()


def test_using_a_leaf_again_and_again_takes_no_memory(tree: RadixTree) -> None:
    cache(tree, [1, 2, 3])
    cache(tree, [1, 2, 4])
    for _ in range(5000):
        tree.unlock(tree.lock(tree.match(array("i", [1, 2, 3]))))
    assert len(tree._leaves) <= 1100
    tree.evict(1)
    assert (hits(tree, [1, 2, 3]), hits(tree, [1, 2, 4])) == (3, 2)


def test_what_follows_a_sealed_end_is_a_node_of_its_own(tree: RadixTree) -> None:
    prompt = put(tree, [1, 2, 3])
    prompt.sealed = True
    answer, _ = tree.append(prompt, array("i", [4]))
    tree.commit()
    assert tree.append(answer, array("i", [5])) == (answer, None)
    tree.commit()
    assert shape(tree.root()) == ((1, 2, 3, (4, 5)),)
    tree.unlock(answer)
    tree.evict(2)
    assert hits(tree, [1, 2, 3, 4, 5]) == 3


def test_the_tokens_of_a_failed_step_leave_no_trace(tree: RadixTree) -> None:
    cache(tree, [1, 2, 3, 4])
    before = tree.render()
    node, _ = tree.append(tree.lock(tree.match(array("i", [1, 2, 3, 4]))), array("i", [5, 6, 7]))
    other = tree.lock(tree.match(array("i", [1, 2, 3, 4, 5])))  # splits what is not computed yet
    other, _ = tree.append(other, array("i", [9]))
    tree.unlock(node)
    tree.unlock(other)
    tree.abandon()
    assert hits(tree, [1, 2, 3, 4, 5]) == 4
    assert tree.render() == before
    tree.check()


def test_asking_for_more_than_can_be_freed_changes_nothing(tree: RadixTree) -> None:
    held = put(tree, range(60))
    cache(tree, [100, 101])
    with pytest.raises(OutOfSlots, match="needs 5 slots, 2 are free and 2 evictable"):
        tree.append(held, array("i", [200] * 5))
    assert hits(tree, [100, 101]) == 2
    tree.check()


def test_a_tree_is_drawn_one_node_a_line(tree: RadixTree) -> None:
    cache(tree, [1, 2, 3])
    cache(tree, [1, 9])
    assert tree.render().splitlines() == [
        "root",
        "  [1] slots=[0] locks=0",
        "    [2, 3] slots=[1, 2] locks=0",
        f"    [9] slots={[tree.match(array('i', [1, 9])).node.slots[0]]} locks=0",
    ]


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


@dataclass(eq=False)
class Running:
    """A sequence that is being computed: its tokens, the node where its path ends, and its tail."""

    tokens: tuple[int, ...]
    node: Node
    tail: Node | None = None

    @property
    def path(self) -> tuple[int, ...]:
        return self.tokens[: len(self.tokens) - len(self.tail.tokens)] if self.tail else self.tokens


class RadixAgainstDict(RuleBasedStateMachine):
    """Sequences that are computed, grow, twin, move back, fail and end, in a pool too small for all of them."""

    @initialize(pages=st.integers(2, 24), page_size=st.sampled_from([1, 1, 2, 3]), policy=st.sampled_from([*EVICTION]))
    def start(self, pages: int, page_size: int, policy: str) -> None:
        self.page = page_size
        self.tree = RadixTree(SlotPool(pages * page_size, page_size), EVICTION[policy])
        self.slots_of: dict[tuple[int, ...], tuple[int, ...]] = {}  # cached whole prefix -> slots of its last page
        self.running: list[Running] = []
        self.pins: list[tuple[tuple[int, ...], Node]] = []

    def prefixes(self, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tokens[:end] for end in range(self.page, len(tokens) + 1, self.page)]

    def kept(self) -> set[tuple[int, ...]]:
        """What may not be evicted."""
        ends = [sequence.path for sequence in self.running] + [tokens for tokens, _ in self.pins]
        return {prefix for tokens in ends for prefix in self.prefixes(tokens)}

    def after_eviction(self) -> None:
        gone = [prefix for prefix in self.slots_of if hits(self.tree, prefix) < len(prefix)]
        assert self.kept().isdisjoint(gone)
        for prefix in gone:
            del self.slots_of[prefix]

    def pick(self, data: st.DataObject) -> Running:
        return data.draw(st.sampled_from(self.running))

    @rule(tokens=TOKENS)
    def begin(self, tokens: tuple[int, ...]) -> None:
        found = self.tree.match(array("i", tokens))
        assert found.length == self.page * len(list(takewhile(self.slots_of.__contains__, self.prefixes(tokens))))
        sequence = Running(tokens[: found.length], self.tree.lock(found))
        self.running.append(sequence)
        self.extend(sequence, tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=TOKENS)
    def grow(self, data: st.DataObject, more: tuple[int, ...]) -> None:
        sequence = self.pick(data)
        want = sequence.tokens + more
        self.walk(sequence, want)
        self.extend(sequence, want)

    def walk(self, sequence: Running, want: tuple[int, ...]) -> None:
        """Move along what the tree has of `want`, which begins with the sequence's own tokens."""
        done = len(sequence.path)
        found = self.tree.match(array("i", want[done:]), sequence.node)
        if found.length:
            if sequence.tail is not None:
                self.tree.drop_tail(sequence.tail)
                sequence.tail = None
            sequence.node = self.tree.lock(found, sequence.node)
            sequence.tokens = want[: done + found.length]

    def extend(self, sequence: Running, want: tuple[int, ...]) -> None:
        want = sequence.tokens + want[len(sequence.tokens) :]
        if self.place(sequence, want):
            self.tree.commit()
            tip = sequence.tail or sequence.node
            slots = [slot for n in tip.path() for slot in n.slots]
            for prefix in self.prefixes(sequence.path):
                page = tuple(slots[len(prefix) - self.page : len(prefix)])
                assert self.slots_of.setdefault(prefix, page) == page, "a written page moved"

    def place(self, sequence: Running, want: tuple[int, ...]) -> bool:
        more = array("i", want[len(sequence.tokens) :])
        if more:
            try:
                sequence.node, sequence.tail = self.tree.append(sequence.node, more, sequence.tail)
            except OutOfSlots:
                self.after_eviction()
                return False
        sequence.tokens = want
        self.after_eviction()
        return True

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=TOKENS)
    def fail(self, data: st.DataObject, more: tuple[int, ...]) -> None:
        """A step that does not succeed: whoever was in it loses its place."""
        sequence = self.pick(data)
        known, want = dict(self.slots_of), sequence.tokens + more
        self.walk(sequence, want)
        if self.place(sequence, want):
            self.let_go(sequence)
            self.tree.abandon()
            self.after_eviction()
        assert all(known[prefix] == page for prefix, page in self.slots_of.items())

    @precondition(lambda self: self.running)
    @rule(data=st.data(), guess=TOKENS, others=TOKENS)
    def draft(self, data: st.DataObject, guess: tuple[int, ...], others: tuple[int, ...]) -> None:
        """Tokens are computed on a guess, and while they may still be taken back, somebody may compute the same."""
        sequence = self.pick(data)
        try:
            sequence.node, sequence.tail = self.tree.append(
                sequence.node, array("i", guess), sequence.tail, drafts=len(guess)
            )
        except OutOfSlots:
            self.after_eviction()
            return
        self.after_eviction()
        self.tree.commit()
        assert sequence.tail is not None
        accepted = data.draw(st.integers(0, len(guess)))
        count = len(sequence.tail) - len(guess) + accepted
        if data.draw(st.booleans()):
            self.drafting = sequence
            self.begin(sequence.tokens + guess[:accepted] + others)
            self.drafting = None
        sequence.node, sequence.tail = self.tree.keep(sequence.node, sequence.tail, count)
        sequence.tokens += guess[:accepted]
        self.extend(sequence, sequence.tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.let_go(self.pick(data))

    def let_go(self, sequence: Running) -> None:
        self.running.remove(sequence)
        if sequence.tail is not None:
            self.tree.drop_tail(sequence.tail)
        self.tree.unlock(sequence.node)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), pages=st.integers(1, 4))
    def move_back(self, data: st.DataObject, pages: int) -> None:
        sequence = self.pick(data)
        if sequence.tail is None and pages * self.page <= len(sequence.tokens):
            sequence.node = self.tree.truncate(sequence.node, pages * self.page)
            sequence.tokens = sequence.tokens[: -pages * self.page]

    @rule(tokens=TOKENS)
    def pin(self, tokens: tuple[int, ...]) -> None:
        found = self.tree.match(array("i", tokens))
        self.pins.append((tokens[: found.length], self.tree.pin(found)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pinned)
        self.tree.unpin(pinned[1])

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        wanted = min(-(-count // self.page) * self.page, self.tree.evictable)
        assert self.tree.evict(count) == wanted
        self.after_eviction()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "tree"):
            return
        tree = self.tree
        tree.check()
        locked = {prefix for sequence in self.running for prefix in self.prefixes(sequence.path)}
        assert tree.protected == self.page * len(locked)
        assert tree.pinned == self.page * len(self.kept() - locked)
        assert tree.evictable == self.page * len(self.slots_of.keys() - self.kept())
        assert tree.held == self.page * sum(sequence.tail is not None for sequence in self.running)
        assert tree.pool.num_free + tree.evictable + tree.protected + tree.pinned + tree.held == tree.pool.num_slots


TestRadixAgainstDict = RadixAgainstDict.TestCase
TestRadixAgainstDict.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

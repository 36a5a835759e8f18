"""The radix tree against a dictionary of prefixes, and the worked examples of the field."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from branchwise.runtime.errors import OutOfSlots
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import Node, RadixTree


def put(tree: RadixTree, tokens: Sequence[int]) -> Node:
    """Compute a sequence: walk what is there, add the rest; it stays locked."""
    sequence = array("i", tokens)
    found = tree.match(sequence)
    node = tree.lock(found)
    if found.length < len(sequence):
        node = tree.append(node, sequence[found.length :])
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
    assert shape(tree.root) == ((101, 11, (12, (21, 22), (31, 32)), (99,)),)
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


def test_a_leaf_that_two_use_opens_a_child_and_is_one_node_again_when_both_have_moved_on(tree: RadixTree) -> None:
    one = put(tree, [1, 2, 3])
    two = put(tree, [1, 2, 3])
    assert one is two
    one = tree.append(one, array("i", [4]))
    assert one is not two
    found = tree.match(array("i", [4]), two)
    two = tree.lock(found, two)
    assert one is two and two.lock == 2
    tree.commit()
    assert shape(tree.root) == ((1, 2, 3, 4),)
    tree.check()


def test_what_follows_a_sealed_end_is_a_node_of_its_own(tree: RadixTree) -> None:
    prompt = put(tree, [1, 2, 3])
    prompt.sealed = True
    answer = tree.append(prompt, array("i", [4]))
    tree.commit()
    assert tree.append(answer, array("i", [5])) is answer
    tree.commit()
    assert shape(tree.root) == ((1, 2, 3, (4, 5)),)
    tree.unlock(answer)
    tree.evict(2)
    assert hits(tree, [1, 2, 3, 4, 5]) == 3


def test_the_tokens_of_a_failed_step_leave_no_trace(tree: RadixTree) -> None:
    cache(tree, [1, 2, 3, 4])
    before = tree.render()
    node = tree.append(tree.lock(tree.match(array("i", [1, 2, 3, 4]))), array("i", [5, 6, 7]))
    other = tree.lock(tree.match(array("i", [1, 2, 3, 4, 5])))  # splits what is not computed yet
    other = tree.append(other, array("i", [9]))
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


class RadixAgainstDict(RuleBasedStateMachine):
    """Sequences that are computed, grow, twin, fail and end, in a pool too small for all of them."""

    held = Bundle("held")

    @initialize(num_slots=st.integers(4, 40))
    def start(self, num_slots: int) -> None:
        self.tree = RadixTree(SlotPool(num_slots))
        self.slot_of: dict[tuple[int, ...], int] = {}  # every cached prefix -> the slot of its last token
        self.running: list[tuple[tuple[int, ...], Node]] = []

    def forget_evicted(self) -> None:
        """What is not in the tree any more must have been unlocked: leaves first, never a locked prefix."""
        locked = {t[:i] for t, _ in self.running for i in range(1, len(t) + 1)}
        gone = [p for p in self.slot_of if hits(self.tree, p) < len(p)]
        assert not locked.intersection(gone)
        for prefix in gone:
            del self.slot_of[prefix]

    @rule(target=held, tokens=TOKENS)
    def begin(self, tokens: tuple[int, ...]) -> object:
        found = self.tree.match(array("i", tokens))
        prefixes = (tokens[:end] for end in range(1, len(tokens) + 1))
        assert found.length == len(list(takewhile(self.slot_of.__contains__, prefixes)))
        return self._extend(self.tree.lock(found), tokens[: found.length], tokens)

    @rule(target=held, sequence=consumes(held), more=TOKENS)
    def grow(self, sequence: tuple[tuple[int, ...], Node], more: tuple[int, ...]) -> object:
        tokens, node = sequence
        self._forget(sequence)
        found = self.tree.match(array("i", more), node)
        return self._extend(self.tree.lock(found, node), tokens + more[: found.length], tokens + more)

    def _extend(self, node: Node, have: tuple[int, ...], want: tuple[int, ...]) -> object:
        self.running.append((have, node))
        try:
            longer = self.tree.append(node, array("i", want[len(have) :])) if len(have) < len(want) else node
        except OutOfSlots:
            self._forget((have, node))
            self.tree.unlock(node)
            self.forget_evicted()
            return multiple()
        self._forget((have, node))
        self.running.append((want, longer))
        self.tree.commit()
        self.forget_evicted()
        for end, slot in enumerate(slots_of(longer), 1):
            assert self.slot_of.setdefault(want[:end], slot) == slot, "a written slot moved"
        return (want, longer)

    def _forget(self, sequence: tuple[tuple[int, ...], Node]) -> None:
        self.running.remove(sequence)

    @rule(sequence=consumes(held), more=TOKENS)
    def fail(self, sequence: tuple[tuple[int, ...], Node], more: tuple[int, ...]) -> None:
        _, node = sequence
        self._forget(sequence)
        found = self.tree.match(array("i", more), node)
        node = self.tree.lock(found, node)
        try:
            if found.length < len(more):
                node = self.tree.append(node, array("i", more[found.length :]))
        except OutOfSlots:
            pass
        self.tree.unlock(node)
        self.tree.abandon()
        self.forget_evicted()

    @rule(sequence=consumes(held))
    def end(self, sequence: tuple[tuple[int, ...], Node]) -> None:
        self._forget(sequence)
        self.tree.unlock(sequence[1])

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        could = min(count, self.tree.evictable)
        assert self.tree.evict(count) == could
        self.forget_evicted()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check()
            assert len(self.slot_of) == self.tree.evictable + self.tree.protected
            assert self.tree.protected == len({t[:i] for t, _ in self.running for i in range(1, len(t) + 1)})


TestRadixAgainstDict = RadixAgainstDict.TestCase

"""Who is sent back: compared with trying every set of requests."""

from __future__ import annotations

from array import array
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from branchwise.runtime.request import Request
from branchwise.runtime.retraction import choose
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import RadixTree

PATHS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=6)


def running(tree: RadixTree, tokens: list[int], priority: int = 0) -> Request:
    """A request that is computed up to its last token."""
    found = tree.match(array("i", tokens))
    request = Request(tokens=array("i", tokens), num_prompt=len(tokens), on_done=lambda _: None, priority=priority)
    request.node = tree.lock(found)
    if found.length < len(tokens):
        request.node, request.tail = tree.append(request.node, request.tokens[found.length :])
        tree.commit()
    request.computed = len(tokens)
    return request


def freed(requests: list[Request], chosen: list[Request]) -> int:
    """How many tokens only `chosen` hold, counted as prefixes."""

    def prefixes(those: list[Request]) -> set[tuple[int, ...]]:
        return {tuple(r.tokens[:end]) for r in those for end in range(1, len(r.tokens) + 1)}

    return len(prefixes(requests)) - len(prefixes([r for r in requests if r not in chosen]))


@given(paths=PATHS, kept=st.integers(0, 2), missing=st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_no_branch_of_the_tree_frees_enough_at_a_lower_price(paths: list[list[int]], kept: int, missing: int) -> None:
    tree = RadixTree(SlotPool(64))
    requests = [running(tree, path) for path in paths]
    candidates = requests[kept:]
    chosen = choose(candidates, missing)
    assert bool(chosen) == bool(candidates)
    # Everybody below a place of the tree, if they are all candidates: the sets that it chooses from.
    below = [
        [r for r in requests if list(r.tokens[:end]) == path[:end]] for path in paths for end in range(1, len(path) + 1)
    ]
    possible = [group for group in below if all(r in candidates for r in group)]
    prices = [freed(requests, group) for group in possible]
    if any(price >= missing for price in prices):
        assert freed(requests, chosen) == min(price for price in prices if price >= missing)
    elif candidates:
        assert freed(requests, chosen) == max(prices, default=0)
    # What it frees is given back.
    before = tree.evictable
    for request in chosen:
        assert request.node is not None
        tree.unlock(request.node)
    assert tree.evictable - before == freed(requests, chosen)
    tree.check()


def test_no_set_of_requests_is_cheaper_for_one_slot() -> None:
    tree = RadixTree(SlotPool(200))
    twins = [running(tree, [1] * 30) for _ in range(3)]
    fork = [running(tree, [2] * 20 + [i] * 2) for i in range(2)]
    requests = [*twins, *fork, running(tree, [3] * 25)]
    chosen = choose(requests, 1)
    assert chosen == [fork[1]]
    sets = [list(some) for size in range(1, 7) for some in combinations(requests, size)]
    assert freed(requests, chosen) == min(price for some in sets if (price := freed(requests, some)) >= 1)
    assert choose(requests, 3) == fork
    assert choose([*twins, requests[-1]], 26) == twins


def test_the_lowest_priority_goes_first_whatever_it_costs() -> None:
    tree = RadixTree(SlotPool(200))
    dear, cheap = running(tree, [1] * 50), running(tree, [2] * 5, priority=1)
    assert choose([dear, cheap], 1) == [dear]


def test_what_is_pinned_is_not_freed() -> None:
    tree = RadixTree(SlotPool(200))
    pinned, other = running(tree, [1] * 5), running(tree, [2] * 40)
    tree.pin(tree.match(array("i", [1] * 5)))
    assert choose([pinned, other], 1) == [other]

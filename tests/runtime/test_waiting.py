"""Who is admitted next: the orders by name, their bound on waiting, and their cost."""

from __future__ import annotations

import itertools
import random
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

from branchwise.runtime.policies import SCHEDULING, AdmissionOrder, Candidate
from branchwise.runtime.request import Request
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import Match, Node, RadixTree
from branchwise.runtime.waiting import NEIGHBOURS, PATIENCE, Waiting

from .simulation import Simulation


class CountingTree(RadixTree):
    """Counts how often it is asked for a prefix."""

    matches = 0

    def match(self, tokens: array[int], start: Node | None = None) -> Match:
        self.matches += 1
        return super().match(tokens, start)


@pytest.fixture
def tree() -> CountingTree:
    return CountingTree(SlotPool(4096))


def cache(tree: RadixTree, tokens: Sequence[int], namespace: Hashable = None) -> None:
    sequence = array("i", tokens)
    found = tree.match(sequence, tree.root(namespace))
    node = tree.lock(found)
    if found.length < len(sequence):
        node, _ = tree.append(node, sequence[found.length :])
    tree.commit()
    tree.unlock(node)


def request(
    tokens: Sequence[int],
    *,
    max_tokens: int = 1,
    priority: int = 0,
    routing_key: str | None = None,
    namespace: Hashable = None,
) -> Request:
    return Request(
        tokens=array("i", tokens),
        num_prompt=len(tokens),
        on_done=lambda _: None,
        max_tokens=max_tokens,
        priority=priority,
        routing_key=routing_key,
        namespace=namespace,
    )


def queue(tree: RadixTree, policy: str | AdmissionOrder, requests: Sequence[Request]) -> Waiting:
    waiting = Waiting(tree, policy)
    waiting.begin_step(Counter())
    for one in requests:
        waiting.add(one)
    return waiting


def order(waiting: Waiting, requests: Sequence[Request], running: Sequence[str] = ()) -> list[int]:
    """The order in which all are admitted, as indices, if every prompt is computed when it is."""
    admitted = []
    waiting.begin_step(Counter(running))
    while waiting:
        chosen = waiting.next()
        waiting.admitted(chosen)
        cache(waiting._tree, chosen.tokens, chosen.namespace)
        waiting.grew(chosen)
        admitted.append(list(requests).index(chosen))
    return admitted


# ------------------------------------------------------------------------------------------------------------ orders


def test_fcfs_is_by_arrival(tree: RadixTree) -> None:
    requests = [request([i]) for i in (3, 1, 2)]
    assert order(queue(tree, "fcfs", requests), requests) == [0, 1, 2]


def test_lpm_takes_the_longest_cached_prefix_first(tree: RadixTree) -> None:
    cache(tree, [1, 2, 3, 4])
    requests = [request([9, 9]), request([1, 2, 8]), request([1, 2, 3, 4, 8]), request([1, 8])]
    assert order(queue(tree, "lpm", requests), requests) == [2, 1, 3, 0]


def test_lpm_follows_what_was_computed_since(tree: RadixTree) -> None:
    requests = [request([1, 2, 3]), request([7, 7]), request([8, 8]), request([1, 2, 4]), request([1, 2, 4, 5])]
    assert order(queue(tree, "lpm", requests), requests) == [0, 3, 4, 1, 2]


def test_lpm_forgets_what_was_evicted(tree: RadixTree) -> None:
    cache(tree, [1, 2, 3, 4])
    cache(tree, [5, 6])
    requests = [request([5, 6, 0]), request([1, 2, 3, 4, 0])]
    waiting = queue(tree, "lpm", requests)
    tree.evict(3)  # the oldest leaf, from its end: [1] is left
    assert order(waiting, requests) == [0, 1]


def test_dfs_weight_opens_what_most_of_those_that_wait_begin_with(tree: RadixTree) -> None:
    cache(tree, [0])
    requests = [request([0, *tokens]) for tokens in ([1, 1], [2, 1], [3, 1], [2, 2], [2, 3], [3, 2])]
    assert [requests[i].tokens[1] for i in order(queue(tree, "dfs-weight", requests), requests)] == [2, 2, 2, 3, 3, 1]


def test_dfs_weight_finishes_what_it_has_begun(tree: RadixTree) -> None:
    requests = [request([1, 1, i]) for i in range(2)] + [request([2, i]) for i in range(3)]
    waiting = queue(tree, "dfs-weight", requests)
    cache(tree, [1, 1, 9])
    waiting.grew(request([1, 1, 9]))
    assert order(waiting, requests)[:2] == [0, 1]


def test_lof_takes_the_longest_output_first(tree: RadixTree) -> None:
    requests = [request([1], max_tokens=n) for n in (5, 50, 20)]
    assert order(queue(tree, "lof", requests), requests) == [1, 2, 0]


def test_sjf_takes_those_with_the_fewest_tokens_to_compute_first(tree: RadixTree) -> None:
    cache(tree, range(100, 120))
    requests = [request([1] * 10), request([*range(100, 120), 1, 2]), request([2] * 5)]
    assert order(queue(tree, "sjf", requests), requests) == [1, 2, 0]


def test_hrrn_prefers_short_ones_until_long_ones_have_waited_in_proportion(tree: RadixTree) -> None:
    long = request([1] * 40)
    waiting = queue(tree, "hrrn", [long])
    for _ in range(8):
        waiting.begin_step(Counter())
    short = request([2] * 4)
    waiting.add(short)
    waiting.begin_step(Counter())  # 9 / 40 against 1 / 4
    assert waiting.next() is short
    for _ in range(8):
        waiting.begin_step(Counter())
    later = request([3] * 4)
    waiting.remove(short)
    waiting.add(later)
    waiting.begin_step(Counter())  # 18 / 40 against 1 / 4
    assert waiting.next() is long


def test_routing_key_keeps_requests_of_one_key_together(tree: RadixTree) -> None:
    requests = [request([i], routing_key=key) for i, key in enumerate(["a", None, "b", "c", "b", "a"])]
    assert order(queue(tree, "routing-key", requests), requests, ["b", "b", "a"]) == [2, 4, 0, 5, 1, 3]


def test_random_is_in_no_order_but_always_the_same(tree: RadixTree) -> None:
    requests = [request([i]) for i in range(20)]
    first, again = (order(queue(tree, "random", requests), requests) for _ in range(2))
    assert first == again != list(range(20))
    assert sorted(first) == list(range(20))


@pytest.mark.parametrize("policy", SCHEDULING)
def test_priorities_come_before_every_order(tree: RadixTree, policy: str) -> None:
    cache(tree, [1, 2, 3])
    requests = [request([1, 2, 3, i], max_tokens=9 - i, priority=p) for i, p in enumerate([0, 1, -1, 2])]
    assert order(queue(tree, policy, requests), requests) == [3, 1, 0, 2]


def test_an_order_may_be_a_function_of_the_users(tree: RadixTree) -> None:
    cache(tree, [1, 2])
    requests = [request([1, 2, 3]), request([4] * 5), request([1, 2, 5, 6])]

    def most_work_first(candidate: Candidate) -> int:
        return -candidate.missing

    assert order(queue(tree, most_work_first, requests), requests) == [1, 2, 0]


def test_a_function_that_never_says_the_same_twice_still_admits_everyone(tree: RadixTree) -> None:
    rng = random.Random(0)
    requests = [request([i % 3, i]) for i in range(30)]
    assert sorted(order(queue(tree, lambda _: rng.random(), requests), requests)) == list(range(30))


def test_equal_tokens_in_two_namespaces_are_not_alike(tree: RadixTree) -> None:
    cache(tree, [1, 2, 3], "theirs")
    requests = [request([1, 2, 3]), request([1, 2, 3], namespace="theirs")]
    assert order(queue(tree, "lpm", requests), requests) == [1, 0]


# ------------------------------------------------------------------------------------------------------------ ageing

HOT = range(100, 140)


def hot_first(candidate: Candidate) -> bool:
    return candidate.request.routing_key != "hot"


@pytest.mark.parametrize("policy", [*SCHEDULING, hot_first], ids=lambda p: p if isinstance(p, str) else p.__name__)
def test_a_cold_request_starts_within_its_bound_whoever_else_comes(policy: str | AdmissionOrder) -> None:
    """Six that every order likes better are always there; two run at a time."""
    sim = Simulation(max_running=2, policy=policy)
    lengths = itertools.chain([1000], itertools.repeat(3))  # one of them runs all the time

    def add_hot() -> None:
        sim.submit(sim.request([*HOT, len(sim.admitted) % 7, 1], next(lengths), routing_key="hot"))

    add_hot()
    sim.step()
    for _ in range(4):
        add_hot()
    sim.step()
    older = len(sim.scheduler.waiting)
    cold = sim.request([1] * 50, 1)
    sim.submit(cold)
    before = len(sim.admitted)
    while cold not in sim.admitted:
        while len(sim.scheduler.waiting) < 7:
            add_hot()
        assert sim.step()
    overtaken = list(sim.admitted).index(cold) - before
    assert overtaken + 1 <= (older + 1) * (PATIENCE + 1)
    if policy not in ("fcfs", "random", "hrrn"):
        assert overtaken >= PATIENCE, "this order was to be tempted"


def test_the_bound_counts_admissions_exactly(tree: RadixTree) -> None:
    """The worst order there is, the youngest first: each of the oldest is overtaken PATIENCE times."""
    oldest = [request([i]) for i in range(3)]
    waiting = queue(tree, lambda candidate: -candidate.request.id, oldest)
    admitted: list[Request] = []
    for _ in range(3 * (PATIENCE + 1)):
        waiting.add(request([9]))
        waiting.begin_step(Counter())
        admitted.append(waiting.next())
        waiting.admitted(admitted[-1])
    assert [admitted.index(one) + 1 for one in oldest] == [PATIENCE + 1, 2 * (PATIENCE + 1), 3 * (PATIENCE + 1)]


# -------------------------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "sjf"])
def test_admitting_one_of_ten_thousand_looks_at_few(tree: CountingTree, policy: str) -> None:
    rng = random.Random(0)
    prefixes = [[rng.randrange(100) for _ in range(rng.randint(1, 8))] for _ in range(200)]
    requests = [request([*rng.choice(prefixes), *(rng.randrange(4) for _ in range(4))]) for _ in range(10_000)]
    waiting = queue(tree, policy, requests)
    most = 0
    tree.matches = 0
    for _ in range(300):
        before = tree.matches
        waiting.begin_step(Counter())
        chosen = waiting.next()
        waiting.admitted(chosen)
        cache(tree, chosen.tokens)
        waiting.grew(chosen)
        most = max(most, tree.matches - before)
        if tree.pool.num_free < 100:
            tree.evict(500)
    assert most <= 4 * NEIGHBOURS
    assert tree.matches <= 300 * 40


@pytest.mark.parametrize("policy", [*SCHEDULING])
def test_a_queue_that_is_never_empty_keeps_nothing_of_those_that_left(tree: RadixTree, policy: str) -> None:
    waiting = Waiting(tree, policy)
    waiting.add(request([5] * 50, priority=-1))  # always last
    for i in range(2000):
        waiting.add(request([i % 3, i % 5, i % 7]))
        waiting.begin_step(Counter())
        chosen = waiting.next()
        waiting.admitted(chosen)
        cache(tree, chosen.tokens)
        waiting.grew(chosen)
    kept = [value for value in vars(waiting).values() if isinstance(value, list | dict)]
    assert max(map(len, kept)) < 100


# ---------------------------------------------------------------------------------------------------- the best order


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_best_hits_of_a_batch_are_what_its_prompts_share(page_size: int) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(1, 20))] for _ in range(60)]
    waiting = Waiting(RadixTree(SlotPool(4096, page_size)), "fcfs")
    requests = [request(prompt) for prompt in prompts]
    for one in requests:
        waiting.add(one)
    known: set[tuple[int, ...]] = set()
    best = 0
    for prompt in prompts:
        pages = [tuple(prompt[:end]) for end in range(page_size, len(prompt), page_size)]  # never the last token
        best += page_size * sum(page in known for page in pages)
        known.update(tuple(prompt[:end]) for end in range(page_size, len(prompt) + 1, page_size))
    assert sum(one.best_hit or 0 for one in requests) == best
    assert best > 0


def test_no_order_finds_more_than_the_best_and_a_good_one_finds_nearly_that() -> None:
    hits = {}
    for policy in ("fcfs", "dfs-weight"):
        sim = Simulation(150, max_running=1, policy=policy)
        requests = [sim.request([group] * 40 + [group, i]) for i in range(8) for group in range(10)]
        sim.submit(*requests)
        sim.run()
        best = sum(one.best_hit or 0 for one in requests)
        assert best == 41 * 70
        hits[policy] = sum(one.hit_len or 0 for one in requests) / best
    assert hits["fcfs"] < 0.3
    assert 0.9 < hits["dfs-weight"] <= 1

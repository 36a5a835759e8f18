"""The scheduler without a model: sharing, chunks, retraction, and every interleaving of them."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from branchwise.runtime.policies import EVICTION, SCHEDULING, AdmissionOrder, Candidate
from branchwise.runtime.request import Request
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import RadixTree

from .simulation import Drafter, Sampler, Simulation, alone


def by_whim(candidate: Candidate) -> tuple[int, int]:
    """An order as a user may write one: it changes with the tree, with time and with who runs."""
    return candidate.hit_len % 2, (candidate.waited * 7 + candidate.same_key) % 3


POLICIES: list[str | AdmissionOrder] = [*SCHEDULING, by_whim]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p if isinstance(p, str) else p.__name__)


# -------------------------------------------------------------------------------------------------- sharing, counted

PREFIX = range(1000, 2000)


@every_policy
def test_requests_that_arrive_together_compute_their_prefix_once_and_in_one_step(policy: str | AdmissionOrder) -> None:
    sim = Simulation(policy=policy)
    sim.submit(*(sim.request([*PREFIX, i, i, i]) for i in range(64)))
    sim.run()
    assert [(step.rows, step.computed) for step in sim.steps] == [(1000 + 64 * 3, 1000 + 64 * 3)]
    assert len(sim.steps[0].placed) == 64


@every_policy
def test_a_prefix_that_is_split_over_chunks_is_computed_once(policy: str | AdmissionOrder) -> None:
    sim = Simulation(policy=policy, max_step_tokens=96)
    sim.submit(*(sim.request([*PREFIX, i, i, i]) for i in range(64)))
    sim.run()
    assert sim.computed == 1000 + 64 * 3
    assert max(step.rows for step in sim.steps) <= 96


@pytest.mark.parametrize("page_size", [3, 16])
def test_whole_pages_of_a_common_prefix_are_computed_once(page_size: int) -> None:
    sim = Simulation(4096 // page_size * page_size, page_size=page_size)
    sim.submit(*(sim.request([*PREFIX, i, i, i]) for i in range(64)))
    sim.run()
    shared = 1000 // page_size * page_size
    assert (len(sim.steps), sim.computed) == (1, shared + 64 * (1003 - shared))


def test_greedy_forks_compute_as_many_rows_as_one() -> None:
    rows = []
    for count in (1, 8):
        sim = Simulation()
        sim.submit(*(sim.request([1, 2, 3, 4], 20) for _ in range(count)))
        sim.run()
        rows.append([step.rows for step in sim.steps])
    assert rows[0] == rows[1] == [4] + [1] * 19


@pytest.mark.parametrize("agree", [4, 7, 13])
def test_samples_share_slots_as_long_as_they_agree(agree: int) -> None:
    sim = Simulation()
    samplers = [Sampler(vocab=10**9, sample=i, agree=agree) for i in range(8)]
    sim.submit(*(sim.request([1, 2, 3, 4], 20, sampler=sampler) for sampler in samplers))
    sim.run()
    last = 4 + 20 - 1  # the newest token is not computed
    assert sim.computed == agree + 8 * (last - agree)
    assert sim.tree.evictable == sim.computed


def test_a_branch_one_step_behind_another_walks_its_path() -> None:
    sim = Simulation()
    first, second = sim.request([1, 2, 3, 4], 10), sim.request([1, 2, 3, 4], 10)
    sim.submit(first)
    sim.step()
    sim.step()
    sim.submit(second)
    sim.run()
    assert first.tokens == second.tokens
    assert sim.computed == 4 + 9


def test_a_branch_is_served_what_another_generated_before() -> None:
    sim = Simulation()
    first = sim.request([1, 2, 3], 10)
    sim.submit(first)
    sim.run()
    before = sim.computed
    again, longer = sim.request([1, 2, 3], 10), sim.request([*first.tokens, 9, 9], 1)
    sim.submit(again, longer)
    sim.run()
    assert again.tokens == first.tokens
    assert sim.computed == before + 3  # the newest token of the first, and two more
    assert longer.hit_len == 12


# ------------------------------------------------------------------------------------------------- budget and chunks


def test_those_that_decode_take_part_in_every_step_while_a_long_prompt_is_computed() -> None:
    sim = Simulation(max_step_tokens=16)
    decoding = [sim.request([i], 40, sampler=Sampler(sample=i)) for i in range(4)]
    sim.submit(*decoding)
    sim.step()
    sim.submit(sim.request(range(100, 300)))
    while all(not request.finished for request in decoding):
        sim.step()
    assert all(set(decoding) <= set(step.placed) for step in sim.steps)
    assert max(step.rows for step in sim.steps) <= 16
    assert sim.computed > 4 * 40 + 150


def test_a_text_is_scored_in_chunks_also_when_it_is_cached() -> None:
    sim = Simulation(max_step_tokens=8)
    sim.submit(sim.request(range(100, 150)))
    sim.run()
    del sim.steps[:]
    scored = [sim.request(range(100, 160), 0, scoring=True, logprobs_from=1 + i) for i in range(3)]
    sim.submit(*scored)
    sim.run()
    assert [len(request.logprobs) for request in scored] == [59, 58, 57]
    assert max(step.rows for step in sim.steps) <= 8
    assert sim.computed == 9


# ------------------------------------------------------------------------------------------------- when slots run out


def crowd(sim: Simulation) -> Simulation:
    """Let it admit whoever's prompt fits, so that it runs out of slots."""
    sim.scheduler._still_needed = lambda: 0.0  # type: ignore[method-assign]
    return sim


def until_one_is_sent_back(sim: Simulation) -> None:
    while not sim.scheduler.num_retracted:
        assert sim.step()
    assert sim.scheduler.num_retracted == 1


def test_the_cheapest_to_compute_again_is_sent_back_and_goes_on_to_the_token() -> None:
    sim = crowd(Simulation(64))
    oldest = sim.request([1] * 20, 40, sampler=Sampler(sample=1))
    long = sim.request([2] * 20, 20, sampler=Sampler(sample=2))
    short = sim.request([3] * 10, 20, sampler=Sampler(sample=0))
    sim.submit(oldest, long, short)
    until_one_is_sent_back(sim)
    assert short.node is None and long.node is not None and oldest.node is not None
    sim.run()
    for request, sample in ((oldest, 1), (long, 2), (short, 0)):
        prompt = request.tokens[: request.num_prompt]
        assert list(request.tokens) == [*prompt, *alone(prompt, request.max_tokens, Sampler(sample=sample))]


def test_the_oldest_is_not_sent_back_for_a_younger_one() -> None:
    sim = crowd(Simulation(68, max_step_tokens=8))
    oldest = sim.request(range(100, 160), 5)
    younger = sim.request([1] * 4, 60)
    sim.submit(younger)  # it decodes, and so takes its slot first in each step
    sim.step()
    sim.submit(oldest)
    until_one_is_sent_back(sim)
    assert younger.node is None and oldest.computed == 60
    sim.run()
    assert list(younger.tokens[4:]) == alone([1] * 4, 60)


def test_what_branches_share_does_not_make_them_dear() -> None:
    sim = crowd(Simulation(94))  # all four decode, and the oldest finds it full
    oldest = sim.request([1] * 10, 60)
    fork = [sim.request([2] * 40, 20, sampler=Sampler(sample=i, vocab=1000)) for i in range(2)]
    other = sim.request([3] * 20, 20)
    sim.submit(oldest, *fork, other)
    until_one_is_sent_back(sim)
    assert fork[1].node is None and fork[0].node is not None and other.node is not None
    sim.run()


def test_the_lowest_priority_is_sent_back_first() -> None:
    sim = crowd(Simulation(64))
    oldest = sim.request([1] * 20, 40, priority=2)
    low = sim.request([2] * 18, 20, priority=0)
    high = sim.request([3] * 4, 20, priority=1)
    sim.submit(oldest, low, high)
    until_one_is_sent_back(sim)
    assert low.node is None and high.node is not None
    sim.run()


def test_twins_are_not_sent_back_in_vain() -> None:
    sim = crowd(Simulation(48))
    oldest = sim.request([1] * 10, 30)
    twins = [sim.request([2] * 10, 20) for _ in range(2)]
    other = sim.request([3] * 12, 20)
    sim.submit(oldest, *twins, other)
    until_one_is_sent_back(sim)
    assert other.node is None and all(twin.node is not None for twin in twins)
    sim.run()


def test_twins_go_together_when_nobody_else_can() -> None:
    sim = crowd(Simulation(40))
    oldest = sim.request([1] * 10, 25)
    twins = [sim.request([2] * 10, 20) for _ in range(2)]
    sim.submit(oldest, *twins)
    while not sim.scheduler.num_retracted:
        assert sim.step()
    assert [twin.node for twin in twins] == [None, None]
    sim.run()
    assert all(list(twin.tokens[10:]) == alone([2] * 10, 20) for twin in twins)


def test_branches_are_sent_back_together_if_that_is_cheaper_than_who_stands_alone() -> None:
    sim = crowd(Simulation(60))
    oldest = sim.request([1] * 10, 30)
    twins = [sim.request([2] * 10, 20) for _ in range(3)]
    other = sim.request([3] * 28, 20)
    sim.submit(oldest, *twins, other)
    while not sim.scheduler.num_retracted:
        assert sim.step()
    assert [twin.node for twin in twins] == [None] * 3
    assert other.node is not None
    assert sim.scheduler.num_retracted == 3
    sim.run()
    assert list(other.tokens[28:]) == alone([3] * 28, 20)


def test_one_that_is_alone_and_fills_the_pool_ends_with_what_it_has() -> None:
    sim = Simulation(32)
    request = sim.request([1] * 10, 100)
    sim.submit(request)
    sim.run()
    assert sim.stuck == [request]
    assert list(request.tokens[10:]) == alone([1] * 10, 23)
    sim.check()


# --------------------------------------------------------------------------------------------------- orders of a user


@pytest.mark.parametrize("wrong", [lambda _: 1 / 0, lambda _: None, lambda c: ("a", 1) if c.request.id % 2 else 1])
def test_an_admission_order_that_fails_is_told_once_and_holds_up_nobody(
    wrong: AdmissionOrder, caplog: pytest.LogCaptureFixture
) -> None:
    sim = Simulation(max_running=1, policy=wrong)
    sim.submit(*(sim.request([i] * 5, 3) for i in range(4)))
    sim.run()
    assert len(sim.admitted) == 4
    assert len(caplog.records) == 1
    assert "admission order" in caplog.text


def test_an_eviction_order_that_fails_is_told_once_and_the_least_recently_used_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = RadixTree(SlotPool(20), order=lambda _: 1 / 0)
    for i in range(10):
        node = tree.lock(tree.match(array("i", [i] * 4)))
        node, _ = tree.append(node, array("i", [i] * 4))
        tree.commit()
        tree.unlock(node)
        tree.check()
    assert tree.match(array("i", [9] * 4)).length == 4
    assert tree.match(array("i", [4] * 4)).length == 0
    assert len(caplog.records) == 1


# ------------------------------------------------------------------------------------------------------------- aborts


def test_a_waiting_request_can_be_taken_back() -> None:
    sim = Simulation(max_running=1)
    first, second, third = (sim.request([i] * 5, 5) for i in range(3))
    sim.submit(first, second, third)
    sim.step()
    sim.cancel(second)
    sim.run()
    assert list(sim.admitted) == [first, third]


def test_a_prompt_that_is_half_computed_can_be_taken_back_and_stays_cached() -> None:
    sim = Simulation(max_step_tokens=16)
    first = sim.request(range(100), 5)
    sim.submit(first)
    sim.step()
    sim.step()
    sim.cancel(first)
    sim.check()
    assert sim.tree.evictable == 32
    again = sim.request(range(100), 5)
    sim.submit(again)
    sim.run()
    assert (again.hit_len, sim.computed) == (32, 104)


def test_a_failed_step_is_repeated_to_the_same_end() -> None:
    sim = Simulation(max_step_tokens=16)
    requests = [sim.request([7] * 20 + [i], 5) for i in range(4)]
    sim.submit(*requests)
    for fail in (True, False, True, False, False, True):
        sim.step(fail=fail)
        sim.check()
    sim.run()
    for request in requests:
        prompt = request.tokens[:21]
        assert list(request.tokens[21:]) == alone(prompt, 5)


@pytest.mark.parametrize("page_size", [1, 16])
def test_right_drafts_need_no_steps_of_their_own_and_wrong_ones_leave_nothing(page_size: int) -> None:
    sim = Simulation(page_size=page_size)
    right = sim.request(range(40), 20, drafter=Drafter(length=4, right=1000))
    wrong = sim.request(range(40, 80), 6, drafter=Drafter(length=1, right=1))
    sim.submit(right, wrong)
    sim.step()
    assert len(right.tokens) == 45  # one sampled, four accepted
    sim.check()
    sim.run()
    assert list(right.tokens[40:]) == alone(range(40), 20)
    assert list(wrong.tokens[40:]) == alone(range(40, 80), 6)
    assert sim.accepted == 16
    assert len(sim.steps) == 6
    again = sim.request(right.tokens, 1)
    sim.submit(again)
    sim.run()
    assert again.hit_len == (59 if page_size == 1 else 48)  # what the last step accepted is there, too


def test_a_draft_waits_until_the_last_chunk_of_its_prompt() -> None:
    sim = Simulation(max_step_tokens=5)
    request = sim.request(range(8), 3, drafter=Drafter(length=2, right=1000))
    sim.submit(request)
    sim.step()
    assert (request.drafted, len(request.draft)) == (0, 2)
    sim.step()
    assert request.finished
    assert sim.accepted == 2


def test_a_draft_is_cut_to_the_budget_and_takes_no_slot_from_others() -> None:
    sim = Simulation(20, max_step_tokens=3)
    request = sim.request([1, 2], 12, drafter=Drafter(length=9, right=1000))
    sim.submit(request)
    sim.run()
    assert list(request.tokens[2:]) == alone([1, 2], 12)
    assert max(step.rows for step in sim.steps) == 3
    full = Simulation(12)
    first, second = (full.request([i] * 4, 3, drafter=Drafter(length=9, right=1000)) for i in (1, 2))
    full.submit(first, second)
    full.run()
    assert full.scheduler.num_retracted == 0


# -------------------------------------------------------------------------------------------------- all interleavings

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)
DRAFTERS = st.builds(Drafter, length=st.sampled_from([0, 0, 1, 2, 5, 20]), right=st.integers(1, 3))
SAMPLERS = st.builds(Sampler, vocab=st.integers(1, 3), sample=st.integers(0, 2), agree=st.integers(0, 8))


class SchedulerAgainstSolo(RuleBasedStateMachine):
    """Whatever happens between arrival and end, a request gets the tokens that it would get alone."""

    @initialize(
        slots=st.integers(12, 60),
        page_size=st.sampled_from([1, 1, 1, 3, 4, 16]),
        max_step_tokens=st.sampled_from([1, 2, 3, 5, 9, 64]),
        max_running=st.sampled_from([1, 2, 3, 8]),
        policy=st.sampled_from(POLICIES),
        eviction=st.sampled_from([*EVICTION]),
        crowded=st.booleans(),
    )
    def start(
        self,
        slots: int,
        page_size: int,
        max_step_tokens: int,
        max_running: int,
        policy: str | AdmissionOrder,
        eviction: str,
        crowded: bool,
    ) -> None:
        self.sim = Simulation(
            -(-slots // page_size) * page_size,
            page_size=page_size,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            policy=policy,
            eviction=eviction,
        )
        if crowded:
            crowd(self.sim)
        self.max_step_tokens = max_step_tokens
        self.expected: dict[Request, list[int]] = {}  # -> its tokens when it is done
        self.cancelled: set[Request] = set()
        self.prompts: list[tuple[int, ...]] = []

    @rule(
        tokens=TOKENS,
        data=st.data(),
        max_tokens=st.integers(1, 12),
        sampler=SAMPLERS,
        drafter=DRAFTERS,
        count=st.sampled_from([1, 1, 2, 4]),
        namespace=st.sampled_from([None, None, "a"]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        routing_key=st.sampled_from([None, "k", "l"]),
    )
    def arrive(
        self,
        tokens: tuple[int, ...],
        data: st.DataObject,
        max_tokens: int,
        sampler: Sampler,
        drafter: Drafter,
        count: int,
        namespace: str | None,
        priority: int,
        routing_key: str | None,
    ) -> None:
        """One, or several that fork, mostly after a prompt that came before."""
        if self.prompts and data.draw(st.booleans()):
            tokens = data.draw(st.sampled_from(self.prompts)) + tokens
        self.prompts.append(tokens)
        requests = [
            self.sim.request(
                tokens,
                max_tokens,
                sampler=sampler,
                drafter=drafter,
                logprobs_from=data.draw(st.none() | st.integers(1, len(tokens))),
                namespace=namespace,
                priority=priority,
                routing_key=routing_key,
            )
            for _ in range(count)
        ]
        self.expected |= {request: [*tokens, *alone(tokens, max_tokens, sampler)] for request in requests}
        self.sim.submit(*requests)

    @rule(tokens=TOKENS, data=st.data())
    def score(self, tokens: tuple[int, ...], data: st.DataObject) -> None:
        if self.prompts and data.draw(st.booleans()):
            tokens = data.draw(st.sampled_from(self.prompts)) + tokens
        if len(tokens) > 1:
            first = data.draw(st.integers(1, len(tokens) - 1))
            request = self.sim.request(tokens, 0, scoring=True, logprobs_from=first)
            self.expected[request] = list(tokens)
            self.sim.submit(request)

    def unfinished(self) -> list[Request]:
        return [request for request in self.expected if not request.finished]

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            busy = bool(self.unfinished())
            assert self.sim.step() == busy
            self.sim.check()

    @rule()
    def failing_step(self) -> None:
        self.sim.step(fail=True)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.unfinished()))
        self.cancelled.add(request)
        self.sim.cancel(request)

    @rule(tokens=TOKENS, count=st.integers(1, 8))
    def evict(self, tokens: tuple[int, ...], count: int) -> None:
        self.sim.tree.evict(count)

    @rule()
    def until_idle(self) -> None:
        work = sum(len(self.expected[request]) for request in self.unfinished())
        self.sim.run(2 * work + 10)

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.until_idle()
            self.holds()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        sim.check()
        assert {*sim.scheduler.running, *sim.scheduler.waiting} == set(self.unfinished())
        assert len(sim.scheduler.running) + len(sim.scheduler.waiting) == len(self.unfinished())
        assert all((r.node is None) == (r in sim.scheduler.waiting) for r in self.unfinished())
        for request, expected in self.expected.items():
            tokens = list(request.tokens)
            assert tokens == expected[: len(tokens)]
            if request.finished and request not in self.cancelled and request not in sim.stuck:
                assert tokens == expected
                if request.logprobs_from is not None:
                    assert [found.token for found in request.logprobs] == tokens[request.logprobs_from :]
        for step in sim.steps:
            assert step.rows <= self.max_step_tokens


TestSchedulerAgainstSolo = SchedulerAgainstSolo.TestCase
TestSchedulerAgainstSolo.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)

"""A step loop without a model: what was computed in a slot is remembered, and every read of it is checked.

The pretended keys and values of a token are a hash of its whole prefix, made from those of the token
before it. Whoever reads a slot that is not its own prefix's notices, and so does who reads a slot
that was never written, was given away since, or belongs to another namespace. Sampled tokens are a
function of that hash, so a request that is served wrongly ends with other tokens than alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from branchwise.runtime.layout import NO_SLOT, Layout
from branchwise.runtime.policies import EVICTION, AdmissionOrder
from branchwise.runtime.request import Logprob, Request
from branchwise.runtime.scheduler import Plan, Scheduler, StuckRequest
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import RadixTree

EMPTY = 1
"""The hash of no tokens."""


def prefix_hash(tokens: Sequence[int], before: int = EMPTY) -> int:
    for token in tokens:
        before = hash((before, token))
    return before


@dataclass(frozen=True, slots=True)
class Sampler:
    """The tokens of one request: equal for all samples up to position `agree`, then each for itself."""

    vocab: int = 3
    sample: int = 0
    agree: int = 0

    def next(self, prefix: int, position: int) -> int:
        return hash((prefix, self.sample if position >= self.agree else 0)) % self.vocab


GREEDY = Sampler()


@dataclass(frozen=True, slots=True)
class Drafter:
    """Guesses the next `length` tokens of a request; every `right`-th guess or so is wrong in one place."""

    length: int = 0
    right: int = 2

    def guess(self, sampler: Sampler, tokens: Sequence[int]) -> list[int]:
        guess = alone(tokens, self.length, sampler)
        if guess and len(tokens) % self.right == 0:
            guess[len(tokens) // self.right % len(guess)] += 1
        return guess


NO_DRAFTS = Drafter()


def alone(prompt: Sequence[int], max_tokens: int, sampler: Sampler = GREEDY) -> list[int]:
    """The tokens that a request samples when nothing is shared, cached, chunked or sent back."""
    tokens, prefix = list(prompt), prefix_hash(prompt)
    for _ in range(max_tokens):
        tokens.append(sampler.next(prefix, len(tokens)))
        prefix = prefix_hash(tokens[-1:], prefix)
    return tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did: the requests that took part, its rows, and how many of them computed a new token."""

    placed: tuple[Request, ...]
    rows: int
    computed: int


class Simulation:
    """The engine's step loop, with a scheduler, a tree and a pool as the engine has them."""

    def __init__(
        self,
        num_slots: int = 4096,
        *,
        page_size: int = 1,
        max_step_tokens: int = 4096,
        max_running: int = 256,
        policy: str | AdmissionOrder = "lpm",
        eviction: str = "lru",
    ) -> None:
        self.tree = RadixTree(SlotPool(num_slots, page_size), EVICTION[eviction])
        self.scheduler = Scheduler(self.tree, max_step_tokens=max_step_tokens, max_running=max_running, policy=policy)
        self.steps: list[Step] = []
        self.accepted = 0                         # drafted tokens that were right
        self.stuck: list[Request] = []            # ended because the pool was full
        self.admitted: dict[Request, None] = {}   # in order of their first step
        self._sampler: dict[Request, Sampler] = {}
        self._drafter: dict[Request, Drafter] = {}
        self._written: dict[int, int] = {}        # slot -> hash of the prefix that was computed in it
        self._namespace: dict[int, Hashable] = {}

    @property
    def computed(self) -> int:
        return sum(step.computed for step in self.steps)

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        sampler: Sampler = GREEDY,
        drafter: Drafter = NO_DRAFTS,
        scoring: bool = False,
        logprobs_from: int | None = None,
        namespace: Hashable = None,
        priority: int = 0,
        routing_key: Hashable = None,
    ) -> Request:
        """A new request, not submitted yet."""
        request = Request(
            tokens=array("i", prompt),
            num_prompt=len(prompt),
            on_done=lambda _: None,
            scoring=scoring,
            logprobs_from=logprobs_from,
            max_tokens=max_tokens,
            namespace=namespace,
            priority=priority,
            routing_key=routing_key,
            id=len(self._sampler),
        )
        self._sampler[request], self._drafter[request] = sampler, drafter
        if not scoring:
            request.draft = array("i", drafter.guess(sampler, prompt))
        return request

    def submit(self, *requests: Request) -> None:
        self.scheduler.add(requests)

    def cancel(self, request: Request) -> None:
        self._end(request)

    def step(self, *, fail: bool = False) -> bool:
        """One step; with `fail`, one whose forward pass fails half done. False: there was nothing to do."""
        try:
            plan = self.scheduler.plan()
        except StuckRequest as stuck:
            self.stuck.append(stuck.request)
            self._end(stuck.request)
            return True
        if plan is None:
            return False
        if fail:
            self._written |= dict.fromkeys(plan.layout.write_slots, 0)
            self.scheduler.undo(plan)
            return True
        self._note(plan)
        prefixes = self._forward(plan.layout)
        self.tree.commit()
        for request, places in plan.wanted:
            self._use(request, [prefixes[plan.layout.logit_of[i]] for i in places])
        return True

    def run(self, most_steps: int = 10_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(most_steps):
            if not self.scheduler.busy:
                return
            assert self.step(), f"nothing can run, {len(self.scheduler.waiting)} wait\n{self.tree.render()}"
        raise AssertionError(f"{len(self.scheduler.waiting)} wait and {len(self.scheduler.running)} run forever")

    def check(self) -> None:
        """Assert what must hold between two steps."""
        tree = self.tree
        tree.check()
        total = tree.pool.num_free + tree.evictable + tree.protected + tree.pinned + tree.held
        assert total == tree.pool.num_slots, f"{total} slots are accounted for, there are {tree.pool.num_slots}"
        if not self.scheduler.busy:
            assert tree.protected == tree.held == 0, f"{tree.protected} protected, {tree.held} held, and all is idle"

    def _note(self, plan: Plan) -> None:
        layout = plan.layout
        self.steps.append(Step(tuple(plan.placed), len(layout.tokens), layout.num_written))
        self.admitted |= dict.fromkeys(plan.placed)
        for slot in layout.write_slots:
            self._namespace.pop(slot, None)
        for request in plan.placed:
            for slot in _path(request):
                known = self._namespace.setdefault(slot, request.namespace)
                assert known == request.namespace, f"slot {slot} belongs to {known!r}"

    def _forward(self, layout: Layout) -> list[int]:
        """Write all keys and values of the step, then read as attention does; the hashes at the wanted rows."""
        prefixes: list[int] = []
        for segment in layout.segments:  # parents come before children
            rows = range(segment.first_row, segment.first_row + segment.num_rows)
            assert rows.start == len(prefixes), f"rows from {rows.start} on follow {len(prefixes)} rows"
            path = [slot for span in segment.path for slot in span.slots]
            above, own = path[: -len(rows)], path[-len(rows) :]
            prefix = self._written[above[-1]] if above else EMPTY
            for row, slot in zip(rows, own, strict=True):
                prefix = prefix_hash([layout.tokens[row]], prefix)
                prefixes.append(prefix)
                assert layout.positions[row] == len(above) + row - rows.start
                if layout.write_slots[row] == NO_SLOT:
                    assert self._written[slot] == prefix, f"slot {slot} is read as what it is not"
                else:
                    assert layout.write_slots[row] == slot
                    self._written[slot] = prefix
        slots = [slot for slot in layout.write_slots if slot != NO_SLOT]
        assert len(slots) == len(set(slots)), "two rows write to one slot"
        return [prefixes[row] for row in layout.logit_rows]

    def _use(self, request: Request, prefixes: list[int]) -> None:
        self._check_path(request)
        if not prefixes:
            return
        first, known = request.first_wanted, request.tokens + request.draft
        expected = [prefix_hash(known[: first + i + 1]) for i in range(len(prefixes))]
        assert prefixes == expected, f"request {request.id} got another sequence's logits"
        count = min(len(prefixes), len(request.tokens) - 1 - first)
        request.logprobs += [Logprob(known[first + 1 + i], 0.0) for i in range(count)]
        if request.scoring:
            if request.first_wanted == request.end:
                self._end(request)
            return
        for place, prefix in enumerate(prefixes[count:]):
            token = self._sampler[request].next(prefix, len(request.tokens))
            if request.logprobs_from is not None:
                request.logprobs.append(Logprob(token, 0.0))
            guessed = place < request.drafted and token == request.draft[place]
            request.tokens.append(token)
            request.accepted += guessed
            self.accepted += guessed
            if request.num_sampled >= request.max_tokens:
                self._end(request)
                return
            if not guessed:
                break
        if prefixes[count:]:
            request.settle(self.tree)
        request.draft = array("i", self._drafter[request].guess(self._sampler[request], request.tokens))

    def _check_path(self, request: Request) -> None:
        """What a request's rows attend to is exactly its prefix, slot for slot."""
        path = _path(request)
        known = request.tokens + request.draft
        assert len(path) == request.computed <= len(known)
        prefix = EMPTY
        for slot, token in zip(path, known, strict=False):
            prefix = prefix_hash([token], prefix)
            assert self._written[slot] == prefix, f"slot {slot} on the path of request {request.id} is not its prefix"

    def _end(self, request: Request) -> None:
        request.finished = True
        self.scheduler.remove(request)


def _path(request: Request) -> list[int]:
    """The slots of what is computed of a request, oldest first."""
    tip = request.tail or request.node
    assert tip is not None, f"request {request.id} takes part and has no place"
    return [slot for node in tip.path() for slot in node.slots[: len(node)]]  # a tail has its whole page

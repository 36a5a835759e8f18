"""What runs in the next step.

The scheduler lets those that decode go first, fills the rest of the step's budget with chunks of
prompts, and admits waiting requests in the order of its policy. It puts their tokens in the tree,
so requests that share a prefix share its rows, in whatever step and order they come. When slots run
out, younger requests are sent back to wait; the oldest always gets on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import OutOfSlots
from .layout import Layout, Wanted, build_layout
from .policies import AdmissionOrder
from .request import Request
from .retraction import choose
from .tiers import Tiers
from .tree import Node, RadixTree
from .waiting import Waiting

HEADROOM = 16
"""Slots left to each running request when another is admitted, so that it is not sent back at once."""

SLOW_AVERAGE = 0.05
"""How much one finished request counts in the average length of answers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: its layout, and who wants the logits of which of its rows (as indices into `layout.logit_of`)."""

    layout: Layout
    wanted: list[tuple[Request, range]]
    placed: list[Request]


@dataclass(slots=True)
class _Step:
    budget: int
    placed: dict[Request, None] = field(default_factory=dict)  # in order


class StuckRequest(Exception):
    """`request` is the only one that runs, and even so there is no slot left for its next token."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"request {request.id} has no slot left")
        self.request = request


class Scheduler:
    """A request is waiting (nothing locked), running (its path locked), or unknown here."""

    def __init__(
        self,
        tree: RadixTree,
        *,
        max_step_tokens: int,
        max_running: int,
        policy: str | AdmissionOrder = "lpm",
        tiers: Tiers | None = None,
    ) -> None:
        """`tiers` is where prefixes that were evicted come back from."""
        self.tree = tree
        self.tiers = tiers
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self.waiting = Waiting(tree, policy)
        self.running: list[Request] = []
        self.suspects: deque[Request] = deque()  # each of them runs alone once: one of them made a step fail
        self.num_retracted = 0
        self._planning: list[Request] = []  # whom the step in progress was being planned for when it failed
        self._usual_answer = float(HEADROOM)  # tokens that finished requests sampled, on average

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue new requests, or requests whose step failed."""
        for request in requests:
            self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Forget a request, whatever it was doing; its path stays cached."""
        if request.node is not None:
            request.settle(self.tree)
            self._release(request)
            self.running.remove(request)
            self._usual_answer += SLOW_AVERAGE * (request.num_sampled - self._usual_answer)
        elif request in self.waiting:
            self.waiting.remove(request)

    def plan(self) -> Plan | None:
        """Choose the rows of the next step and put their tokens in the tree; None if nothing can run.

        Raises:
            StuckRequest: one request is alone and the pool is full.
        """
        step, self._planning = _Step(self.max_step_tokens), []
        while self.suspects:
            suspect = self.suspects.popleft()
            if suspect in self.waiting and self._admit(suspect, step):
                return self._finish_plan(list(step.placed))
        self.running.sort(key=lambda r: (r.end - r.computed > 1, r.id))  # who decodes goes before who prefills
        for request in list(self.running):
            if request.node is not None and step.budget > 0:
                self._continue(request, step)
        if self.waiting:
            self.waiting.begin_step(Counter(r.routing_key for r in self.running))
        while self.waiting and step.budget > 0 and len(self.running) < self.max_running:
            if not self._admit(self.waiting.next(), step):
                break
        return self._finish_plan(list(step.placed)) if step.placed else None

    def give_up(self) -> list[Request]:
        """`plan` failed half way: everybody lets go of the tree and waits again. Returns those who may be at fault.

        Raises:
            AssertionError: it left the tree in disorder.
        """
        for request in [*self.running, *self.waiting]:
            if request.node is not None:
                self._release(request)
        running, self.running = self.running, []
        self.tree.abandon()
        self.add(request for request in running if request not in self.waiting)
        self.tree.check()
        assert self.tree.protected == self.tree.held == 0, "a lock was lost"
        suspects = [request for request in self._planning if not request.finished]
        return suspects or [*self.waiting]

    def undo(self, plan: Plan) -> None:
        """The step of `plan` failed: its tokens leave the tree, its requests lose their place in it and wait again."""
        for request in plan.placed:
            self._release(request)
            self.running.remove(request)
        self.tree.abandon()
        self.add(plan.placed)

    def forget(self, node: Node, keep: int) -> None:
        """Between two steps: what follows the first `keep` tokens of `node` is cached nowhere any more.

        Who computes there waits again. Nothing happens if a pin keeps the node.
        """
        if node.pins:
            return
        for request in [r for r in self.running if r.node is not None and node in r.node.path()]:
            self._retract(request)
        self.tree.forget(node, keep)
        if self.tiers is not None:
            self.tiers.clear()

    def _continue(self, request: Request, step: _Step) -> None:
        """Place the next tokens of a running request, sending younger ones back if slots run out."""
        self._planning = [request]
        while request.node is not None:
            try:
                self._place(request, step)
                return
            except OutOfSlots as full:
                younger = [r for r in self.running if r.id > request.id and r.priority <= request.priority]
                missing = full.wanted - full.free - full.evictable
                victims = choose([r for r in younger if r not in step.placed], missing)
                if not victims and len(self.running) == 1 and not step.placed:
                    raise StuckRequest(request) from None
                for victim in victims or [request]:
                    self._retract(victim)

    def _admit(self, request: Request, step: _Step) -> bool:
        """Start a waiting request, if there is room for its prompt beside what those that run will still need."""
        self._planning = [request]
        tree = self.tree
        found = tree.match(request.tokens[: self._target(request, step)], tree.root(request.namespace))
        room = tree.pool.num_free + tree.evictable - tree.evictable_on(found)
        if self.running and request.end - found.length + self._still_needed() > room:
            return False
        request.node = tree.lock(found, priority=request.priority)
        request.computed = found.length
        if self.tiers is not None:
            self._restore(request, self._target(request, step), self.tiers)
        if request.hit_len is None:
            request.hit_len = min(request.computed, request.num_prompt - 1)
        self.waiting.admitted(request)
        self.running.append(request)
        self._continue(request, step)
        return request.node is not None

    def _restore(self, request: Request, end: int, tiers: Tiers) -> None:
        """Bring back what the tiers have of a request's tokens up to `end` after its path, as far as slots go."""
        tree, start = self.tree, request.computed
        assert request.node is not None
        end = min(end, start + tree.pool.num_free + tree.evictable)
        if request.node.fresh or start == end:  # below tokens of the step in progress only its own are allowed
            return
        rows = tiers.fetch(request.namespace, request.tokens[:start], request.tokens[start:end])
        if len(rows):
            back = request.tokens[start : start + len(rows) * tree.page_size]
            request.node = tree.insert(request.node, back, lambda slots: tiers.restore(slots, rows))
            request.computed += len(back)

    def _still_needed(self) -> float:
        """Slots that the running requests will probably take: what is usual, at least a few, at most what they may."""
        return sum(
            max(0.0, min(r.max_tokens - r.num_sampled, max(HEADROOM, self._usual_answer - r.num_sampled)))
            for r in self.running
        )

    def _place(self, request: Request, step: _Step) -> None:
        """Move a request along what the tree has of its next tokens, and add the rest as far as the budget goes."""
        end, tree = self._target(request, step), self.tree
        assert request.node is not None
        found = tree.match(request.tokens[request.path_len : end], request.node)
        if found.length:
            request.drop_tail(tree)  # the tree has its page, whole
            request.computed = max(request.computed, request.path_len + found.length)
            request.node = tree.lock(found, request.node, request.priority)
        count = min(end - request.computed, step.budget)
        if count:
            self._seal_prompt(request)
            more = request.tokens[request.computed : request.computed + count]
            request.node, request.tail = tree.append(request.node, more, request.tail)
            request.computed += count
            if request.computed <= request.num_prompt:
                self.waiting.grew(request)
        rows = max(count, request.computed - request.first_wanted, 1)  # rows can be read again, too
        if request.draft and request.computed == request.end:
            self._place_draft(request, step.budget - rows)
        step.budget -= rows + request.drafted
        step.placed[request] = None

    def _place_draft(self, request: Request, room: int) -> None:
        """Compute a request's draft in the same step, cut to what there is room for: nobody makes way for a guess."""
        assert request.node is not None
        request.draft = request.draft[:max(0, room)]
        if not request.draft:
            return
        self._seal_prompt(request)
        count = len(request.draft)
        try:
            request.node, request.tail = self.tree.append(request.node, request.draft, request.tail, drafts=count)
        except OutOfSlots:
            request.draft = request.draft[:0]
        else:
            request.computed += count
            request.drafted = count

    def _seal_prompt(self, request: Request) -> None:
        """If a request's path ends where its prompt does, what follows opens a child."""
        whole = request.computed == request.num_prompt and request.held is None
        if whole and request.tail is None and not request.scoring:
            assert request.node is not None
            request.node.sealed = True

    def _target(self, request: Request, step: _Step) -> int:
        """How far a request may get in this step, as far as its rows go that are in the tree already."""
        if request.logprobs_from is None:
            return request.end
        return min(request.end, request.first_wanted + step.budget)

    def _retract(self, request: Request) -> None:
        self._release(request)
        self.running.remove(request)
        self.add([request])
        self.num_retracted += 1

    def _release(self, request: Request) -> None:
        assert request.node is not None
        request.drop_tail(self.tree)
        self.tree.unlock(request.node)
        request.node, request.computed = None, 0

    def _finish_plan(self, placed: list[Request]) -> Plan:
        self._planning = placed
        places: list[Wanted] = []
        wanted: list[tuple[Request, range]] = []
        for request in placed:
            first = len(places)
            places += _wanted_places(request)
            wanted.append((request, range(first, len(places))))
        layout = build_layout(self.tree.fresh_nodes(), places)
        return Plan(layout, wanted, placed)


def _wanted_places(request: Request) -> list[Wanted]:
    """Where on its computed path a request wants logits, oldest first."""
    places: list[Wanted] = []
    node, end = request.tail or request.node, request.computed
    while node is not None and end > request.first_wanted:
        start = end - len(node)
        first = max(start, request.first_wanted)
        places += [Wanted(node, position - start, position) for position in range(end - 1, first - 1, -1)]
        node, end = node.parent, start
    return places[::-1]

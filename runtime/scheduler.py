"""What runs in the next step.

The scheduler keeps the requests in order of arrival, lets those that decode go first, fills the rest
of the step's budget with chunks of prompts, and sees to it that the oldest request always gets on:
when slots run out, younger ones are sent back to wait. It puts their tokens in the tree, so requests
that share a prefix share its rows, in whatever step and order they come.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import OutOfSlots
from .layout import Layout, Wanted, build_layout
from .request import Request
from .tree import RadixTree

HEADROOM = 16
"""Slots left to each running request when another is admitted, so that it is not sent back at once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: its layout, and who wants the logits of which of its rows (as indices into `layout.logit_rows`)."""

    layout: Layout
    wanted: list[tuple[Request, range]]
    placed: list[Request]


@dataclass(slots=True)
class _Draft:
    budget: int
    placed: list[Request] = field(default_factory=list)


class Scheduler:
    """A request is waiting (nothing locked), running (its path locked), or unknown here."""

    def __init__(self, tree: RadixTree, *, max_step_tokens: int, max_running: int) -> None:
        self.tree = tree
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self.waiting: list[Request] = []  # oldest first
        self.running: list[Request] = []  # oldest first
        self.num_retracted = 0

    def add(self, requests: Iterable[Request]) -> None:
        """Queue new requests, or requests whose step failed."""
        self.waiting = sorted([*self.waiting, *requests], key=lambda request: request.id)

    def remove(self, request: Request) -> None:
        """Forget a request, whatever it was doing; its path stays cached."""
        if request.node is not None:
            self._release(request)
        self.waiting = [r for r in self.waiting if r is not request]
        self.running = [r for r in self.running if r is not request]

    def plan(self) -> Plan | None:
        """Choose the rows of the next step and put their tokens in the tree; None if nothing can run.

        Raises:
            StuckRequest: the oldest request is alone and the pool is full.
        """
        draft = _Draft(self.max_step_tokens)
        self.running.sort(key=lambda r: (r.end - r.computed > 1, r.id))
        for request in list(self.running):
            if request.node is not None and draft.budget > 0:
                self._continue(request, draft)
        while self.waiting and draft.budget > 0 and len(self.running) < self.max_running:
            if not self._admit(self.waiting[0], draft):
                break
        return self._finish_plan(draft.placed) if draft.placed else None

    def undo(self, plan: Plan) -> None:
        """The step of `plan` failed: its tokens leave the tree, its requests lose their place in it and wait again."""
        for request in plan.placed:
            self._release(request)
            self.running.remove(request)
        self.tree.abandon()
        self.add(plan.placed)

    def _continue(self, request: Request, draft: _Draft) -> None:
        """Place the next tokens of a running request, sending younger ones back if slots run out."""
        while request.node is not None:
            try:
                self._place(request, draft)
                return
            except OutOfSlots:
                victim = self._victim(request, draft)
                if victim is request and len(self.running) == 1 and not draft.placed:
                    raise StuckRequest(request) from None
                self._retract(victim)

    def _admit(self, request: Request, draft: _Draft) -> bool:
        """Start the oldest waiting request, if there is room for its prompt beside those that run."""
        found = self.tree.match(request.tokens[: self._target(request, draft)])
        request.node = self.tree.lock(found)
        request.computed = found.length
        room = self.tree.pool.num_free + self.tree.evictable
        if self.running and request.end - found.length + HEADROOM * len(self.running) > room:
            self._release(request)
            return False
        if request.hit_len is None:
            request.hit_len = min(found.length, request.num_prompt - 1)
        self.waiting.pop(0)
        self.running.append(request)
        self._continue(request, draft)
        return request.node is not None

    def _place(self, request: Request, draft: _Draft) -> None:
        """Move a request along what the tree has of its next tokens, and add the rest as far as the budget goes."""
        end, tree = self._target(request, draft), self.tree
        found = tree.match(request.tokens[request.computed : end], request.node)
        if found.length:
            request.node = tree.lock(found, request.node)
            request.computed += found.length
        count = min(end - request.computed, draft.budget)
        assert request.node is not None
        if count:
            if request.computed == request.num_prompt and request.score_from is None:
                request.node.sealed = True
            request.node = tree.append(request.node, request.tokens[request.computed : request.computed + count])
            request.computed += count
        draft.budget -= max(count, 1)
        draft.placed.append(request)

    def _target(self, request: Request, draft: _Draft) -> int:
        """How far a request may get in this step, as far as its rows go that are in the tree already."""
        if request.score_from is None:
            return request.end
        return min(request.end, max(request.first_wanted, request.computed) + draft.budget)

    def _victim(self, request: Request, draft: _Draft) -> Request:
        """Of the requests younger than `request` that have no rows in this step, the cheapest to compute again."""
        younger = [r for r in self.running if r.id > request.id and r.node is not None and r not in draft.placed]
        return min(younger, key=_own_tokens, default=request)

    def _retract(self, request: Request) -> None:
        self._release(request)
        self.running.remove(request)
        self.add([request])
        self.num_retracted += 1

    def _release(self, request: Request) -> None:
        assert request.node is not None
        self.tree.unlock(request.node)
        request.node, request.computed = None, 0

    def _finish_plan(self, placed: list[Request]) -> Plan:
        places: list[Wanted] = []
        wanted: list[tuple[Request, range]] = []
        for request in placed:
            first = len(places)
            places += _wanted_places(request)
            wanted.append((request, range(first, len(places))))
        layout = build_layout(self.tree.fresh_nodes(), places)
        return Plan(layout, wanted, placed)


class StuckRequest(Exception):
    """`request` is the only one that runs, and even so there is no slot left for its next token."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"request {request.id} has no slot left")
        self.request = request


def _own_tokens(request: Request) -> int:
    """How many tokens would have to be computed again if only what others use stayed."""
    return sum(len(node) for node in request.node.path() if node.lock == 1) if request.node else 0


def _wanted_places(request: Request) -> list[Wanted]:
    """Where on its computed path a request wants logits, oldest first."""
    places: list[Wanted] = []
    node, end = request.node, request.computed
    while node is not None and end > request.first_wanted:
        start = end - len(node)
        first = max(start, request.first_wanted)
        places += [Wanted(node, position - start, position) for position in range(end - 1, first - 1, -1)]
        node, end = node.parent, start
    return places[::-1]

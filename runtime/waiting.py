"""Requests that wait, and which of them is next.

Beside the order of the policy, requests are kept sorted by their tokens: neighbours have the
longest common prefixes. So when a request is admitted, those that its prefix now serves are found
beside it, and no policy has to look at all that wait. Requests are told apart by identity alone.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any, TypeAlias

from .policies import ADMISSION, BY_HITS, DFS_WEIGHT, STATIC, AdmissionOrder, Candidate, fcfs
from .request import Request
from .tree import RadixTree

_Rank: TypeAlias = tuple[Any, ...]

PATIENCE = 16
"""After this many admissions in a row that overtook the oldest request of the highest priority, it goes first."""

NEIGHBOURS = 64
"""How many neighbours of an admitted request are looked at, on each side."""


class Waiting:
    """Every request in it has one entry in each of the orders it is kept in; entries in heaps may be stale."""

    def __init__(self, tree: RadixTree, policy: str | AdmissionOrder) -> None:
        self._tree = tree
        self._depth_first = policy == DFS_WEIGHT
        self._key: AdmissionOrder = ADMISSION.get(policy, fcfs) if isinstance(policy, str) else policy
        self._needs_hits = not self._depth_first and self._key not in STATIC
        self._live: dict[Request, int] = {}        # -> the step in which it came
        self._hits: dict[Request, int] = {}        # -> tokens that the tree has of it, as last looked up
        self._by_tokens: list[Request] = []
        self._by_age: list[tuple[_Rank, int, Request]] = []     # heap of ((-priority, id), tie, request)
        self._by_policy: list[tuple[_Rank, int, Request]] = []  # heap of ((-priority, key, id), tie, request)
        self._ties = itertools.count()
        self._groups: Counter[tuple[Hashable, int]] = Counter()  # by namespace and first token
        self._last: Request | None = None          # admitted last: where depth-first goes on
        self._overtook = 0
        self._clock = 0
        self._running_keys: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live)

    def __contains__(self, request: Request) -> bool:
        return request in self._live

    def add(self, request: Request) -> None:
        self._live[request] = self._clock
        insort(self._by_tokens, request, key=_sort_key)
        heapq.heappush(self._by_age, ((-request.priority, request.id), next(self._ties), request))
        self._groups[_group(request)] += 1
        self._look_up(request)
        self._push(request)

    def remove(self, request: Request) -> None:
        del self._live[request]
        self._hits.pop(request, None)
        del self._by_tokens[self._index(request)]
        self._groups[_group(request)] -= 1
        if not self._groups[_group(request)]:
            del self._groups[_group(request)]

    def begin_step(self, running_keys: Counter[Hashable]) -> None:
        """A step begins, with requests of these routing keys running; orders that change by themselves are made new."""
        self._clock += 1
        self._running_keys = running_keys
        if not self._depth_first and self._key not in STATIC and self._key not in BY_HITS:
            self._by_policy = [(self._rank(request), next(self._ties), request) for request in self._live]
            heapq.heapify(self._by_policy)

    def next(self) -> Request:
        """The one to admit next; there must be one."""
        oldest = self._oldest()
        if self._overtook >= PATIENCE:
            return oldest
        chosen = self._depth_first_next(oldest.priority) if self._depth_first else self._policy_next()
        return chosen if chosen.priority >= oldest.priority else oldest

    def admitted(self, request: Request) -> None:
        """`request`, which `next` gave, runs; it leaves the queue, and its neighbours may have a longer prefix now."""
        self._overtook = 0 if request is self._oldest() else self._overtook + 1
        index = self._index(request)
        self.remove(request)
        self._last = request
        if self._needs_hits:
            self._refresh(range(index - 1, max(-1, index - 1 - NEIGHBOURS), -1))
            self._refresh(range(index, min(len(self._by_tokens), index + NEIGHBOURS)))

    def _policy_next(self) -> Request:
        while True:
            rank, _, request = self._by_policy[0]
            if request not in self._live or rank != self._rank(request):
                heapq.heappop(self._by_policy)  # it has gone, or a newer entry is in the heap
            elif self._needs_hits and self._look_up(request):
                self._push(request)
            else:
                return request

    def _depth_first_next(self, priority: int) -> Request:
        """The next in order of tokens within what begins like the last; else the first of the largest group."""
        if self._last is not None and self._groups[_group(self._last)]:
            index = self._index(self._last)
            for request in (*self._by_tokens[index : index + 1], *self._by_tokens[max(0, index - 1) : index]):
                if _group(request) == _group(self._last) and request.priority >= priority:
                    return request
        namespace, token = max(self._groups, key=lambda group: self._groups[group])
        first = bisect_left(self._by_tokens, (repr(namespace), array("i", [token]), -1), key=_sort_key)
        return self._by_tokens[first]

    def _refresh(self, indices: range) -> None:
        """Look neighbours up again until one has no more of its prefix in the tree than was known."""
        for index in indices:
            request = self._by_tokens[index]
            if not self._look_up(request):
                return
            self._push(request)

    def _look_up(self, request: Request) -> bool:
        """Match a request anew, if the policy cares; whether that changed anything."""
        if not self._needs_hits:
            return False
        before = self._hits.get(request)
        found = self._tree.match(request.tokens[: request.end], self._tree.root(request.namespace))
        self._hits[request] = found.length
        return found.length != before

    def _push(self, request: Request) -> None:
        if not self._depth_first:
            heapq.heappush(self._by_policy, (self._rank(request), next(self._ties), request))

    def _rank(self, request: Request) -> _Rank:
        candidate = Candidate(
            request,
            self._hits.get(request, 0),
            self._clock - self._live[request],
            self._running_keys[request.routing_key] if request.routing_key is not None else 0,
        )
        return -request.priority, self._key(candidate), request.id

    def _oldest(self) -> Request:
        while self._by_age[0][-1] not in self._live:
            heapq.heappop(self._by_age)
        return self._by_age[0][-1]

    def _index(self, request: Request) -> int:
        """Where a request stands in the order of tokens, or would stand."""
        return bisect_left(self._by_tokens, _sort_key(request), key=_sort_key)


def _sort_key(request: Request) -> tuple[str, array[int], int]:
    return repr(request.namespace), request.tokens, request.id


def _group(request: Request) -> tuple[Hashable, int]:
    return request.namespace, request.tokens[0]

"""Requests that wait, and which of them is next.

Beside the order of the policy, requests are kept sorted by their tokens: neighbours have the
longest common prefixes. So when the tree has more of a request, those that this serves are found
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

from .policies import ADMISSION, BY_HITS, DFS_WEIGHT, STATIC, AdmissionOrder, Candidate, fcfs, guarded
from .request import Request
from .tree import RadixTree, common_prefix

_Rank: TypeAlias = tuple[Any, ...]

PATIENCE = 16
"""After this many admissions in a row that overtook the oldest request of the highest priority, it goes first.

So one that waits behind `n` older ones of its priority, and none of a higher, is among the next
`(n + 1) * (PATIENCE + 1)` that are admitted, whatever the policy and whoever comes.
"""

NEIGHBOURS = 64
"""How many neighbours of a request that has grown are looked at, on each side."""

_BEYOND = 2**31 - 1  # after every token


class Waiting:
    """Every request in it stands once in `_by_tokens` and `_by_age`, and has one entry in `_by_policy` that counts:
    the last one made. What the tree has of a request may be less than is known here, and is looked up again before
    it is next; it is more only for requests too far from those that grew."""

    def __init__(self, tree: RadixTree, policy: str | AdmissionOrder) -> None:
        self._tree = tree
        self._depth_first = policy == DFS_WEIGHT
        self._key: AdmissionOrder = ADMISSION.get(policy, fcfs) if isinstance(policy, str) else policy
        if self._key not in ADMISSION.values():
            self._key = guarded(self._key, fcfs, "admission")
        self._needs_hits = self._depth_first or self._key not in STATIC
        self._changes_by_itself = self._needs_hits and not self._depth_first and self._key not in BY_HITS
        self._live: dict[Request, int] = {}        # -> the step in which it came
        self._hits: dict[Request, int] = {}        # -> tokens that the tree has of it, as last looked up
        self._by_tokens: list[Request] = []
        self._by_age: list[Request] = []           # the highest priority first, then the oldest
        self._by_policy: list[tuple[_Rank, int, Request]] = []  # heap of ((-priority, key, id), tie, request)
        self._entry: dict[Request, int] = {}       # -> the tie of the entry that counts
        self._ties = itertools.count()
        self._overtook = 0
        self._clock = 0
        self._running_keys: Counter[Hashable] = Counter()
        self._outdated = False                     # all keys may have changed

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live)

    def __contains__(self, request: Request) -> bool:
        return request in self._live

    def add(self, request: Request) -> None:
        if request.best_hit is None:
            request.best_hit = self._best_hit(request)
        self._live[request] = self._clock
        insort(self._by_tokens, request, key=_token_key)
        insort(self._by_age, request, key=_age_key)
        self._look_up(request)
        self._push(request)

    def remove(self, request: Request) -> None:
        del self._live[request], self._entry[request]
        self._hits.pop(request, None)
        del self._by_tokens[self._index(request)]
        del self._by_age[bisect_left(self._by_age, _age_key(request), key=_age_key)]

    def begin_step(self, running_keys: Counter[Hashable]) -> None:
        """A step begins, with requests of these routing keys running."""
        self._clock += 1
        self._running_keys = running_keys
        self._outdated = self._changes_by_itself

    def next(self) -> Request:
        """The one to admit next; there must be one."""
        oldest = self._by_age[0]
        if self._overtook >= PATIENCE:
            return oldest
        if self._outdated:
            self._make_entries_new()
        while True:
            _, tie, request = self._by_policy[0]
            if self._entry.get(request) != tie:
                heapq.heappop(self._by_policy)  # it has gone, or a newer entry is in the heap
            elif self._look_up(request):
                self._push(request)
            else:
                return request

    def admitted(self, request: Request) -> None:
        """`request`, which `next` gave, runs; it leaves the queue."""
        self._overtook = 0 if request is self._by_age[0] else self._overtook + 1
        self.remove(request)

    def grew(self, request: Request) -> None:
        """The tree has more of a running request's prompt than before: those beside it may have a longer prefix."""
        if self._needs_hits and self._live:
            index = self._index(request)
            self._refresh(range(index - 1, max(-1, index - 1 - NEIGHBOURS), -1))
            self._refresh(range(index, min(len(self._by_tokens), index + NEIGHBOURS)))

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
        tie = self._entry[request] = next(self._ties)
        heapq.heappush(self._by_policy, (self._rank(request), tie, request))
        if len(self._by_policy) > 4 * len(self._live) + 64:
            self._by_policy = [entry for entry in self._by_policy if self._entry.get(entry[-1]) == entry[1]]
            heapq.heapify(self._by_policy)

    def _make_entries_new(self) -> None:
        self._entry = dict(zip(self._live, self._ties, strict=False))
        self._by_policy = [(self._rank(request), tie, request) for request, tie in self._entry.items()]
        heapq.heapify(self._by_policy)
        self._outdated = False

    def _rank(self, request: Request) -> _Rank:
        hit_len = self._hits.get(request, 0)
        if self._depth_first:
            return -request.priority, (-hit_len, -self._count_alike(request, hit_len)), request.id
        waited = self._clock - self._live[request]
        same_key = self._running_keys[request.routing_key] if request.routing_key is not None else 0
        return -request.priority, self._key(Candidate(request, hit_len, waited, same_key)), request.id

    def _best_hit(self, request: Request) -> int:
        """The prompt tokens of one that arrives that it could find cached if all that wait went before it.

        Summed over all that arrive, that is the best that any order of them could do.
        """
        prompt = request.tokens[: request.num_prompt - 1]  # the last one is computed in any case, for its logits
        longest = self._tree.match(prompt, self._tree.root(request.namespace)).length
        index = self._index(request)
        for neighbour in self._by_tokens[max(0, index - 1) : index + 1]:
            if neighbour.namespace == request.namespace:
                common = common_prefix(prompt, neighbour.tokens, 0)
                longest = max(longest, common // self._tree.page_size * self._tree.page_size)
        return longest

    def _count_alike(self, request: Request, hit_len: int) -> int:
        """How many go on after `hit_len` tokens as this one does."""
        namespace, start = repr(request.namespace), request.tokens[: hit_len + 1]
        first = bisect_left(self._by_tokens, (namespace, start, -1), key=_token_key)
        return bisect_left(self._by_tokens, (namespace, start + array("i", [_BEYOND]), -1), key=_token_key) - first

    def _index(self, request: Request) -> int:
        """Where a request stands in the order of tokens, or would stand."""
        return bisect_left(self._by_tokens, _token_key(request), key=_token_key)


def _token_key(request: Request) -> tuple[str, array[int], int]:
    return repr(request.namespace), request.tokens, request.id


def _age_key(request: Request) -> tuple[int, int]:
    return -request.priority, request.id

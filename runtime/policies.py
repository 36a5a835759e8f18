"""Orders: which cached leaf is evicted first, and which waiting request is admitted first. One short function each."""

from __future__ import annotations

import logging
import random as _random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from .request import Request
    from .tree import Node

log = logging.getLogger("branchwise")

T = TypeVar("T")


def guarded(order: Callable[[T], Any], otherwise: Callable[[T], Any], what: str) -> Callable[[T], Any]:
    """A user's order that nothing can go wrong with: what it fails on comes last, in the order `otherwise`.

    It fails if it raises, or gives neither a number nor a tuple of numbers. The first failure is logged as an error.
    """
    told = False

    def key(item: T) -> Any:
        nonlocal told
        try:
            return (False, *_numbers(order(item)))
        except Exception:
            if not told:
                told = True
                log.exception("the %s order %r failed; what it fails on comes last", what, order)
            return True, otherwise(item)

    return key


def _numbers(key: object) -> tuple[float, ...]:
    numbers = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError(f"an order must give a number or a tuple of numbers, got {key!r}")
    return numbers

# ------------------------------------------------------------------------------------------------------- eviction

EvictionOrder: TypeAlias = "Callable[[Node], Any]"
"""A sort key for unlocked leaves: the lowest goes first. It may change only while a leaf is locked."""


def lru(leaf: Node) -> int:
    """Least recently used first."""
    return leaf.last_use


def lfu(leaf: Node) -> tuple[int, int]:
    """Least often used first; of equals, the least recently used."""
    return leaf.hits, leaf.last_use


def slru(leaf: Node) -> tuple[bool, int]:
    """What was used once before what was used again; within both, least recently used first."""
    return leaf.hits > 1, leaf.last_use


def fifo(leaf: Node) -> int:
    """Oldest first."""
    return leaf.created


def filo(leaf: Node) -> int:
    """Newest first."""
    return -leaf.created


def mru(leaf: Node) -> int:
    """Most recently used first."""
    return -leaf.last_use


def priority(leaf: Node) -> tuple[int, int]:
    """Lowest priority of the requests that used it first; of equals, the least recently used."""
    return leaf.priority, leaf.last_use


EVICTION: Mapping[str, EvictionOrder] = {f.__name__: f for f in (lru, lfu, slru, fifo, filo, mru, priority)}

# ------------------------------------------------------------------------------------------------------ admission


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request, as a policy sees it.

    hit_len: tokens of its prompt that the tree has, as last looked up.
    waited: steps since it arrived.
    same_key: how many running requests have its routing key.
    """

    request: Request
    hit_len: int
    waited: int
    same_key: int

    @property
    def missing(self) -> int:
        """Tokens that would have to be computed."""
        return len(self.request.tokens) - self.hit_len


AdmissionOrder: TypeAlias = Callable[[Candidate], Any]
"""A sort key for waiting requests: the lowest goes first; of equals, the oldest. Priorities come before it."""


def fcfs(candidate: Candidate) -> int:
    """First come, first served."""
    return candidate.request.id


def lpm(candidate: Candidate) -> int:
    """Longest prefix match: the most cached tokens first."""
    return -candidate.hit_len


def lof(candidate: Candidate) -> int:
    """Longest output first."""
    return -candidate.request.max_tokens


def sjf(candidate: Candidate) -> int:
    """Shortest job first, by the tokens that must be computed before its first answer."""
    return candidate.missing


def hrrn(candidate: Candidate) -> float:
    """Highest response ratio next: (waited + service) / service, with service in tokens to compute."""
    return -(candidate.waited + candidate.missing) / max(1, candidate.missing)


def random(candidate: Candidate) -> float:
    """In no order, but always the same for a request."""
    return _random.Random(candidate.request.id).random()


def routing_key(candidate: Candidate) -> int:
    """Requests first whose routing key most of the running ones have."""
    return -candidate.same_key


ADMISSION: Mapping[str, AdmissionOrder] = {
    "lpm": lpm,
    "fcfs": fcfs,
    "lof": lof,
    "sjf": sjf,
    "hrrn": hrrn,
    "random": random,
    "routing-key": routing_key,
}
DFS_WEIGHT = "dfs-weight"
"""Depth first over the common prefixes of those that wait: the most cached tokens first, as with `lpm`; of those that
have equally many, the ones that most others go on like."""

SCHEDULING = (*ADMISSION, DFS_WEIGHT)

STATIC = {fcfs, lof, random}
"""Orders whose keys never change while a request waits."""

BY_HITS = {lpm, sjf}
"""Orders that change with the tree alone."""

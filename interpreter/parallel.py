"""What to make of several answers: vote, keep the best, search a tree of branches by score.

Plain functions of values and states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from branchwise.lang.checks import whole_number

from .state import State
from .voting import vote

__all__ = ["beam_search", "best_of", "vote"]

T = TypeVar("T")


def best_of(branches: Iterable[State], score: Callable[[State], float]) -> State:
    """The branch with the highest score, of equals the first. The others are stopped, and give back what they hold.

    Args:
        score: of one branch; reading its variables waits for them. It is asked of all before any is stopped.

    Raises:
        ValueError: there are no branches.
        What `score` raises, or the failure of a branch that it reads.
    """
    (best,) = _best(list(branches), score, 1)
    return best


def beam_search(
    state: State,
    step: Callable[[State, int], object],
    score: Callable[[State], float],
    *,
    width: int,
    fork: int,
    depth: int,
) -> list[State]:
    """Search a tree of branches: at each level fork what is kept, take a step in every branch, keep the best.

    Args:
        step: appends to a branch; the second argument is its number among its siblings. What only appends lets all
            branches of a level run side by side.
        score: of one branch once its step is done; the higher the better.
        width: branches that are kept at each level. The others are stopped.
        fork: branches that go on from each one that is kept.
        depth: levels.

    Returns:
        The branches of the last level that were kept, the best first.
    """
    for name, value in (("width", width), ("fork", fork), ("depth", depth)):
        whole_number(value, f"beam_search(): {name}", least=1)
    kept = [state]
    for _ in range(depth):
        grown = [branch.fork(fork) for branch in kept]
        for branches in grown:
            for index, branch in enumerate(branches):
                step(branch, index)
        kept = _best([branch for branches in grown for branch in branches], score, width)
    return kept


def _best(states: list[State], score: Callable[[State], float], count: int) -> list[State]:
    """The `count` states with the highest scores, the best first; the others are stopped."""
    if not states:
        raise ValueError("best_of(): there are no branches to choose from.")
    scores = [score(state) for state in states]
    order = sorted(range(len(states)), key=lambda index: -scores[index])  # stable: of equals the first
    for index in order[count:]:
        states[index]._executor.stop("another branch had a higher score")
    return [states[index] for index in order[:count]]

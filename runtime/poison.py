"""Scores that are no numbers, and the cached keys they come from.

A kernel that gives NaN once has spoilt more than one step: the keys and values it wrote stay in the tree, and whoever
begins with those tokens reads them. So a step whose scores are no numbers is taken back like one that failed, and of
what its requests have cached, everything from the first spoilt page on is forgotten. They compute it again; who gets
no numbers then either fails alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .errors import EngineError
from .kv import KVPool
from .request import Request
from .scheduler import Scheduler


class NoNumbers(EngineError):
    """The model's scores are NaN."""

    def __init__(self) -> None:
        super().__init__(
            "the model's scores for the next token are not numbers (nan). Its weights may be damaged or too large for "
            'this dtype (try dtype="float32"), or a kernel is at fault.'
        )


def rows_without_numbers(logits: Tensor) -> list[int]:
    """The rows of [L, V] that hold a NaN."""
    spoilt = logits.sum(-1).isnan()
    rows: list[int] = spoilt.nonzero().flatten().tolist()
    return rows


def forget_poison(requests: Iterable[Request], scheduler: Scheduler, pool: KVPool) -> None:
    """Take what is spoilt of these requests' cached tokens, and all that follows it, out of the tree and the tiers.

    Between two steps. What is pinned stays: a pin was set when the scores after it were numbers.
    """
    tree = scheduler.tree
    for request in requests:
        end = tree.match(request.tokens, tree.root(request.namespace)).node
        for node in end.path():
            spoilt = pool.gather(node.slots).isnan().any(dim=1).nonzero().flatten()
            if len(spoilt):
                scheduler.forget(node, int(spoilt[0]) * tree.page_size)
                break

"""`s.map(items, body)`: a branch for each item, and what a function makes of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from .batch import HELPERS, Batch, all_results
from .group import Branching, Group
from .progress import NoProgress
from .running import RUNNING

S = TypeVar("S", bound=Branching)
R = TypeVar("R")
T = TypeVar("T")


class Syncing(Branching, Protocol):
    """A state that a thread can wait for."""

    def sync(self) -> None: ...


Y = TypeVar("Y", bound=Syncing)


def map_on_threads(branches: Group[Y], items: Sequence[T], body: Callable[[Y, T], R]) -> list[R]:
    """On this thread and helping ones."""
    jobs = [partial(_done, branch, item, body) for branch, item in zip(branches, items, strict=True)]
    try:
        results = all_results(Batch(len(jobs), RUNNING, NoProgress()), HELPERS.for_list(jobs, None))
        return _unless_one_failed(results)
    except BaseException:
        branches.close()
        raise


def _done(branch: Y, item: T, body: Callable[[Y, T], R]) -> R:
    with RUNNING.here(lambda: branch._executor.stop("s.map() was interrupted")):
        result = body(branch, item)
        branch.sync()
        return result


async def map_as_tasks(
    branches: Group[Any], items: Sequence[T], body: Callable[[Any, T], Coroutine[Any, Any, R]]
) -> list[R]:
    """On the running event loop."""
    from .loops import gather

    async def done(branch: Any, item: T) -> R:
        result = await body(branch, item)
        await branch.sync()
        return result

    try:
        results = await gather([done(branch, item) for branch, item in zip(branches, items, strict=True)])
        return _unless_one_failed(results)
    except BaseException:
        branches.close()
        raise


def _unless_one_failed(results: Sequence[R | Exception]) -> list[R]:
    """Raise the first failure, by index."""
    good = []
    for index, result in enumerate(results):
        if isinstance(result, Exception):
            result.add_note(f"It was raised by item {index} of s.map().")
            raise result
        good.append(result)
    return good

"""What all runs of a batch begin with is kept in the cache until the batch is over.

It is found by comparing the first two runs that have ended: nothing is run once more to find it. While they run, what
they share is computed once as it is; from then on it also stays where runs of others want its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from threading import Lock

from branchwise.lang import Text

from .session import Backend, Holding, Segment
from .state import State


class SharedPrefix:
    """That of one batch on one backend."""

    def __init__(self, backend: Backend, runs: int) -> None:
        self._backend = backend
        self._lock = Lock()
        self._to_begin = runs
        self._first: Sequence[Segment] | None = None
        self._found = False
        self._release: Callable[[], None] | None = None

    def began(self) -> None:
        """A run of the batch begins; any thread."""
        with self._lock:
            self._to_begin -= 1

    def ended(self, state: State) -> State:
        """A run of the batch has ended, well; any thread."""
        constants = state._transcript.leading_constants()
        with self._lock:
            if self._found or not self._to_begin:
                return state
            if self._first is None:
                self._first = constants
                return state
            self._found = True
            shared = common_prefix(self._first, constants)
            if any(isinstance(segment, Text) for segment in shared):
                self._release = self._hold(shared)
        return state

    def release(self) -> None:
        """The batch is over."""
        with self._lock:
            self._found = True
            release, self._release = self._release, None
        if release is not None:
            release()

    def _hold(self, shared: Sequence[Segment]) -> Callable[[], None] | None:
        session = self._backend.open_session()
        try:
            if not isinstance(session, Holding):
                return None
            for segment in shared:
                session.append(segment)
            return session.hold()
        finally:
            session.close()


def common_prefix(one: Sequence[Segment], other: Sequence[Segment]) -> list[Segment]:
    """What both begin with; the last segment may be the beginning of a text."""
    shared: list[Segment] = []
    for a, b in zip(one, other, strict=False):
        if a != b:
            if isinstance(a, Text) and isinstance(b, Text) and a.control == b.control:
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.text, b.text, strict=False))
                shared += [Text(text, a.control)] if (text := "".join(pair[0] for pair in same)) else []
            break
        shared.append(a)
    return shared

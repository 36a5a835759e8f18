"""A program that was traced, played on sessions that make requests and send none."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from branchwise.lang import Forked, Gen, Select, Text, Trace
from branchwise.lang.symbol import Unknown

from ..outcome import Failure
from .errors import Unsupported

if TYPE_CHECKING:
    from .session import RemoteSession

Branch = tuple[int, ...]

UNWRITTEN = Text("[...]", control=False)
"""What the model would write."""


def check(trace: Trace, root: RemoteSession) -> None:
    """Ask for all calls of `trace` and send nothing.

    Raises:
        Unsupported: with the call and the line.
    """
    sessions: dict[Branch, RemoteSession] = {(): root}
    num_forks = Counter[Branch]()
    for step in trace.steps:
        session, said = sessions[step.branch], step.said
        match said:
            case Gen() | Select():
                try:
                    session.request(said)
                except Unsupported as error:
                    raise Failure(error, said.call, step.written_at).exception() from error
                session.append(UNWRITTEN)
            case Forked(count):
                for child in session.fork(count):
                    sessions[*step.branch, num_forks[step.branch]] = child
                    num_forks[step.branch] += 1
            case Unknown():
                session.append(UNWRITTEN)
            case _:
                session.append(said)

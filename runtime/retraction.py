"""Who is sent back to wait when slots run out: the requests whose loss costs least.

A node is freed when the last request that locks it lets go, so requests that share a path are judged
together: everybody below a node is a group, and a group frees all that only its members use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .request import Request
from .tree import Node


@dataclass(slots=True)
class Group:
    """Requests that must go together, and the slots that then nothing locks: what it costs to compute them again."""

    members: list[Request] = field(default_factory=list)
    freed: int = 0


def choose(candidates: Sequence[Request], missing: int) -> list[Request]:
    """The candidates to send back so that `missing` slots are freed, or at least a start is made.

    The lowest priority first. Of its groups the one that frees least but enough, of equals the fewest requests,
    then the youngest. If none frees enough, the one that frees most; those that go on ask again.
    """
    lowest = min((request.priority for request in candidates), default=0)
    groups = _groups([request for request in candidates if request.priority == lowest])

    def order(group: Group) -> tuple[bool, int, int, int]:
        enough = group.freed >= missing
        youngest = max(request.id for request in group.members)
        return not enough, group.freed if enough else -group.freed, len(group.members), -youngest

    return min(groups, key=order).members if groups else []


def _groups(candidates: Sequence[Request]) -> list[Group]:
    """All who lock a node, for each node that nobody but candidates locks; and each candidate that has no such node."""
    paths = {request: request.node.path() for request in candidates if request.node is not None}
    locks = Counter(node for path in paths.values() for node in path)
    groups: dict[Node, Group] = {}
    alone: list[Group] = []
    for request, path in paths.items():
        held = len(request.tail.slots) if request.tail else 0
        free = [node for node in path if locks[node] == node.lock]
        for node in free:
            group = groups.setdefault(node, Group())
            group.members.append(request)
            group.freed += held
        if not free:
            alone.append(Group([request], held))
    for node in groups:
        if not node.pins:
            for above in node.path():
                if above in groups:
                    groups[above].freed += len(node)
    tops = [group for node, group in groups.items() if node.parent not in groups or node.parent.lock > node.lock]
    return [*tops, *alone]

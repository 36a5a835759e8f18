"""A vote over values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def vote(values: Iterable[T]) -> T:
    """The value that occurs most often; of equally many, the one that comes first.

    Raises:
        ValueError: there are no values.
    """
    counts: list[tuple[T, int]] = []  # no dict: not every value has a hash
    for value in values:
        for at, (other, count) in enumerate(counts):
            if other == value:
                counts[at] = (other, count + 1)
                break
        else:
            counts.append((value, 1))
    if not counts:
        raise ValueError("vote(): there are no values to choose from.")
    return max(counts, key=lambda counted: counted[1])[0]

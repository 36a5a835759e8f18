"""KV slots: which are free and which are allocated.

A slot is the place of one token's keys and values, in every layer at once. The pool hands out slot
numbers, in contiguous runs where it can: attention reads a run as one block of memory. It does not
know which tokens are in the slots, nor who holds them.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from itertools import pairwise

from .errors import OutOfSlots


class SlotPool:
    """Every slot is either free or allocated, never both; neighbouring free slots are one free run."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = 0
        self._end_of: dict[int, int] = {}    # first slot of a free run -> one past its last
        self._start_of: dict[int, int] = {}  # one past the last slot of a free run -> its first
        self._by_length: list[tuple[int, int, int]] = []  # heap of (-length, start, end); entries go stale
        self._add_run(0, num_slots)

    def allocate(self, count: int, *, after: int | None = None) -> array[int]:
        """Take `count` slots, the first of them next to slot `after` if that one is free.

        A new run is cut from the middle of the longest free one, so that what lies before it can
        still grow in place.

        Raises:
            OutOfSlots: fewer than `count` are free; then none is taken.
        """
        if count > self.num_free:
            raise OutOfSlots(wanted=count, free=self.num_free)
        taken: array[int] = array("i")
        if after is not None and after + 1 in self._end_of:
            self._take(after + 1, after + 1, count, taken)
        while len(taken) < count:
            run, end = self._longest_run()
            wanted = count - len(taken)
            middle = run + max(0, end - run - wanted) // 2
            self._take(run, middle if run else run, wanted, taken)
        return taken

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back. `assert`s that each of them was allocated."""
        ordered = sorted(slots)
        first = 0
        for i in range(1, len(ordered) + 1):
            if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
                self._add_run(ordered[first], ordered[i - 1] + 1)
                first = i

    def free_slots(self) -> set[int]:
        """The free slots, for checks."""
        return {slot for start, end in self._end_of.items() for slot in range(start, end)}

    def check(self) -> None:
        """Assert the invariant of the class."""
        runs = sorted(self._end_of.items())
        length = sum(end - start for start, end in runs)
        assert length == self.num_free, f"free runs of {length} slots in all, counted {self.num_free}"
        assert self._start_of == {end: start for start, end in runs}, "the two maps of free runs differ"
        assert all(a[1] < b[0] for a, b in pairwise(runs)), f"free runs touch or overlap: {runs}"

    def _take(self, run: int, start: int, wanted: int, taken: array[int]) -> None:
        """Move up to `wanted` slots to `taken`, from `start` on, out of the free run that begins at `run`."""
        end = self._remove_run(run)
        stop = min(end, start + wanted)
        self._add_run(run, start)
        self._add_run(stop, end)
        taken.extend(range(start, stop))

    def _longest_run(self) -> tuple[int, int]:
        while True:
            _, start, end = self._by_length[0]
            if self._end_of.get(start) == end:
                return start, end
            heapq.heappop(self._by_length)

    def _add_run(self, start: int, end: int) -> None:
        if start == end:
            return
        self.num_free += end - start
        assert self.num_free <= self.num_slots, f"slots [{start}, {end}) were free already"
        before, after = self._start_of.pop(start, start), self._end_of.pop(end, end)
        if before != start:
            del self._end_of[before]
        if after != end:
            del self._start_of[after]
        self._end_of[before], self._start_of[after] = after, before
        if len(self._by_length) > 4 * len(self._end_of) + 64:
            self._by_length = [(s - e, s, e) for s, e in self._end_of.items()]
            heapq.heapify(self._by_length)
        else:
            heapq.heappush(self._by_length, (before - after, before, after))

    def _remove_run(self, start: int) -> int:
        end = self._end_of.pop(start)
        del self._start_of[end]
        self.num_free -= end - start
        return end

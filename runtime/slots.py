"""KV slots: which are free and which are allocated.

A slot is the place of one token's keys and values, in every layer at once. The pool hands out slot
numbers, whole pages at a time (a page is `page_size` consecutive slots, often one), and in
contiguous runs where it can: attention reads a run as one block of memory. It does not know which
tokens are in the slots, nor who holds them.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from itertools import pairwise

from .errors import OutOfSlots


class SlotPool:
    """Every page is either free or allocated, never both; neighbouring free pages are one free run."""

    def __init__(self, num_slots: int, page_size: int = 1) -> None:
        """`num_slots` must be a multiple of `page_size`."""
        assert num_slots % page_size == 0, f"{num_slots} slots are not whole pages of {page_size}"
        self.num_slots = num_slots
        self.page_size = page_size
        self._free_pages = 0
        self._end_of: dict[int, int] = {}    # first page of a free run -> one past its last
        self._start_of: dict[int, int] = {}  # one past the last page of a free run -> its first
        self._eaten: set[int] = set()        # free runs that follow what was allocated last there: it may still grow
        self._by_length: list[tuple[int, int, int]] = []  # heap of (-length, start, end); entries go stale
        self._add_run(0, num_slots // page_size)

    @property
    def num_free(self) -> int:
        """Free slots, all of them in whole free pages."""
        return self._free_pages * self.page_size

    def allocate(self, count: int, *, after: int | None = None) -> array[int]:
        """Take `count` slots, whole pages, the first of them next to slot `after` if that one is free.

        A new run begins where the longest free one does; or in its middle, if what lies before that was
        allocated since and may still grow in place.

        Raises:
            OutOfSlots: fewer than `count` are free; then none is taken.
        """
        if count > self.num_free:
            raise OutOfSlots(wanted=count, free=self.num_free)
        size = self.page_size
        missing = count // size
        assert missing * size == count, f"{count} slots are not whole pages of {size}"
        taken: array[int] = array("i")
        if after is not None and (page := (after + 1) // size) in self._end_of:
            missing -= self._take(page, page, missing, taken)
        while missing:
            run, end = self._longest_run()
            start = run + max(0, end - run - missing) // 2 if run in self._eaten else run
            missing -= self._take(run, start, missing, taken)
        return taken

    def free(self, slots: Iterable[int]) -> None:
        """Give whole pages of slots back; each must have been allocated."""
        ordered = sorted(slots)
        first = 0
        for i in range(1, len(ordered) + 1):
            if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
                self._add_run(ordered[first] // self.page_size, (ordered[i - 1] + 1) // self.page_size)
                first = i

    def free_slots(self) -> set[int]:
        """The free slots, for checks."""
        size = self.page_size
        return {slot for start, end in self._end_of.items() for slot in range(start * size, end * size)}

    def check(self) -> None:
        """Assert the invariant of the class."""
        runs = sorted(self._end_of.items())
        length = sum(end - start for start, end in runs)
        assert length == self._free_pages, f"free runs of {length} pages in all, counted {self._free_pages}"
        assert self._start_of == {end: start for start, end in runs}, "the two maps of free runs differ"
        assert all(a[1] < b[0] for a, b in pairwise(runs)), f"free runs touch or overlap: {runs}"
        assert self._eaten <= self._end_of.keys(), f"{self._eaten - self._end_of.keys()} are no free runs"

    def _take(self, run: int, start: int, wanted: int, taken: array[int]) -> int:
        """Move up to `wanted` pages to `taken`, from `start` on, out of the free run that begins at `run`."""
        end = self._end_of.pop(run)
        stop = min(end, start + wanted)
        self._free_pages -= stop - start
        if run < start:
            self._end_of[run], self._start_of[start] = start, run
            heapq.heappush(self._by_length, (run - start, run, start))
        else:
            self._eaten.discard(run)
        if stop < end:
            self._eaten.add(stop)
            self._end_of[stop], self._start_of[end] = end, stop
            if run < start or stop - start > 1:  # else the old entry is good enough, see `_longest_run`
                heapq.heappush(self._by_length, (stop - end, stop, end))
        else:
            del self._start_of[end]
        taken.extend(range(start * self.page_size, stop * self.page_size))
        return stop - start

    def _longest_run(self) -> tuple[int, int]:
        """About the longest: a run that was eaten into page by page from its start is found under its old length."""
        while True:
            _, start, end = self._by_length[0]
            real = self._start_of.get(end)
            if real == start:
                return start, end
            heapq.heappop(self._by_length)
            if real is not None and real > start:
                heapq.heappush(self._by_length, (real - end, real, end))

    def _add_run(self, start: int, end: int) -> None:
        if start == end:
            return
        self._free_pages += end - start
        assert self._free_pages * self.page_size <= self.num_slots, f"pages [{start}, {end}) were free already"
        before, after = self._start_of.pop(start, start), self._end_of.pop(end, end)
        if before != start:
            del self._end_of[before]
        if after != end:
            del self._start_of[after]
            self._eaten.discard(end)
        self._end_of[before], self._start_of[after] = after, before
        if len(self._by_length) > 4 * len(self._end_of) + 64:
            self._by_length = [(s - e, s, e) for s, e in self._end_of.items()]
            heapq.heapify(self._by_length)
        else:
            heapq.heappush(self._by_length, (before - after, before, after))

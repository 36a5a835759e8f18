"""The work of a step for the compiled kernel: rows, the slots they attend to, and a key head, in stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from . import Level

Int32 = NDArray[np.int32]

MOST_LANES = 144
"""Rows times heads of a unit at most: scores of a block and outputs should stay in the near caches."""

FEWEST_LANES = 48
"""Parts of fewer lanes are not worth it: a tile of the kernel has so many."""

EVEN = 4
"""With so many units for each thread it does not matter that one has a unit more."""


@dataclass(frozen=True, slots=True)
class Units:
    """What `ragged.kernel` takes: a stage is a level, as the levels of a row are merged one after the other."""

    units: Int32   # [U, 6]: first row, end row, first and end of the slots, key head, causal
    stages: Int32  # [S + 1]
    slots: Int32
    work: int      # query-key pairs

    @property
    def keys_read(self) -> int:
        """Tokens whose keys and values are read, counted once for each unit that reads them, of one key head."""
        spans = self.units[self.units[:, 4] == 0]
        return int((spans[:, 3] - spans[:, 2]).sum())


def units_of(levels: Sequence[Level], num_kv: int, repeat: int, window: int | None, threads: int) -> Units:
    """The units of some levels.

    Args:
        repeat: query heads a key head.
        window: as of `AttnSpec`; of a causal level's rows.
        threads: that share the work: a group is cut into parts for all of them.
    """
    found: list[tuple[int, int, int, int, bool]] = []
    ends, slots, offset, work = [0], [], 0, 0
    for level in levels:
        rows, pages, last = level.qo_indptr.tolist(), level.kv_indptr.tolist(), level.last_page_len.tolist()
        page = level.page_size
        indices = level.kv_indices.numpy()
        slots.append(indices if page == 1 else (indices[:, None] * page + np.arange(page, dtype=np.int32)).reshape(-1))
        for group, (first, end) in enumerate(pairwise(rows)):
            start, stop = offset + pages[group] * page, offset + (pages[group + 1] - 1) * page + last[group]
            if first == end or start >= stop:
                continue
            work += (end - first) * (stop - start)
            for r0, r1 in pairwise(_parts(first, end, num_kv, repeat, threads)):
                seen_to = stop - (end - r1) if level.causal else stop
                seen_from = start
                if level.causal and window is not None:
                    seen_from = max(start, seen_to - (r1 - r0 - 1) - window)
                found.append((r0, r1, seen_from, seen_to, level.causal))
        ends.append(len(found) * num_kv)
        offset += len(slots[-1])
    units = np.empty((len(found), num_kv, 6), np.int32)
    if found:
        table = np.array(found, np.int32)[:, None]
        units[..., :4], units[..., 5:] = table[..., :4], table[..., 4:]
        units[..., 4] = np.arange(num_kv, dtype=np.int32)
    return Units(units.reshape(-1, 6), np.array(ends, np.int32), np.concatenate(slots), work * num_kv * repeat)


def _parts(first: int, end: int, num_kv: int, repeat: int, threads: int) -> list[int]:
    """Where a group's rows are cut: into parts of about the same size, for the caches and for the threads."""
    rows = end - first
    if rows == 1:
        return [first, end]
    parts = -(-rows // max(1, MOST_LANES // repeat))
    most = min(rows, rows * repeat // FEWEST_LANES)
    while parts < most and parts * num_kv % threads and parts * num_kv < EVEN * threads:
        parts += 1  # each reads the keys again, but threads that wait for another do nothing
    return [first + rows * part // parts for part in range(parts + 1)]

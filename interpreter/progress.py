"""How far a batch is: a bar of tqdm, or nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What is told when more is done. Called by one thread at a time."""

    def update(self, count: int) -> object: ...
    def close(self) -> None: ...


class NoProgress:
    """For who does not want to see any."""

    def update(self, count: int) -> None: ...
    def close(self) -> None: ...


def progress_of(total: int, *, shown: bool) -> Progress:
    """Where it is to be shown, a bar on the terminal or in the notebook."""
    if not shown:
        return NoProgress()
    from tqdm.auto import tqdm

    bar: Progress = tqdm(total=total, unit=" programs")
    return bar

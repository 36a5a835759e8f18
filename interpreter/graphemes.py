"""Pieces of text cut between what a reader sees as characters.

A family of emoji, a flag or a letter with accents is several characters of Python. Which belong together
(an extended grapheme cluster, UAX 29) is what `regex` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import regex

from .changes import Wait

LONGEST = 64
"""A cluster may go on without end; one that is longer than this is not waited for."""

_CLUSTER = regex.compile(r"\X")


def whole_graphemes(steps: Iterable[str | Wait]) -> Iterator[str | Wait]:
    """The same text in pieces that end where a cluster does; the last of them waits until something follows it.

    What is held back when `steps` raises comes before the exception.
    """
    held = ""
    try:
        for step in steps:
            if isinstance(step, Wait):
                yield step
                continue
            held += step
            end = _start_of_last(held)
            if end:
                yield held[:end]
                held = held[end:]
    except Exception:
        if held:
            yield held
        raise
    if held:
        yield held


def _start_of_last(text: str) -> int:
    """Where the last cluster begins, or the end of the text if that is too long to wait for."""
    start: int = 0
    for match in _CLUSTER.finditer(text):
        start = match.start()
    return start if len(text) - start <= LONGEST else len(text)

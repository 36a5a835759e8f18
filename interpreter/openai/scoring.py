"""Choices scored by a server that gives the log-probabilities of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import ServerError


def rows_of(answer: Any, prompt: str, choices: Sequence[str]) -> list[list[float]]:
    """The log-probabilities of each choice's tokens, from one echoed prompt for each.

    Where a token holds the end of the prompt and the beginning of some choice, it counts, and so does what the others
    have in its place: all rows begin at the same character.

    Raises:
        ServerError: the answer does not have them.
    """
    given = {choice.index: choice for choice in getattr(answer, "choices", None) or []}
    spans = []
    for index, choice in enumerate(choices):
        said = getattr(given.get(index), "logprobs", None)
        if said is None or not said.text_offset or not said.token_logprobs:
            raise ServerError("the server sends no log-probabilities of the prompt, by which choices are scored", 200)
        end = len(prompt) + len(choice)
        starts = [start for start in said.text_offset if start < end]
        values = said.token_logprobs[: len(starts)]
        spans.append(list(zip(starts, [*starts[1:], end], values, strict=True)))
    begin = min(start for span in spans for start, end, _ in span if end > len(prompt))
    rows = [[value for start, _, value in span if start >= begin] for span in spans]
    if any(value is None for row in rows for value in row) or not all(rows):
        raise ServerError("the first token of a text has no log-probability: write something before select()", 200)
    return rows

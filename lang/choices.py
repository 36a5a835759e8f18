"""Which of several texts is the likeliest, from the log-probabilities of their tokens.

Pure functions of numbers: each choice is the list of its tokens' log-probabilities, in order, each
given everything before it. The rules:

`token_length_normalized`
    A choice's score is the mean of its log-probabilities, so that long choices are not at a
    disadvantage. The highest mean wins.

`greedy_token_selection`
    The choice that greedy decoding would write if it could write nothing else. Position by
    position, of the choices still in, those with the likeliest token stay; one that has ended
    stands there with its mean. A choice's score is the number of positions it stayed in.

Of equals the first wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import assert_never

from .ops import ChoicesMethod

TIE = 1e-5
"""Log-probabilities this close are the same token's: one computed twice may differ in the last bits."""


def decide(method: ChoicesMethod, logprobs: Sequence[Sequence[float]]) -> tuple[int, tuple[float, ...]]:
    """The index of the winner, and a score for each choice, the higher the better."""
    scores = score(method, logprobs)
    return scores.index(max(scores)), scores


def score(method: ChoicesMethod, logprobs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """A score for each choice, the higher the better."""
    assert all(logprobs), f"every choice needs at least one token: {[len(row) for row in logprobs]}"
    assert not any(math.isnan(value) for row in logprobs for value in row), "a log-probability is not a number"
    match method:
        case "token_length_normalized":
            return tuple(_mean(row) for row in logprobs)
        case "greedy_token_selection":
            return _positions_survived(logprobs)
        case _:
            assert_never(method)


def _positions_survived(logprobs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    survived = [0.0] * len(logprobs)
    still_in = list(range(len(logprobs)))
    for position in range(max(map(len, logprobs))):
        here = {i: _at(logprobs[i], position) for i in still_in}
        best = max(here.values())
        still_in = [i for i in still_in if here[i] >= best - TIE]
        for i in still_in:
            survived[i] += 1
    return tuple(survived)


def _at(row: Sequence[float], position: int) -> float:
    return row[position] if position < len(row) else _mean(row)


def _mean(row: Sequence[float]) -> float:
    return math.fsum(row) / len(row)

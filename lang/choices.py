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

`unconditional_likelihood_normalized`
    A choice's score is the mean of how much likelier its tokens are here than at the beginning of a
    text, with nothing before them: so a choice gains nothing from being common. The highest wins. (Gao,
    "Multiple Choice Normalization in LM Evaluation", 2021; there it is the sum.)

Of equals the first wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, assert_never

from .ops import ChoicesMethod

TIE = 1e-5
"""Log-probabilities this close are the same token's: one computed twice may differ in the last bits."""


Rows: TypeAlias = Sequence[Sequence[float]]


def decide(method: ChoicesMethod, logprobs: Rows, alone: Rows | None = None) -> tuple[int, tuple[float, ...]]:
    """The index of the winner, and a score for each choice, the higher the better.

    Args:
        alone: the log-probabilities of the same tokens with nothing before them, for the method that compares.
    """
    scores = score(method, logprobs, alone)
    return scores.index(max(scores)), scores


def score(method: ChoicesMethod, logprobs: Rows, alone: Rows | None = None) -> tuple[float, ...]:
    """A score for each choice, the higher the better."""
    assert all(logprobs), f"every choice needs at least one token: {[len(row) for row in logprobs]}"
    assert not any(math.isnan(value) for row in logprobs for value in row), "a log-probability is not a number"
    match method:
        case "token_length_normalized":
            return tuple(_mean(row) for row in logprobs)
        case "greedy_token_selection":
            return _positions_survived(logprobs)
        case "unconditional_likelihood_normalized":
            assert alone is not None, "what the tokens have alone is missing"
            return tuple(_mean(here) - _mean(there) for here, there in zip(logprobs, alone, strict=True))
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

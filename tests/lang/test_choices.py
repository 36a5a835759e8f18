from __future__ import annotations

import math

import pytest

from branchwise.lang.choices import decide


def test_the_highest_mean_wins_whatever_the_lengths() -> None:
    index, scores = decide("token_length_normalized", [[-1.0], [-0.5, -0.7, -0.9], [-0.5, -2.0]])
    assert index == 1
    assert scores == pytest.approx((-1.0, -0.7, -1.25))


def test_greedy_follows_the_likeliest_token_and_not_the_mean() -> None:
    good_start, good_mean = [-0.1, -9.0], [-0.2, -0.2]
    assert decide("greedy_token_selection", [good_mean, good_start]) == (1, (0.0, 2.0))
    assert decide("token_length_normalized", [good_mean, good_start])[0] == 0


def test_greedy_compares_a_choice_that_has_ended_by_its_mean() -> None:
    short, long_likely, long_unlikely = [-1.0], [-1.0, -0.5], [-1.0, -1.5]
    assert decide("greedy_token_selection", [short, long_likely]) == (1, (1.0, 2.0))
    assert decide("greedy_token_selection", [short, long_unlikely]) == (0, (2.0, 1.0))


def test_a_common_first_token_computed_twice_does_not_decide() -> None:
    assert decide("greedy_token_selection", [[-1.0000001, -0.1], [-1.0, -3.0]])[0] == 0


def test_what_is_likely_anywhere_gains_nothing() -> None:
    here, alone = [[-1.0, -1.0], [-2.0]], [[-1.0, -1.0], [-5.0]]
    assert decide("token_length_normalized", here)[0] == 0
    index, scores = decide("unconditional_likelihood_normalized", here, alone)
    assert index == 1
    assert scores == pytest.approx((0.0, 3.0))


def test_of_equals_the_first_wins() -> None:
    assert decide("token_length_normalized", [[-1.0], [-1.0]])[0] == 0
    assert decide("greedy_token_selection", [[-1.0], [-1.0]])[0] == 0


def test_an_impossible_choice_loses() -> None:
    for method in ("token_length_normalized", "greedy_token_selection"):
        assert decide(method, [[-math.inf], [-50.0]])[0] == 1


def test_a_choice_without_tokens_or_with_nan_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="every choice needs at least one token"):
        decide("token_length_normalized", [[-1.0], []])
    with pytest.raises(AssertionError, match="not a number"):
        decide("token_length_normalized", [[math.nan]])

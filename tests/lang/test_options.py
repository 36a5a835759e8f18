from __future__ import annotations

import pytest

from branchwise.lang import FALLBACK, GenOptions, OptionError
from branchwise.lang.options import DEFAULT_NAMES, OPTION_NAMES, checked_defaults


def test_what_is_said_last_in_the_order_of_asking_does_not_count() -> None:
    call, run, backend = GenOptions(max_tokens=1), GenOptions(max_tokens=2, seed=2), GenOptions(seed=3, top_p=0.3)
    assert call.over(run.over(backend)) == GenOptions(max_tokens=1, seed=2, top_p=0.3)


def test_what_is_not_said_is_filled_with_the_fallback() -> None:
    assert GenOptions(seed=1).filled() == GenOptions(
        seed=1, max_tokens=256, temperature=1.0, top_p=1.0, n=1, stop=(), stop_regex=(), ignore_eos=False, heal=True,
        on_truncate="keep",
    )  # fmt: skip


def test_a_call_can_turn_off_the_stops_and_top_k_of_its_run() -> None:
    call, run = GenOptions(stop=(), top_k=-1), GenOptions(stop=("x",), top_k=5)
    assert call.over(run).filled() == FALLBACK


def test_only_what_fits_every_gen_may_be_a_default() -> None:
    assert set(OPTION_NAMES) - set(DEFAULT_NAMES) == {"n", "regex", "choices", "json_schema", "grammar"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "must be a dict of options, got 3 (int)."),
        ({"max_token": 3}, ": there is no option max_token. Did you mean max_tokens? Known: max_tokens, "),
        ({"zzz": 3}, ": there is no option zzz. Known: max_tokens, "),
        ({5: 3}, ": there is no option 5. Known: max_tokens, "),
        ({"n": 2}, ": n says what one gen is, so it belongs to its call. Known: max_tokens, "),
        ({"regex": "a"}, ": regex says what one gen is, so it belongs to its call. Known: max_tokens, "),
        ({"choices": ["a"]}, ": choices says what one gen is, so it belongs to its call. Known: max_tokens, "),
        ({"max_tokens": 0}, ": max_tokens must be at least 1, got 0."),
    ],
)
def test_a_default_that_is_none_is_refused_with_the_known_ones(given: object, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        checked_defaults("Engine(defaults=...)", given)
    assert (
        str(caught.value)
        .replace("Engine(defaults=...) ", "Engine(defaults=...)")
        .startswith(f"Engine(defaults=...){message}")
    )


def test_defaults_are_options() -> None:
    assert checked_defaults("Engine(defaults=...)", {"max_tokens": 3, "stop": "."}) == GenOptions(
        max_tokens=3, stop=(".",)
    )

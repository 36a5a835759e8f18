from __future__ import annotations

from branchwise.lang import FALLBACK, GenOptions
from branchwise.lang.options import DEFAULT_NAMES


def test_what_is_said_last_in_the_order_of_asking_does_not_count() -> None:
    call, run, backend = GenOptions(max_tokens=1), GenOptions(max_tokens=2, seed=2), GenOptions(seed=3, top_p=0.3)
    assert call.over(run.over(backend)) == GenOptions(max_tokens=1, seed=2, top_p=0.3)


def test_what_is_not_said_is_filled_with_the_fallback() -> None:
    assert GenOptions(seed=1).filled() == GenOptions(
        seed=1, max_tokens=256, temperature=1.0, top_p=1.0, n=1, stop=(), ignore_eos=False
    )


def test_a_call_can_turn_off_the_stops_and_top_k_of_its_run() -> None:
    call, run = GenOptions(stop=(), top_k=-1), GenOptions(stop=("x",), top_k=5)
    assert call.over(run).filled() == FALLBACK


def test_only_what_fits_every_gen_may_be_a_default() -> None:
    assert DEFAULT_NAMES == ("max_tokens", "stop", "temperature", "top_p", "top_k", "seed", "ignore_eos")

"""Tokens drawn for many rows at once are those that `sample` draws for each."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchwise.runtime import draws
from branchwise.runtime.draws import Draw, HostDrawer, loading_kernel
from branchwise.runtime.errors import ConstraintError, EngineError
from branchwise.runtime.penalties import Penalties, Repeated
from branchwise.runtime.request import Request
from branchwise.runtime.sampling import SamplingParams, sample

END = 3


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    assert loading_kernel().result() is not None, "there is no compiled code to test"


def request(sampling: SamplingParams, **options: Any) -> Request:
    prompt = array("i", [5, 6, 7])
    return Request(tokens=prompt, num_prompt=3, on_done=lambda _: None, sampling=sampling, **options)


def drawn(logits: Tensor, *requests: Request) -> list[int | Exception]:
    rows = [Draw(one, row % len(logits)) for row, one in enumerate(requests)]
    return HostDrawer(frozenset({END})).draw(logits, rows)


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-3, 0.3, 1.0, 3.0, 1e4]),
        "top_p": st.sampled_from([1e-6, 0.2, 0.5, 0.9, 0.9999, 1.0]),
        "top_k": st.sampled_from([None, 1, 2, 40, 1000, 10**9]),
        "min_p": st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
    }
)


@settings(max_examples=400, deadline=None)
@given(
    options=st.lists(OPTIONS, min_size=1, max_size=8),
    size=st.sampled_from([1, 7, 128, 129, 5000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0, 1000.0]),
    forbidden=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_compiled_code_draws_what_sample_draws(
    options: list[dict[str, float]], size: int, spread: float, forbidden: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(options), size, generator=generator) * spread
    logits = torch.round(logits, decimals=2)  # so that some are equal
    barred = torch.rand(len(options), size, generator=generator) < forbidden
    barred[:, seed % size] = False
    logits.masked_fill_(barred, -torch.inf)
    requests = [request(SamplingParams(seed=seed, sample=i, **one)) for i, one in enumerate(options)]  # type: ignore[arg-type]
    expected = [sample(row, one.sampling, 3) for row, one in zip(logits, requests, strict=True)]
    assert drawn(logits, *requests) == expected


def test_without_compiled_code_the_same_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    requests = [request(SamplingParams(seed=7, sample=i, top_p=0.8)) for i in range(16)]
    expected = drawn(logits, *requests)
    monkeypatch.setattr(draws, "kernel_for", lambda logits: None)
    assert drawn(logits, *requests) == expected
    assert len(set(expected)) > 4


def test_scores_that_are_no_numbers_fail_their_own_request() -> None:
    logits = torch.zeros(3, 100)
    logits[1] = torch.nan
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=3)):
        first, second, third = drawn(logits, *(request(params) for _ in range(3)))
        assert isinstance(first, int) and isinstance(third, int)
        assert isinstance(second, EngineError) and "not numbers (nan)" in str(second)


def test_a_request_that_changes_its_scores_leaves_the_row_to_others() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 9.0, 3.0]])
    greedy = SamplingParams(temperature=0)
    biased = request(greedy, repeated=Repeated(Penalties(bias={0: 100.0})))
    long = request(greedy, min_tokens=1)
    stopping = request(greedy, min_tokens=1, stop_ids=frozenset({4}))
    rows = [Draw(one, 0) for one in (biased, long, stopping, request(greedy))]
    assert HostDrawer(frozenset({END})).draw(logits, rows) == [0, 4, 1, 3]
    assert logits.tolist() == [[1.0, 2.0, 0.0, 9.0, 3.0]]


def test_nothing_left_to_draw_is_an_error_of_that_request() -> None:
    barred = request(SamplingParams(), repeated=Repeated(Penalties(bias=dict.fromkeys(range(5), float("-inf")))))
    error, fine = drawn(torch.zeros(1, 5), barred, request(SamplingParams()))
    assert isinstance(error, ConstraintError)
    assert isinstance(fine, int)


def test_penalties_are_those_of_their_definitions() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, 3.0])
    tokens = [0, 1, 2, 2]  # the last two were generated
    changed = logits.clone()
    penalties = Penalties(repetition=2.0, frequency=0.25, presence=0.125, bias={4: -1.0})
    repeated = Repeated(penalties)
    repeated.apply(changed, tokens, 2)
    assert changed.tolist() == [1.0, -4.0, 0.5 - 2 * 0.25 - 0.125, 0.5, 2.0]
    changed = logits.clone()
    repeated.apply(changed, [*tokens, 4], 2)  # one more
    assert changed.tolist() == [1.0, -4.0, 0.5 - 2 * 0.25 - 0.125, 0.5, 1.5 - 0.25 - 0.125 - 1.0]


def test_a_bias_of_negative_infinity_is_never_drawn(tiny_model: Path) -> None:
    from branchwise.runtime import Engine

    with Engine(tiny_model, num_slots=512) as engine:
        barred = {token: float("-inf") for token in range(0, engine.model.vocab_size, 2)}
        result = engine.generate("one", max_tokens=40, seed=1, logit_bias=barred, ignore_eos=True)
        assert all(token % 2 for token in result.tokens)

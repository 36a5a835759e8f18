"""Log-probabilities of prompts and of what is generated are transformers', whatever was cached and however it ran."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from branchwise.runtime import Engine, Logprob, Result

PROMPT = "A tree of branches: one, two, three, and many more of them below"


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture(
    params=[{}, {"max_step_tokens": 5, "max_running": 5}, {"jump_forward": False}, {"page_size": 4}], ids=str
)
def engine(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(tiny_model, num_slots=1024, **request.param) as engine:
        yield engine
        engine.check()
        assert engine.stats.protected_slots == 0


def expected(reference: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """[T - 1, V]: of what follows each token but the last."""
    with torch.inference_mode():
        logprobs: torch.Tensor = reference(torch.tensor([list(tokens)])).logits[0, :-1].log_softmax(-1)
    return logprobs


def close(found: Sequence[Logprob], wanted: torch.Tensor, tokens: Sequence[int], top: int) -> None:
    assert [one.token for one in found] == list(tokens)
    for one, row in zip(found, wanted, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-3)
        best = row.topk(top)
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert [token for token, _ in one.top] == best.indices.tolist()


def whole(engine: Engine, result: Result) -> array[int]:
    return engine.prompt_tokens(PROMPT) + array("i", result.tokens)


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"seed": 3}, {"temperature": 0, "regex": "[a-c]{3}( is)* forced text"}], ids=str
)
def test_they_are_transformers_cold_and_warm(
    engine: Engine, reference: PreTrainedModel, options: dict[str, object]
) -> None:
    asked = {"max_tokens": 40, "top_logprobs": 3, "logprob_start": 0, **options}
    plain = engine.generate(PROMPT, max_tokens=40, **options)
    for _ in range(2):
        result = engine.generate(PROMPT, **asked)
        tokens, count = whole(engine, result), result.prompt_tokens
        wanted = expected(reference, tokens)
        assert result.prompt_logprobs is not None and result.logprobs is not None
        close(result.prompt_logprobs, wanted[: count - 1], tokens[1:count], 3)
        close(result.logprobs, wanted[count - 1 :], tokens[count:], 3)
        assert result.tokens == plain.tokens  # asking changes nothing
        engine.reset_cache()
    assert plain.logprobs is None


def test_they_are_of_generated_tokens_alone_if_only_those_are_asked_for(engine: Engine) -> None:
    result = engine.generate(PROMPT, max_tokens=5, temperature=0, return_logprob=True)
    assert result.prompt_logprobs == ()
    assert result.logprobs is not None
    assert [one.token for one in result.logprobs] == list(result.tokens)
    assert all(one.top == () for one in result.logprobs)


def test_a_healed_seam_has_them_too(engine: Engine, reference: PreTrainedModel) -> None:
    for prompt in ("the bran", "one, tw", PROMPT):
        result = engine.generate(prompt, max_tokens=6, temperature=0, heal=True, return_logprob=True, ignore_eos=True)
        given = engine.prompt_tokens(prompt)
        tokens = given[: len(given) - result.healed] + array("i", result.tokens)
        wanted = expected(reference, tokens)[len(given) - result.healed - 1 :]
        assert result.logprobs is not None
        close([Logprob(one.token, one.logprob) for one in result.logprobs], wanted, result.tokens, 0)


def test_forced_tokens_have_them_if_they_are_asked_for(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=1024) as engine:
        for asked in (False, True):
            result = engine.generate("x", regex="forced text and no other", return_logprob=asked, temperature=0)
            assert result.forced_tokens > 3
            assert (result.logprobs is None) == (not asked)
            assert result.logprobs is None or len(result.logprobs) == len(result.tokens)

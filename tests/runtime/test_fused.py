"""All layers by one compiled function: the same numbers as layer by layer, whoever takes part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from branchwise.runtime import Engine, Result, compiling
from branchwise.runtime.model import fused, fused_kernel
from branchwise.runtime.model.fused import FusedLayers, panels

from ..conftest import MakeTiny
from ..golden.test_cache_never_changes_answers import prompts


class Steps:
    """Counts the steps of engines that take the compiled function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        forward = FusedLayers.forward

        def counted(layers: FusedLayers, x: torch.Tensor, angles: Any, step: Any) -> torch.Tensor:
            self.rows.append(len(x))
            return forward(layers, x, angles, step)

        monkeypatch.setattr(FusedLayers, "forward", counted)


def answers(folder: Path, **options: Any) -> list[Result]:
    with Engine(folder, num_slots=2048, **options) as engine:
        layers = engine.model._fused  # type: ignore[attr-defined]  # a part of Llama models
        if layers is not None:
            assert layers.loading.result() is not None
        found: list[Result] = []
        for prompt in prompts(5):
            found += engine.generate(prompt, n=3, seed=1, max_tokens=10, top_logprobs=2, logprob_start=0)
        engine.check()
        return found


def close(found: list[Result], expected: list[Result]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert said(ours) == pytest.approx(said(theirs), abs=1e-5)


def said(result: Result) -> list[float]:
    assert result.logprobs is not None and result.prompt_logprobs is not None
    return [one.logprob for one in (*result.prompt_logprobs, *result.logprobs)]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("kind", ["llama", "mistral", "smollm3"])
def test_it_gives_what_the_layers_give(
    make_tiny: MakeTiny, kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        found = answers(make_tiny(kind))
    assert {1, 3} < set(steps.rows)
    count = len(steps.rows)
    monkeypatch.setattr(fused, "fits", lambda *_: False)
    close(found, answers(make_tiny(kind)))
    assert len(steps.rows) == count


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma2", "gemma3"])
def test_models_that_it_does_not_know_go_layer_by_layer(
    make_tiny: MakeTiny, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    answers(make_tiny(kind))
    assert not steps.rows


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_it_is_for_float32_alone(tiny_model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    answers(tiny_model, **options)
    assert not steps.rows


def test_panels_hold_the_matrix() -> None:
    for outputs in (1, 48, 49, 143):
        matrices = [torch.randn(outputs, 5) for _ in range(2)]
        found = panels(matrices, 48)
        assert found.shape == (2, -(-outputs // 48), 5, 48)
        for panel, matrix in zip(found, matrices, strict=True):
            rows = torch.from_numpy(panel).transpose(1, 2).reshape(-1, 5)
            assert torch.equal(rows[:outputs], matrix)
            assert not rows[outputs:].any()


def test_without_a_compiler_the_layers_do_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ImportError("no numba")

    expected = answers(tiny_model)
    monkeypatch.setattr(fused_kernel, "kernel", fails)
    monkeypatch.setattr(compiling, "_said", [])
    for _ in range(2):
        with Engine(tiny_model, num_slots=2048) as engine:
            layers = engine.model._fused  # type: ignore[attr-defined]  # a part of Llama models
            assert layers.loading.result() is None
            result = engine.generate(prompts(5)[0], n=3, seed=1, max_tokens=10, top_logprobs=2, logprob_start=0)
            assert [one.tokens for one in result] == [one.tokens for one in expected[:3]]
    assert caplog.text.count("no compiled code, so all is slower: ImportError('no numba')") == 1

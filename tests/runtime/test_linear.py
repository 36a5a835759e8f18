"""Packed matrices: the product they make, when the dense copy is taken, and where packing is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from branchwise.runtime import CacheError, Engine, RequestError
from branchwise.runtime.model.linear import (
    MOST_COPIED,
    Dense,
    Packed,
    Reordered,
    Storage,
    check_quantization,
    dense,
    reorders,
)
from branchwise.runtime.model.llama import LlamaModel
from branchwise.runtime.model.quantize import to_int4, to_int8

from ..conftest import MakeTiny

Bits = Literal["int8", "int4"]
BITS: list[Bits] = ["int8", "int4"]
CPU = torch.device("cpu")
PROMPT = [3 + i * 7 % 390 for i in range(100)]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def values(bits: Bits, weight: torch.Tensor) -> torch.Tensor:
    return (to_int4(weight) if bits == "int4" else to_int8(weight)).values()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
def test_the_product_is_that_of_the_weights_on_their_grid(bits: Bits, dtype: torch.dtype, copies: bool) -> None:
    weight, bias = rand(96, 64), rand(96).to(dtype)
    linear = Storage(dtype, CPU, bits, copies, packed_rows=4).linear(weight, bias)
    for rows in (0, 1, 4, 5, 40):
        x = rand(rows, 128).to(dtype)[:, :64]  # a part of something wider, as a backend of attention may give it
        out = linear(x)
        assert out.dtype == dtype and out.shape == (rows, 96)
        wanted = x.float() @ values(bits, weight).t() + bias.float()
        torch.testing.assert_close(out.float(), wanted, rtol=2**-7, atol=2**-4)


@pytest.mark.parametrize("bits", BITS)
def test_few_rows_take_the_packed_weights_and_many_the_copy(bits: Bits) -> None:
    weight = rand(96, 64)
    packed = Storage(torch.float32, CPU, bits, copies=True, packed_rows=4).linear(weight)
    assert isinstance(packed, Packed) and packed.copy is not None
    x = rand(5, 64)
    assert torch.equal(packed(x[:4]), packed.product(x[:4].bfloat16()).float())
    assert torch.equal(packed(x), packed.copy(x)) and not torch.equal(packed(x), packed.product(x.bfloat16()).float())


def test_a_tied_head_is_packed_and_what_it_embeds_is_what_it_multiplies_with() -> None:
    weight = rand(48, 64)
    embedding, head = Storage(torch.float32, CPU, "int4").tied(weight)
    assert torch.equal(embedding, values("int8", weight))
    torch.testing.assert_close(head(torch.eye(64))[:, :48], embedding.t(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dense_product_is_that_of_torch_in_whatever_order_its_weights_are(dtype: torch.dtype) -> None:
    weight, bias = rand(48, 64).to(dtype), rand(48).to(dtype)
    for linear, added in ((dense(weight), None), (dense(weight, bias), bias)):
        assert isinstance(linear, Reordered if reorders(dtype) else Dense)
        for rows in (0, 1, 3, 40):
            x = rand(rows, 64).to(dtype)
            torch.testing.assert_close(linear(x), F.linear(x, weight, added))


def test_without_onednn_a_dense_matrix_stays_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.runtime.model.linear.reorders", lambda dtype: False)
    assert isinstance(dense(rand(48, 64)), Dense)


def test_an_embedding_too_large_for_a_second_one_is_the_head_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.runtime.model.linear.MOST_COPIED", 1000)
    embedding, head = Storage(torch.float32, CPU).tied(rand(48, 64))
    assert isinstance(head, Dense) and head.weight is embedding


# -------------------------------------------------------------------------------------------------- in an engine


@pytest.mark.parametrize(("bits", "most"), [("int8", 0.15), ("int4", 1.5)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_an_engine_scores_nearly_as_it_does_with_dense_weights(
    kind: str, bits: Bits, most: float, make_tiny: MakeTiny
) -> None:
    scores = {}
    for quantization in (None, bits):
        with Engine(make_tiny(kind), num_slots=256, dtype="float32", quantization=quantization) as engine:
            scores[quantization] = torch.tensor(engine.score(PROMPT[:1], [PROMPT[1:]])[0])
    difference = (scores[bits] - scores[None]).abs()
    assert 0 < float(difference.mean()) < most


def test_a_cache_of_packed_weights_is_not_for_dense_ones(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, num_slots=128, quantization="int4") as engine:
        engine.generate(PROMPT[:20], max_tokens=1)
        assert engine.save_cache(tmp_path / "cache") > 0
        assert repr(engine).startswith(f"Engine({str(tiny_model)!r}, torch.float32, int4, cpu, ")
    with Engine(tiny_model, num_slots=128) as engine, pytest.raises(CacheError, match="as int4"):
        engine.load_cache(tmp_path / "cache")


def test_small_models_keep_copies_and_large_ones_do_not(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def packed() -> Packed:
        with Engine(tiny_model, num_slots=16, quantization="int4") as engine:
            assert isinstance(engine.model, LlamaModel)
            linear = engine.model._layers[0].down
            assert isinstance(linear, Packed)
            return linear

    assert MOST_COPIED == 1 << 30
    assert packed().copy is not None
    monkeypatch.setattr("branchwise.runtime.model.llama.MOST_COPIED", 1000)
    assert packed().copy is None


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {"quantization": "int3"}, "Engine: quantization must be int8, int4 or None, got 'int3'."),
        ("llama", {"quantization": 4}, "Engine: quantization must be int8, int4 or None, got 4."),
        (
            "gpt2",
            {"quantization": "int4"},
            "Engine: quantization 'int4' is for models like Llama, and gpt2 runs on transformers' own code. "
            "Leave it out.",
        ),
        (
            "llama",
            {"quantization": "int8", "device": "meta"},
            "Engine: quantization 'int8' is for device \"cpu\", and this engine runs on meta. Leave it out.",
        ),
    ],
)
def test_a_quantization_that_does_not_apply_is_refused_before_weights_are_read(
    kind: str, options: dict[str, Any], message: str, make_tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any) -> None:
        pytest.fail("weights were read")

    folder = make_tiny(kind)
    monkeypatch.setattr("branchwise.runtime.model.weights._tensor", read)
    monkeypatch.setattr("branchwise.runtime.model.transformers.load_weights", read)
    with pytest.raises(RequestError) as caught:
        Engine(folder, num_slots=64, **options)
    assert str(caught.value) == message


def test_sizes_that_make_no_whole_groups_are_named() -> None:
    with pytest.raises(RequestError) as caught:
        check_quantization("int4", CPU, {"hidden size": 64, "inner size": 100})
    assert str(caught.value) == (
        "Engine: quantization 'int4' packs weights in groups of 32, and this model's inner size of 100 is no multiple "
        "of that. Leave it out, or use another model."
    )


def test_a_torch_without_the_operator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.runtime.model.linear.OPERATORS", {"int8": ("_gone",)})
    with pytest.raises(RequestError, match=r"^Engine: quantization 'int8' needs _gone, which torch .* has not\. Use "):
        check_quantization("int8", CPU, {})


TEXT = (
    "The river runs past the old mill and under the bridge; nobody knows how deep it is there. A language model gives "
    "probabilities to sequences of tokens. In the nineteenth century, steam engines changed the way people travelled."
)


@pytest.mark.slow
def test_the_demo_model_packed_is_about_as_near_to_its_file_as_in_bfloat16(demo_model: Path) -> None:
    with safe_open(demo_model / "model.safetensors", framework="pt") as file:
        weight = file.get_tensor("model.layers.0.mlp.down_proj.weight").float()
    if (to_int4(weight).values() - weight).square().mean() > 1e-5 * weight.square().mean():
        pytest.skip("this copy of the demo model does not come from a file of 4 bits")

    def scores(**options: Any) -> torch.Tensor:
        with Engine(demo_model, num_slots=1024, **options) as engine:
            tokens = engine.prompt_tokens(TEXT)
            return torch.tensor(engine.score(tokens[:1], [tokens[1:]])[0])

    exact = scores(dtype="float32")

    def moved(**options: Any) -> float:
        return float((scores(**options) - exact).abs().mean())

    rounded = moved(dtype="bfloat16")
    assert moved(dtype="float32", quantization="int4") < 1.5 * rounded < 0.1
    assert moved(dtype="bfloat16", quantization="int4") < 2.5 * rounded
    assert moved(dtype="float32", quantization="int8") < 4 * rounded

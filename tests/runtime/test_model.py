"""Models against transformers: families, kinds of positions, and weights that are not as they should be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from branchwise.runtime import Engine, WeightsError
from branchwise.runtime.model.llama import LlamaModel
from branchwise.runtime.model.transformers import TransformersModel
from branchwise.runtime.model.weights import Weights

from ..conftest import MakeTiny

PROMPT = [3 + i * 7 % 390 for i in range(200)]
LEAN = ["llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma2", "gemma3"]
PLACES = [1, 64, 150, 199]


def wanted(folder: Path) -> torch.Tensor:
    """Log-probabilities of each token of the prompt but the first, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logprobs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def found(engine: Engine) -> torch.Tensor:
    return torch.tensor(engine.score(PROMPT[:1], [PROMPT[1:]])[0])


@pytest.mark.parametrize("kind", [*LEAN, "gemma", "gpt2"])
def test_every_position_has_the_log_probability_of_transformers_cold_and_warm(kind: str, make_tiny: MakeTiny) -> None:
    folder = make_tiny(kind)
    with Engine(folder, num_slots=512) as engine:
        lean = kind in LEAN
        assert isinstance(engine.model, LlamaModel if lean else TransformersModel)
        for _ in range(2):
            torch.testing.assert_close(found(engine), wanted(folder), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda rope: "-".join(map(str, rope.values())),
)
def test_scaled_positions_are_those_of_transformers(rope: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0, "rope_scaling": rope}))
    with Engine(tmp_path, num_slots=512) as engine:
        assert isinstance(engine.model, LlamaModel)
        torch.testing.assert_close(found(engine)[PLACES[:-1]], wanted(tmp_path)[PLACES[:-1]], rtol=0, atol=1e-3)


def changed(tiny_model: Path, tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of the model with tensors replaced, added, or (None) left out."""
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("lm_head.weight", None, "1 weights do not fit the configuration: missing lm_head.weight."),
        ("model.layers.0.mlp.down_proj.weight", None, "missing model.layers.0.mlp.down_proj.weight"),
        ("model.norm.weight", torch.zeros(3), r"model.norm.weight has shape \(3,\), not \(64,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    name: str, tensor: torch.Tensor | None, message: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=message):
        Engine(changed(tiny_model, tmp_path, **{name: tensor}), num_slots=64)


def reconfigured(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a model's folder with some values of its configuration changed; all gone if one is `...`."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text("{}" if ... in changes.values() else json.dumps({**config, **changes}))
    return to


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"all": ...}, ' has no "model_type", so there is no telling what to run. Fetch it again.'),
        (
            {"model_type": "foo"},
            f": transformers {transformers.__version__} knows no model of type 'foo'. "
            "Update transformers, or use another model.",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "nope", "factor": 2}},
            f" asks for 'nope', which transformers {transformers.__version__} does not know. "
            "Update transformers, or use another model.",
        ),
        (
            {"num_attention_heads": 3},
            " cannot be used (Class validation error for validator 'validate_architecture': ValueError: The hidden "
            "size (64) is not a multiple of the number of attention heads (3)). Correct it, or fetch it again.",
        ),
        (
            {"max_position_embeddings": "x"},
            " cannot be used (Validation error for field 'max_position_embeddings': TypeError: Field "
            "'max_position_embeddings' expected int, got str (value: 'x')). Correct it, or fetch it again.",
        ),
    ],
    ids=["empty", "model_type", "rope", "heads", "positions"],
)
def test_a_configuration_that_cannot_be_run_is_named(
    changes: dict[str, Any], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = reconfigured(tiny_model, tmp_path, **changes)
    with pytest.raises(WeightsError) as caught:
        Engine(folder, num_slots=64)
    assert str(caught.value) == f"{folder / 'config.json'}{message}"


def test_weights_that_do_not_fit_transformers_own_code_are_named(make_tiny: MakeTiny, tmp_path: Path) -> None:
    folder = reconfigured(make_tiny("gpt2"), tmp_path, n_positions=64)
    with pytest.raises(WeightsError, match=r"^.*: 1 weights do not fit .*: transformer\.wpe\.weight has shape .*, not"):
        Engine(folder, num_slots=64)


def test_a_shard_without_what_its_index_says_is_named(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    names = load_file(tiny_model / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "one.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"other": torch.zeros(1)}, tmp_path / "one.safetensors")
    with pytest.raises(WeightsError, match=r"one\.safetensors cannot be read \(.*\)\. Delete it and fetch"):
        Engine(tmp_path, num_slots=64)


@pytest.mark.parametrize("head", [None, torch.randn(400, 64)], ids=["without", "with"])
def test_a_tied_model_with_or_without_a_head_in_its_file_is_that_of_transformers(
    head: torch.Tensor | None, tiny_model: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_model, tmp_path, **{"extra.weight": torch.ones(2), "lm_head.weight": head})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with Engine(folder, num_slots=512) as engine:
        torch.testing.assert_close(found(engine), wanted(folder), rtol=0, atol=1e-3)


def test_sharded_weights_are_taken_as_their_index_says(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    stray = {name: torch.zeros_like(t) for name, t in load_file(tiny_model / "model.safetensors").items()}
    save_file(stray, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Engine(tmp_path, num_slots=512) as engine:
        torch.testing.assert_close(found(engine), wanted(tiny_model), rtol=0, atol=1e-3)


def test_a_recurrent_model_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = MambaConfig(vocab_size=400, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="mamba: layers of kind linear_attention keep a recurrent state"):
        Engine(tmp_path, num_slots=64)


@pytest.mark.parametrize("kind", LEAN)
def test_the_lean_model_and_transformers_own_code_agree(kind: str, make_tiny: MakeTiny) -> None:
    folder, cpu = make_tiny(kind), torch.device("cpu")
    config = AutoConfig.from_pretrained(folder)
    lean = LlamaModel(Weights(folder, torch.float32, cpu), config, dtype=torch.float32, device=cpu)
    general = TransformersModel(folder, config, dtype=torch.float32, device=cpu)
    assert lean.specs == general.specs
    assert (lean.vocab_size, lean.context_length) == (general.vocab_size, general.context_length)

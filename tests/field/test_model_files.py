"""Theme 12: loading models. Each test is a case, by its number; more of them are in `tests/runtime/test_model.py`."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from branchwise import Engine
from branchwise.runtime import RequestError, WeightsError

PROMPT = list(range(10, 40))


def answer(folder: Path, **options: Any) -> list[int]:
    with Engine(folder, num_slots=512, **options) as engine:
        return list(engine.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True).tokens)


def copy_of(folder: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    known = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**known, **config}))
    return to


def test_145_a_tensor_that_nobody_asked_for_is_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_model, tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "extra.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert answer(folder) == answer(tiny_model)


def test_146_what_lies_beside_the_shards_is_not_read(tiny_model: Path, tmp_path: Path) -> None:
    """A stray file of all weights, another one, and in a shard a stale copy of what the index gives to another."""
    folder = copy_of(tiny_model, tmp_path)
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = [names[: len(names) // 2], names[len(names) // 2 :]]
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-0000{number}-of-00002.safetensors"
        index |= dict.fromkeys(shard, file)
        stale = {name: zeros[name] for name in shards[number % 2][:1]}
        save_file({name: weights[name] for name in shard} | stale, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for stray in ("model.safetensors", "consolidated.safetensors"):
        save_file(zeros, folder / stray, metadata={"format": "pt"})
    assert answer(folder) == answer(tiny_model)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00002\.safetensors"):
        Engine(folder, num_slots=64)


def write_gguf(folder: Path, tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    """A tiny Llama as llama.cpp's converter would write it, in float32; rows of queries and keys in its order."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(str(file), "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    control = [int(gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL) for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(control)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in weights.items():
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_148_a_gguf_file_has_the_tokens_and_the_answers_of_what_it_was_made_from(
    tiny_model: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    write_gguf(tiny_model, tiny_tokenizer, tmp_path / "tiny.gguf")
    with Engine(tmp_path / "tiny.gguf", num_slots=512) as engine:
        assert len(engine.tokenizer.encode("<|im_start|>", at_start=False, control=True)) == 1
        for text in ("The river runs", " past\n\n", "12 + 30 = 42", "Straße 漢字 😀", "<|im_end|>not"):
            for control in (False, True):
                wanted = tiny_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not control)
                assert list(engine.tokenizer.encode(text, at_start=False, control=control)) == wanted
        result = engine.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    assert list(result.tokens) == answer(tiny_model)


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "no such kind"}])
def test_149_positions_of_a_kind_that_is_not_known_are_refused_or_transformers_own(
    rope: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_model, tmp_path, rope_parameters={**rope, "rope_theta": 10000.0})
    if rope["rope_type"] != "dynamic":
        with pytest.raises(WeightsError, match=rope["rope_type"]):
            answer(folder)
        return
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.tensor([PROMPT])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, 30:].tolist() == answer(folder)


@pytest.mark.parametrize("saved", ["float16", "bfloat16"])
def test_151_a_checkpoint_in_16_bits_runs_in_32_on_a_cpu_unless_told_otherwise(
    saved: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_model, tmp_path, dtype=saved)
    weights = {name: t.to(getattr(torch, saved)) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with Engine(folder, num_slots=64) as engine:
        assert engine.model.dtype == torch.float32
        assert "torch.float32" in repr(engine)
    assert len(answer(folder, dtype="float16")) == 12


def test_152_padding_does_not_matter_and_ids_beyond_the_vocabulary_are_refused(
    tiny_model: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for padding in (-1, 400, None):
        folder = copy_of(tiny_model, tmp_path, pad_token_id=padding)
        with Engine(folder, num_slots=512) as engine:
            prompts = [PROMPT[:length] for length in (1, 9, 30)]
            alone = [engine.generate(p, max_tokens=4, temperature=0, ignore_eos=True).tokens for p in prompts]
            engine.reset_cache()
            assert [engine.generate(p, max_tokens=4, temperature=0, ignore_eos=True).tokens for p in prompts] == alone
    larger = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    larger.add_tokens(["<one more>", "<two more>"])
    larger.save_pretrained(folder)
    with Engine(folder, num_slots=64) as engine, pytest.raises(RequestError, match=r"40[01] is not a token id of this"):
        engine.generate("a <two more>", max_tokens=1)

"""A GGUF file to a model folder: weights dequantised once, tokenizer rebuilt.

Values are kept in float32. A 4-bit weight is `scale * quant + minimum` of two half-precision numbers,
which needs more digits than bfloat16 or float16 has: float32 is the smallest type that changes none.

An engine with `quantization="int4"` packs what was Q4_0 or Q4_1 again, each weight on the step where the file has it
(`model.quantize` says how exactly): it computes with the file's own four bits. What was Q8_0 has no such way back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from .errors import WeightsError


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of the file `gguf` to `folder`: safetensors, configuration, tokenizer, chat template."""
    location: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**location)
    tokenizer = AutoTokenizer.from_pretrained(**location)
    _restore_pre_tokenizer(gguf, tokenizer)
    model = _load_weights(gguf, config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load_weights(gguf: Path, config: Any) -> Any:
    """The model with every weight as a dense float32 tensor.

    The empty model only gives the names: transformers' own loader would ask for one more package to do the same.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    content = load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )
    missing = set(model.load_state_dict(content["tensors"], strict=False, assign=True).missing_keys)
    model.tie_weights()
    if config.tie_word_embeddings:
        missing.discard("lm_head.weight")
    if missing:
        raise WeightsError(f"{gguf.name}: no tensor for {', '.join(sorted(missing))}; the file is incomplete.")
    return model


def _restore_pre_tokenizer(gguf: Path, tokenizer: Any) -> None:
    """Split digits as the model was trained to: the file says so by a name that transformers does not read."""
    field = GGUFReader(str(gguf)).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )

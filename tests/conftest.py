"""Models for the tests: tiny random ones made on the spot, and the demo model where it can be had."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client: tests need no network
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch, as `branchwise.runtime` does

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from branchwise.runtime import probe
from branchwise.runtime.errors import ModelNotFound
from branchwise.runtime.models import resolve

# A shell that starts the tests in the background has them ignore Ctrl-C, and Python then raises nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("branchwise", deadline=None)
settings.load_profile("branchwise")

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = """
The river runs past the old mill and under the bridge; nobody knows how deep it is there. "How deep?" asked the child.
system user assistant: You are a helpful assistant. Answer with yes or no. Tip 1, tip 2, tip 3: sleep well, eat well.
To be, or not to be, that is the question. What is the capital of France? The capital of France is Paris, of Italy Rome.
Questions and answers, one a line: 12 + 30 = 42, 7 * 6 = 42, 98 - 56 = 42. {"name": "Ada", "born": 1815, "poet": false}
for i in range(10): print(i, "is a number") # and a comment, in the end
Straße, naïve, señor, 漢字, Ελλάδα, 😀
"""

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
GEMMA_SIZES: dict[str, Any] = {
    **SIZES,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24,
}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
}
GPT2_SIZES: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 2048,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **ids: LlamaConfig(**SIZES, **ids),
    "qwen2": lambda **ids: Qwen2Config(**SIZES, **ids),
    "qwen3": lambda **ids: Qwen3Config(**SIZES, **ids),
    "mistral": lambda **ids: MistralConfig(**SIZES, sliding_window=8, **ids),
    "smollm3": lambda **ids: SmolLM3Config(**SIZES, no_rope_layers=[1, 0], **ids),
    "gemma": lambda **ids: GemmaConfig(**SIZES, **ids),
    "gemma2": lambda **ids: Gemma2Config(**GEMMA_SIZES, attn_logit_softcapping=5.0, final_logit_softcapping=4.0, **ids),
    "gemma3": lambda **ids: Gemma3TextConfig(**GEMMA_SIZES, rope_parameters=GEMMA3_ROPES, **ids),
    "gpt2": lambda **ids: GPT2Config(**GPT2_SIZES, **ids),
}

MakeTiny = Callable[[str], Path]


@pytest.fixture(scope="session", autouse=True)
def _no_probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A machine whose probe takes no time, and finds float32 and torch's own threads the fastest."""
    slower = {"float32": [1.0] * len(probe.ROWS), "bfloat16": [2.0] * len(probe.ROWS)}
    packed = {"int8": [0.5, 0.5, 0.5, 1.0, 2.0], "int4": [0.5, 0.5, 0.5, 1.0, 2.0]}
    folder = tmp_path_factory.mktemp("probe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "measure", lambda: probe.Speeds(slower | packed, {"2": slower["float32"]}))
        patch.setattr(probe, "cache_folder", lambda: folder)
        yield


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 400 tokens with ChatML's control tokens and template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[EOS],
        pad_token=SPECIALS[0],
        chat_template=CHAT_TEMPLATE,
    )


def save_tiny(kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A tiny random model of a kind, in float32; always the same one."""
    config = CONFIGS[kind](vocab_size=len(tokenizer), bos_token_id=BOS, eos_token_id=EOS, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> MakeTiny:
    """A function from a kind of model to the folder of a tiny random one, in float32; made once each."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(f"tiny-{kind}")
            save_tiny(kind, made[kind], tiny_tokenizer)
        return made[kind]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_tiny: MakeTiny) -> Path:
    """The folder of a tiny random Llama: 2 layers, 4 query and 2 key heads, 400 tokens."""
    return make_tiny("llama")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of smollm2-135m; without it the test is skipped, or fails where `CI` is set."""
    try:
        return resolve("smollm2-135m")
    except ModelNotFound as error:
        if os.environ.get("CI"):
            pytest.fail(f"the demo model must be there in CI: {error}", pytrace=False)
        pytest.skip(f"no demo model: {error}")

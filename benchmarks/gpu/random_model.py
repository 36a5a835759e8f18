"""Engines over random weights: for speed, what weights mean makes no difference, and nothing need be fetched.

Weights are made where the model runs: a model of 8 billion of them is there in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from branchwise.runtime import Engine
from branchwise.runtime.model.configuration import read_config
from branchwise.runtime.model.llama import LlamaModel

ENDS = 2
"""The id of the end token: what is generated ignores it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of Llama's architecture."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv: int
    size: int
    vocab: int = 128_256

    def config(self, **more: Any) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv,
            head_dim=self.size,
            max_position_embeddings=32_768,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=ENDS,
            **more,
        )

    @property
    def weights(self) -> int:
        """Those that a decode step reads: the embedding is not among them."""
        attention = self.hidden * self.size * 2 * (self.heads + self.kv)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocab * self.hidden

    def kv_bytes(self, itemsize: int) -> int:
        """Of one token."""
        return self.layers * 2 * self.kv * self.size * itemsize

    def prefill_flops(self, rows: int) -> int:
        """Of a prompt of so many tokens: products with all weights but the head, and attention, half of the square."""
        products = 2 * rows * (self.weights - self.vocab * self.hidden)
        return products + self.layers * self.heads * self.size * 2 * rows * rows


ONE_B = Shape("1B", 16, 2048, 8192, 32, 8, 64)
EIGHT_B = Shape("8B", 32, 4096, 14_336, 32, 8, 128)
SMALL = Shape("small", 2, 256, 512, 4, 2, 64, vocab=40_960)


class RandomWeights:
    """Normal numbers of a small size, and ones for norms."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return not name.endswith("bias")

    def get(self, name: str, *shape: int) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, **self._options)
        return torch.empty(shape, **self._options).normal_(std=0.02, generator=self._generator)

    def optional(self, name: str, *shape: int) -> Tensor | None:
        return self.get(name, *shape) if name in self else None

    def stacked(self, prefix: str, heights: dict[str, int], width: int) -> Tensor:
        return self.get("", sum(heights.values()), width)

    def check(self) -> None:
        """Nothing can be missing."""


def write_folder(folder: Path, shape: Shape) -> Path:
    """A configuration and a tokenizer of single bytes, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    shape.config().save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(words[:3])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder)
    return folder


def random_engine(folder: Path, shape: Shape, **options: Any) -> Engine:
    """An engine like any other, but for where its weights come from."""

    def load(folder: Path, *, dtype: torch.dtype, device: torch.device, **_: None) -> LlamaModel:
        return LlamaModel(RandomWeights(dtype, device), read_config(folder), dtype=dtype, device=device)

    patched = {"load_model": load, "resolve": Path}  # there are no weights to be found in the folder
    with mock.patch.multiple("branchwise.runtime.engine", **patched):
        return Engine(write_folder(folder / shape.name, shape), **options)

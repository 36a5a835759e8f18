"""A loaded causal language model: rows of a step in, logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..attention import Attention, AttnSpec
from ..kv import KVPool


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one forward pass needs beside the weights. All tensors on the model's device.

    tokens, positions, write_slots: int64 [T]; logit_rows: int64 [L].
    """

    tokens: Tensor
    positions: Tensor
    write_slots: Tensor
    logit_rows: Tensor
    attention: Attention
    pool: KVPool


class Model(Protocol):
    """A causal language model whose state is keys and values, token by token."""

    specs: tuple[AttnSpec, ...]  # one a layer
    vocab_size: int              # rows of the logits; token ids are below it
    context_length: int          # positions it was made for
    dtype: torch.dtype
    device: torch.device

    def forward(self, step: StepInput) -> Tensor:
        """Write the K/V of all rows, layer by layer, and return float32 logits [L, V] of `logit_rows`."""

"""The Llama family without detours: Llama, Mistral, Qwen2, Qwen3 and what is built like them.

The projections that read the same input are one matrix, K and V go straight to the pool, and only
the rows whose logits are wanted go through the head. T rows, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..attention import AttnSpec
from . import StepInput
from .linear import MOST_COPIED, Linear, Quantization, Storage, check_quantization
from .weights import Weights

FAMILY = {"llama", "mistral", "qwen2", "qwen3"}
ROPES = {"default", "linear", "llama3", "yarn"}
"""Kinds of position embedding whose angles depend on the position alone."""


def fits(config: Any) -> bool:
    """Whether a model of this configuration is one of the family, in every detail that matters."""
    return (
        config.model_type in FAMILY
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and _rope(config)["rope_type"] in ROPES
        and _rope(config).get("partial_rotary_factor", 1.0) == 1.0
        and not getattr(config, "quantization_config", None)
    )


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Tensor        # [hidden]
    qkv: Linear              # hidden to (H + 2K) D
    q_norm: Tensor | None    # [D]
    k_norm: Tensor | None
    out: Linear              # H D to hidden
    mlp_norm: Tensor         # [hidden]
    gate_up: Linear          # hidden to 2 inner
    down: Linear             # inner to hidden


class LlamaModel:
    """A model of the family behind the `Model` protocol."""

    def __init__(
        self,
        folder: Path,
        config: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        packed_rows: int = 16,
    ) -> None:
        """Load the model in `folder`, for whose configuration `fits` is true.

        Args:
            packed_rows: steps of more rows than this use dense copies of quantised weights, if they are small enough.

        Raises:
            WeightsError: a weight is missing or has another shape than the configuration says.
            RequestError: its matrices cannot be quantised so.
        """
        self.dtype, self.device = dtype, device
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self._num_heads: int = config.num_attention_heads
        self._num_kv: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._eps: float = config.rms_norm_eps
        self.specs = tuple(
            AttnSpec(self._num_heads, self._num_kv, self._head_dim, self._head_dim**-0.5, _window(config, layer))
            for layer in range(config.num_hidden_layers)
        )
        frequencies, self._rope_scale = _frequencies(config, device)
        self._frequencies = frequencies                                         # [D / 2]
        hidden, inner = config.hidden_size, config.intermediate_size
        query, key = self._num_heads * self._head_dim, self._num_kv * self._head_dim
        if quantization is not None:
            sizes = {"hidden size": hidden, "inner size": inner, "size of queries": query, "size of keys": key}
            check_quantization(quantization, device, sizes)
        num_weights = config.num_hidden_layers * hidden * (2 * query + 2 * key + 3 * inner)
        storage = Storage(dtype, device, quantization, num_weights * dtype.itemsize <= MOST_COPIED, packed_rows)
        weights = Weights(folder, dtype, device)
        # As transformers has it: a head in the file counts, even where the configuration says that it is tied.
        if config.tie_word_embeddings and "lm_head.weight" not in weights:
            embedding = weights.stacked("model.", {"embed_tokens": self.vocab_size}, hidden)
            self._embedding, self._head = storage.tied(embedding)
        else:
            self._embedding = weights.get("model.embed_tokens.weight", self.vocab_size, hidden)
            self._head = storage.head(weights.stacked("", {"lm_head": self.vocab_size}, hidden))
        self._layers = [
            self._layer(weights, storage, config, f"model.layers.{i}.") for i in range(config.num_hidden_layers)
        ]
        self._norm = weights.get("model.norm.weight", hidden)
        weights.check()

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Tensor:
        angles = step.positions[:, None] * self._frequencies                    # [T, D / 2]
        cos = (angles.cos() * self._rope_scale)[:, None].to(self.dtype)         # [T, 1, D / 2]
        sin = (angles.sin() * self._rope_scale)[:, None].to(self.dtype)
        x = F.embedding(step.tokens, self._embedding)                           # [T, hidden]
        for number, layer in enumerate(self._layers):
            x = x + self._attend(number, layer, self._normed(x, layer.attn_norm), cos, sin, step)
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return self._head(self._normed(x[step.logit_rows], self._norm)).float()

    def _attend(self, number: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, step: StepInput) -> Tensor:
        heads, kv = self._num_heads, self._num_kv
        qkv = layer.qkv(x).view(len(x), heads + 2 * kv, self._head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :heads] = self._normed(qkv[:, :heads], layer.q_norm)
            qkv[:, heads : heads + kv] = self._normed(qkv[:, heads : heads + kv], layer.k_norm)
        rotate(qkv[:, : heads + kv], cos, sin)
        q, k, v = torch.split(qkv, [heads, kv, kv], dim=1)                      # [T, H, D], [T, K, D], [T, K, D]
        step.pool.write(number, step.write_slots, k, v)
        attended = step.attention.forward(number, q.contiguous(), step.pool.k[number], step.pool.v[number])
        return layer.out(attended.reshape(len(x), -1))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _layer(self, weights: Weights, storage: Storage, config: Any, prefix: str) -> Layer:
        hidden, inner, head = config.hidden_size, config.intermediate_size, self._head_dim
        sizes = {"q_proj": self._num_heads * head, "k_proj": self._num_kv * head, "v_proj": self._num_kv * head}
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        biases = [weights.optional(f"{attention}{name}.bias", size) for name, size in sizes.items()]
        qkv_bias = torch.cat([bias for bias in biases if bias is not None]) if None not in biases else None
        out_bias = weights.optional(f"{attention}o_proj.bias", hidden)
        return Layer(
            attn_norm=weights.get(f"{prefix}input_layernorm.weight", hidden),
            qkv=storage.linear(weights.stacked(attention, sizes, hidden), qkv_bias),
            q_norm=weights.optional(f"{attention}q_norm.weight", head),
            k_norm=weights.optional(f"{attention}k_norm.weight", head),
            out=storage.linear(weights.stacked(attention, {"o_proj": hidden}, self._num_heads * head), out_bias),
            mlp_norm=weights.get(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=storage.linear(weights.stacked(mlp, {"gate_proj": inner, "up_proj": inner}, hidden)),
            down=storage.linear(weights.stacked(mlp, {"down_proj": hidden}, inner)),
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the halves of each head by the angles of its row, in place (RoFormer, arXiv 2104.09864).

    Args:
        x: [T, N, D].
        cos, sin: [T, 1, D / 2].
    """
    a, b = x.chunk(2, -1)
    turned = a * cos - b * sin
    b.mul_(cos).add_(a * sin)
    a.copy_(turned)


def _rope(config: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = config.rope_parameters
    return parameters


def _frequencies(config: Any, device: torch.device) -> tuple[Tensor, float]:
    """Angle of each pair of a head's dimensions per position, and what cosine and sine are scaled by."""
    kind = _rope(config)["rope_type"]
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, device)
        return frequencies.float(), float(scale)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    return 1.0 / _rope(config)["rope_theta"] ** exponents, 1.0


def _window(config: Any, layer: int) -> int | None:
    """How many keys a row of this layer sees; None: all."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return window if config.model_type == "mistral" else None
    return window if kinds[layer] == "sliding_attention" else None

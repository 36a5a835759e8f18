"""The Llama family without detours: Llama, Mistral, Qwen2 and 3, SmolLM3, Gemma 2 and 3, and what is built like them.

The projections that read the same input are one matrix, K and V go straight to the pool, and only
the rows whose logits are wanted go through the head. T rows, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import StepInput, fused
from .deterministic import DeterministicRows, RopeTable, by_row, table_of, tiled
from .family import traits
from .fused import FusedLayers, LayerMatrices
from .linear import MOST_COPIED, Linear, Quantization, Storage, check_quantization
from .rope import Rope, rope
from .rows import Angles, Rows, rows_for
from .split import Added, Split, SplitWeights
from .weights import WeightSource


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Tensor              # [hidden]
    qkv: Linear                    # hidden to (H + 2K) D
    q_norm: Tensor | None          # [D]
    k_norm: Tensor | None
    out: Linear                    # H D to hidden
    post_attn_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor               # [hidden]
    gate_up: Linear                # hidden to 2 inner
    down: Linear                   # inner to hidden
    post_mlp_norm: Tensor | None   # [hidden]


class LlamaModel:
    """A model of the family behind the `Model` protocol."""

    def __init__(
        self,
        weights: WeightSource,
        config: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        packed_rows: int = 16,
        split: Split | None = None,
        deterministic: bool = False,
    ) -> None:
        """Make the model of `weights`, whose configuration fits the family.

        Args:
            split: the share of this rank, if several compute together.
            packed_rows: steps of more rows than this use dense copies of quantised weights, if they are small enough.
            deterministic: the bits of a row's logits do not depend on the other rows (see `deterministic.py`).

        Raises:
            WeightsError: a weight is missing or has another shape than the configuration says.
            RequestError: its matrices cannot be quantised so, or not be divided so.
        """
        has = traits(config)
        if split is not None:
            has, weights = split.traits(has, config.vocab_size), SplitWeights(weights, split)
        self._traits, self._split = has, split
        self.dtype, self.device, self.specs = dtype, device, has.specs
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        if quantization is not None:
            sizes = {"hidden size": has.hidden, "inner size": has.inner}
            sizes |= {"size of queries": has.queries, "size of keys": has.keys}
            check_quantization(quantization, device, sizes)
        num_weights = has.num_layers * has.hidden * (2 * has.queries + 2 * has.keys + 3 * has.inner)
        copies = num_weights * dtype.itemsize <= MOST_COPIED
        finish = partial(tiled, dtype=dtype) if deterministic else None
        storage = Storage(dtype, device, quantization, copies, packed_rows, finish)
        # As transformers has it: a head in the file counts, even where the configuration says that it is tied.
        tied = config.tie_word_embeddings and "lm_head.weight" not in weights
        if tied and split is None:
            head = weights.stacked("model.", {"embed_tokens": self.vocab_size}, has.hidden)
            self._embedding, self._head = storage.tied(head)
        else:
            self._embedding = weights.get("model.embed_tokens.weight", self.vocab_size, has.hidden)
            if tied and split is not None:
                head = split.mine(self._embedding, 0)
            else:
                head = weights.stacked("", {"lm_head": self.vocab_size // (split.size if split else 1)}, has.hidden)
            self._head = storage.head(head)
        self._embedding_scale = float(torch.tensor(has.embedding_scale, dtype=dtype))
        fuses = quantization is None and split is None and copies and fused.fits(has, dtype, device)
        fuses = fuses and not deterministic
        self._matrices: list[LayerMatrices] | None = [] if fuses else None
        self._layers = [self._layer(weights, storage, f"model.layers.{i}.") for i in range(has.num_layers)]
        self._norm = weights.get("model.norm.weight", has.hidden) + has.norm_offset
        kinds = dict.fromkeys(kind for kind in has.ropes if kind is not None)
        ropes = {kind: rope(config, kind, has.head_dim, device) for kind in kinds}
        self._ropes: Mapping[str, Rope | RopeTable] = ropes
        if deterministic:
            self._ropes = {kind: table_of(rope, self.context_length, device) for kind, rope in ropes.items()}
        self._deterministic = deterministic
        weights.check()
        self._fused: FusedLayers | None = None
        if self._matrices:
            norms = [(layer.attn_norm, layer.mlp_norm) for layer in self._layers]
            self._fused = FusedLayers(has, self._matrices, norms, self._norm, head)
        self._matrices = None
        self._rows()

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Tensor:
        has, rows = self._traits, self._rows()
        angles = {kind: rope(step.positions, self.dtype) for kind, rope in self._ropes.items()}
        x = F.embedding(step.tokens, self._embedding)                           # [T, hidden]
        if self._embedding_scale != 1.0:
            x *= self._embedding_scale
        if self._fused is not None and self._fused.can(step):
            kind = next((kind for kind in has.ropes if kind is not None), None)
            return self._fused.forward(x, angles[kind] if kind else None, step)
        more: Tensor | None = None                                              # what the layer before adds to x
        for number, (layer, kind) in enumerate(zip(self._layers, has.ropes, strict=True)):
            normed = rows.add_norm(x, more, layer.attn_norm, has.eps)
            more = self._attend(number, layer, normed, angles[kind] if kind else None, step, rows)
            gate_up = layer.gate_up(rows.add_norm(x, more, layer.mlp_norm, has.eps))
            more = self._post_normed(layer.down(rows.gate(gate_up, has.activation)), layer.post_mlp_norm, rows)
        last = x[step.logit_rows]                                               # [L, hidden]
        normed = rows.add_norm(last, None if more is None else more[step.logit_rows], self._norm, has.eps)
        logits = self._head(normed).float()
        if self._split is not None:
            logits = self._split.join(logits)
        if has.final_softcap is None:
            return logits
        tanh = partial(by_row, torch.tanh) if self._deterministic else torch.tanh
        return tanh(logits / has.final_softcap) * has.final_softcap

    def _rows(self) -> Rows:
        return DeterministicRows(self.dtype) if self._deterministic else rows_for(self.dtype, self.device)

    def _attend(
        self, number: int, layer: Layer, x: Tensor, angles: Angles | None, step: StepInput, rows: Rows
    ) -> Tensor:
        heads, kv = self._traits.num_heads, self._traits.num_kv
        qkv = layer.qkv(x)
        if layer.q_norm is not None and layer.k_norm is not None:
            each = qkv.view(len(x), heads + 2 * kv, self._traits.head_dim)
            each[:, :heads] = rows.norm(each[:, :heads], layer.q_norm, self._traits.eps)
            keys = each[:, heads : heads + kv]
            keys.copy_(rows.norm(keys, layer.k_norm, self._traits.eps))
        q = rows.place(qkv, angles, step.write_slots, step.pool, number)
        attended = step.attention.forward(number, q, step.pool.k[number], step.pool.v[number])
        return self._post_normed(layer.out(attended.reshape(len(x), -1)), layer.post_attn_norm, rows)

    def _post_normed(self, x: Tensor, weight: Tensor | None, rows: Rows) -> Tensor:
        return x if weight is None else rows.norm(x, weight, self._traits.eps)

    def _added(self, linear: Linear) -> Linear:
        return linear if self._split is None else Added(linear, self._split)

    def _layer(self, weights: WeightSource, storage: Storage, prefix: str) -> Layer:
        has, attention, mlp = self._traits, f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, inner = has.hidden, has.inner

        def norm(name: str, size: int = hidden) -> Tensor:
            return weights.get(f"{prefix}{name}.weight", size) + has.norm_offset

        sizes = {"q_proj": has.queries, "k_proj": has.keys, "v_proj": has.keys}
        biases = [weights.optional(f"{attention}{name}.bias", size) for name, size in sizes.items()]
        qkv_bias = torch.cat([bias for bias in biases if bias is not None]) if None not in biases else None
        out_bias = weights.optional(f"{attention}o_proj.bias", hidden)
        qkv = weights.stacked(attention, sizes, hidden)
        out = weights.stacked(attention, {"o_proj": hidden}, has.queries)
        gate_up = weights.stacked(mlp, {"gate_proj": inner, "up_proj": inner}, hidden)
        down = weights.stacked(mlp, {"down_proj": hidden}, inner)
        if qkv_bias is not None or out_bias is not None:
            self._matrices = None
        if self._matrices is not None:
            self._matrices.append(LayerMatrices(qkv, out, gate_up, down))
        return Layer(
            attn_norm=norm("input_layernorm"),
            qkv=storage.linear(qkv, qkv_bias),
            q_norm=norm("self_attn.q_norm", has.head_dim) if has.head_norms else None,
            k_norm=norm("self_attn.k_norm", has.head_dim) if has.head_norms else None,
            out=self._added(storage.linear(out, out_bias)),
            post_attn_norm=norm("post_attention_layernorm") if has.post_norms else None,
            mlp_norm=norm("pre_feedforward_layernorm" if has.post_norms else "post_attention_layernorm"),
            gate_up=storage.linear(gate_up),
            down=self._added(storage.linear(down)),
            post_mlp_norm=norm("post_feedforward_layernorm") if has.post_norms else None,
        )

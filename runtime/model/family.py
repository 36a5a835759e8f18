"""What the members of the Llama family differ in, read from a configuration of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..attention import AttnSpec
from .rope import is_known, parameters_of

GEMMA = {"gemma2", "gemma3_text"}
HEAD_NORMS = {"qwen3", "gemma3_text"}
FAMILY = {"llama", "mistral", "qwen2", "qwen3", "smollm3"} | GEMMA

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Traits:
    """H query heads, K key heads, D head size, of `num_layers` layers."""

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv: int
    head_dim: int
    eps: float                   # of the norms
    norm_offset: float           # what is added to the weights of the norms
    head_norms: bool             # each head of queries and keys is normalised
    post_norms: bool             # what attention and MLP give is normalised, too
    embedding_scale: float
    activation: Callable[[Tensor], Tensor]
    final_softcap: float | None  # of the logits
    specs: tuple[AttnSpec, ...]
    ropes: tuple[str | None, ...]  # kind of layer, of those that differ in their positions; None has no positions

    @property
    def queries(self) -> int:
        """Numbers of a row's queries."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of a row's keys."""
        return self.num_kv * self.head_dim


def fits(config: Any) -> bool:
    """Whether a model of this configuration is one of the family, in every detail that matters."""
    return (
        config.model_type in FAMILY
        and _activation(config) in ACTIVATIONS
        and not getattr(config, "mlp_bias", False)
        and not getattr(config, "use_bidirectional_attention", False)
        and not getattr(config, "quantization_config", None)
        and all(is_known(parameters_of(config, kind)) for kind in _kinds(config))
    )


def traits(config: Any) -> Traits:
    """Those of a configuration that `fits`."""
    gemma, num_heads = config.model_type in GEMMA, config.num_attention_heads
    num_kv = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    scale = (config.query_pre_attn_scalar if gemma else head_dim) ** -0.5
    # A configuration of Gemma 3 has a soft cap of attention, too, which transformers' model does not apply.
    softcap = config.attn_logit_softcapping if config.model_type == "gemma2" else None
    kinds = _kinds(config)
    has_positions = getattr(config, "no_rope_layers", None) or [True] * len(kinds)
    return Traits(
        num_layers=len(kinds),
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        num_heads=num_heads,
        num_kv=num_kv,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        norm_offset=1.0 if gemma else 0.0,
        head_norms=config.model_type in HEAD_NORMS,
        post_norms=gemma,
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        activation=ACTIVATIONS[_activation(config)],
        final_softcap=config.final_logit_softcapping if gemma else None,
        specs=tuple(AttnSpec(num_heads, num_kv, head_dim, scale, _window(config, kind), softcap) for kind in kinds),
        ropes=tuple(kind if has else None for kind, has in zip(kinds, has_positions, strict=True)),
    )


def _activation(config: Any) -> str:
    name: str = config.hidden_activation if config.model_type in GEMMA else config.hidden_act
    return name


def _window(config: Any, kind: str) -> int | None:
    """How many keys a row of this kind of layer sees; None: all."""
    windowed = kind == "sliding_attention" and getattr(config, "use_sliding_window", True)
    window: int | None = config.sliding_window if windowed else None
    return window


def _kinds(config: Any) -> list[str]:
    """The kind of each layer."""
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = config.model_type == "mistral" and config.sliding_window is not None
        kinds = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    return kinds

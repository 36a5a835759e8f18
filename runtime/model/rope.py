"""Rotary position embedding (RoFormer, arXiv 2104.09864): angles from positions, applied in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

KINDS = {"default", "linear", "llama3", "yarn"}
"""Those whose angles depend on the position alone."""


@dataclass(frozen=True, slots=True)
class Rope:
    frequencies: Tensor  # float32 [D / 2]: angle of each pair of a head's dimensions per position
    scale: float         # of cosine and sine

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for int64 [T]: each [T, 1, D / 2]."""
        angles = positions[:, None] * self.frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return cos[:, None].to(dtype), sin[:, None].to(dtype)


def is_known(parameters: dict[str, Any]) -> bool:
    return parameters["rope_type"] in KINDS and parameters.get("partial_rotary_factor", 1.0) == 1.0


def parameters_of(config: Any, kind: str) -> dict[str, Any]:
    """What the configuration says of positions in layers of this kind, which may have their own."""
    parameters: dict[str, Any] = config.rope_parameters
    own: dict[str, Any] | None = parameters.get(kind)
    return own or parameters


def rope(config: Any, kind: str, head_dim: int, device: torch.device) -> Rope:
    """The embedding of layers of this kind."""
    parameters = parameters_of(config, kind)
    if parameters["rope_type"] != "default":
        options = {"layer_type": kind} if parameters is not config.rope_parameters else {}
        frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device, **options)
        return Rope(frequencies.float(), float(scale))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    return Rope(1.0 / parameters["rope_theta"] ** exponents, 1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the halves of each head by the angles of its row, in place.

    Args:
        x: [T, N, D].
        cos, sin: [T, 1, D / 2].
    """
    a, b = x.chunk(2, -1)
    turned = a * cos - b * sin
    b.mul_(cos).add_(a * sin)
    a.copy_(turned)

"""Weights on a grid of a few bits: the grids that torch's packed matmuls on a CPU can read.

A 4-bit weight is `scale * (quant - 8) + zero`, scale and zero per group of 32 of a row; an 8-bit one is
`scale * quant`, scale per row. Scale and zero are bfloat16, the type in which the matmuls are fast. They are rounded
first and the quants chosen for the rounded grid, so that a weight within its reach is at most half a step off.

A GGUF's weights of type Q4_0 and Q4_1 lie on such grids before that rounding: each stays on its step and moves by less
than a tenth of one, all of them by 0.2% (root mean square, of the weights' own). Those of type Q8_0 have a scale per 32
of a row, which the 8-bit matmul has not: they move by 0.7 to 1.2%, about twice what Q8_0 itself had moved them.
tests/runtime/test_quantize.py holds the errors to this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Weights of a row that share a 4-bit grid; the group of GGUF."""


@dataclass(frozen=True, slots=True)
class Int4:
    """quants: int32 [N, K], 0 to 15. scale, zero: bfloat16 [N, K / 32]."""

    quants: Tensor
    scale: Tensor
    zero: Tensor

    def values(self) -> Tensor:
        """The weights, float32 [N, K]."""
        groups = self.quants.view(*self.scale.shape, GROUP) - 8
        return (groups * self.scale.float()[..., None] + self.zero.float()[..., None]).view(self.quants.shape)


@dataclass(frozen=True, slots=True)
class Int8:
    """quants: int8 [N, K]. scale: bfloat16 [N]."""

    quants: Tensor
    scale: Tensor

    def values(self) -> Tensor:
        """The weights, float32 [N, K]."""
        return self.quants * self.scale.float()[:, None]


def to_int4(weight: Tensor) -> Int4:
    """The nearest of two grids for each group: one from its least to its greatest value, one around zero.

    They are those of GGUF's Q4_1 and Q4_0: the latter reaches from -8 to 7 steps, the -8 being the value furthest
    from zero, so that its step may be negative.

    Args:
        weight: [N, K], K a multiple of 32.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    step = (high - low) / 15
    furthest = torch.where(high > -low, high, low)
    best, error = _on_grid(groups, step, low + 8 * step)
    other, other_error = _on_grid(groups, furthest / -8, torch.zeros_like(low))
    better = other_error < error
    return Int4(
        torch.where(better[..., None], other.quants, best.quants).view(weight.shape),
        torch.where(better, other.scale, best.scale),
        torch.where(better, other.zero, best.zero),
    )


def _on_grid(groups: Tensor, step: Tensor, middle: Tensor) -> tuple[Int4, Tensor]:
    """Groups on the grids of these steps, as they are rounded; and each group's squared error."""
    scale, zero = step.bfloat16(), middle.bfloat16()
    wide_scale, wide_zero = scale.float()[..., None], zero.float()[..., None]
    per_step = torch.where(wide_scale == 0, 0.0, 1 / wide_scale)
    quants = ((groups - wide_zero) * per_step).round_().clamp_(-8, 7)
    error = (quants * wide_scale).add_(wide_zero).sub_(groups).square_().sum(-1)
    return Int4(quants.to(torch.int32).add_(8), scale, zero), error


def to_int8(weight: Tensor) -> Int8:
    """Symmetric around zero, with the step that just reaches the furthest value of each row.

    Args:
        weight: [N, K].
    """
    scale = (weight.abs().amax(dim=1).float() / 127).bfloat16()
    per_step = torch.where(scale == 0, 0.0, 1 / scale.float())[:, None]
    return Int8((weight.float() * per_step).round_().clamp_(-127, 127).to(torch.int8), scale)

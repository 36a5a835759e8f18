"""One rank's share of a model of the Llama family: heads and inner dimensions are divided, everything else is whole.

As in Megatron-LM (arXiv 1909.08053, section 3): matrices that make queries, keys, values, gates and logits are cut by
their outputs, those that lead back by their inputs, so that a layer adds up over the ranks twice and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import RequestError
from .family import Traits
from .linear import Linear
from .weights import WeightSource

BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
BY_INPUT = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Split:
    """Rank `rank` of `size`, and how it speaks to the others.

    add: sums a tensor over all ranks, in place.
    join: puts the parts of all ranks side by side, along the last dimension.
    """

    rank: int
    size: int
    add: Callable[[Tensor], None]
    join: Callable[[Tensor], Tensor]

    def traits(self, has: Traits, vocab_size: int) -> Traits:
        """Those of this rank's share.

        Raises:
            RequestError: something cannot be divided by the number of ranks.
        """
        parts = {"query heads": has.num_heads, "key heads": has.num_kv, "inner size": has.inner}
        parts["vocabulary"] = vocab_size
        for name, count in parts.items():
            if count % self.size:
                raise RequestError(
                    f"Engine: tensor_parallel {self.size} does not divide this model's {name} of {count}. "
                    "Use another number."
                )
        heads, kv = has.num_heads // self.size, has.num_kv // self.size
        specs = tuple(replace(spec, num_q_heads=heads, num_kv_heads=kv) for spec in has.specs)
        return replace(has, num_heads=heads, num_kv=kv, inner=has.inner // self.size, specs=specs)

    def mine(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor of the whole model."""
        return tensor.chunk(self.size, dim)[self.rank].contiguous()


class SplitWeights:
    """The weights of a model, of which a rank reads its share. It is asked for sizes of the share."""

    def __init__(self, whole: WeightSource, split: Split) -> None:
        self._whole, self._split = whole, split

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def get(self, name: str, *shape: int) -> Tensor:
        if _is_of(name, BY_OUTPUT):
            return self._split.mine(self._whole.get(name, shape[0] * self._split.size, *shape[1:]), 0)
        return self._whole.get(name, *shape)

    def optional(self, name: str, *shape: int) -> Tensor | None:
        if name not in self:
            return None
        found = self.get(name, *shape)
        alone = _is_of(name, BY_INPUT) and self._split.rank > 0  # a bias is added once, and the sums are added up
        return torch.zeros_like(found) if alone else found

    def stacked(self, prefix: str, heights: dict[str, int], width: int) -> Tensor:
        parts = []
        for name, height in heights.items():
            if name in BY_OUTPUT:
                parts.append(self._split.mine(self._whole.stacked(prefix, {name: height * self._split.size}, width), 0))
            elif name in BY_INPUT:
                parts.append(self._split.mine(self._whole.stacked(prefix, {name: height}, width * self._split.size), 1))
            else:
                parts.append(self._whole.stacked(prefix, {name: height}, width))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def check(self) -> None:
        self._whole.check()


@dataclass(frozen=True, slots=True)
class Added:
    """A matrix cut by its inputs: what the ranks make of theirs, added up."""

    part: Linear
    split: Split

    def __call__(self, x: Tensor) -> Tensor:
        out = self.part(x)
        self.split.add(out)
        return out


def _is_of(name: str, kinds: tuple[str, ...]) -> bool:
    return name.split(".")[-2] in kinds

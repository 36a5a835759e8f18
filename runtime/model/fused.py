"""Steps of few rows by one compiled function for all layers, where the model and the machine allow that.

It has its own copy of the matrices, in panels; so a model whose matrices are large does without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.cpu import CpuAttention
from ..compiling import help_with, loading
from ..devices import is_cpu
from ..models import cache_folder
from . import StepInput
from .family import Traits

Kernel = Callable[..., None]

MOST_ROWS = 64
"""Steps of more rows go layer by layer: oneDNN's products are faster then."""

MOST_LATE = 16
"""Calls for help that nobody has heard yet, while threads of the process's own keep the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """Of one layer, [outputs, inputs] each."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


def fits(has: Traits, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled function knows all that such a model does."""
    return (
        is_cpu(device)
        and dtype == torch.float32
        and has.activation is F.silu
        and not (has.head_norms or has.post_norms or has.final_softcap)
        and len(set(has.specs)) == 1
        and has.specs[0].head_dim % 4 == 0
        and len({kind for kind in has.ropes if kind is not None}) <= 1
    )


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiled function, and the matrices as it takes them."""

    kernel: Kernel
    num_counters: Callable[[int, int], int]
    panels: tuple[Any, ...]  # qkv, out, gate, up, down, head


class FusedLayers:
    """The layers and the head of one model. For one thread at a time."""

    def __init__(
        self,
        has: Traits,
        matrices: Sequence[LayerMatrices],
        norms: Sequence[tuple[Tensor, Tensor]],
        final_norm: Tensor,
        head: Tensor,
    ) -> None:
        self._has = has
        self._norms = tuple(torch.stack([pair[i] for pair in norms]).numpy() for i in range(2))
        self._final_norm = final_norm.numpy()
        self._vocab_size = len(head)
        self._turns = np.array([kind is not None for kind in has.ropes], np.int8)
        self._buffers: dict[str, Tensor] = {}
        self._helped: list[Future[None]] = []
        self.loading = loading(lambda: _compiled(has, matrices, head), "branchwise-layers-kernel")

    def can(self, step: StepInput) -> bool:
        """Whether this step is one for the compiled function, and it is loaded."""
        few = len(step.tokens) <= MOST_ROWS and 0 < len(step.logit_rows) <= MOST_ROWS
        planned = isinstance(step.attention, CpuAttention) and step.pool.stacked is not None
        return few and planned and self.loading.done() and self.loading.result() is not None

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, step: StepInput) -> Tensor:
        """Logits [L, V] of the step's wanted rows.

        Args:
            x: embeddings [T, hidden]; they are changed.
            angles: cosine and sine, [T, 1, D / 2] each.
        """
        has, spec, rows = self._has, self._has.specs[0], len(x)
        compiled, stacked = self.loading.result(), step.pool.stacked
        assert compiled is not None and stacked is not None and isinstance(step.attention, CpuAttention)
        units = step.attention.units(spec)
        cos, sin = (part.view(rows, -1).numpy() for part in angles or (x[:, : has.head_dim // 2],) * 2)
        logits = torch.empty(len(step.logit_rows), self._vocab_size)
        sizes = {
            "normed": has.hidden, "more": has.hidden, "qkv": has.queries + 2 * has.keys, "queries": has.queries,
            "attended": has.queries, "gated": has.inner, "last": has.hidden,
        }  # fmt: skip
        buffers = {name: self._buffer(name, size).numpy() for name, size in sizes.items()}
        buffers["queries"] = buffers["queries"].reshape(-1, has.num_heads, has.head_dim)
        arguments = (
            np.zeros(compiled.num_counters(has.num_layers, len(units.stages) - 1), np.int32),
            x.numpy(), *buffers.values(), *self._norms, self._final_norm, *compiled.panels,
            np.ascontiguousarray(cos), np.ascontiguousarray(sin), self._turns, step.write_slots.numpy(),
            *(pool.numpy() for pool in stacked), units.units, units.stages, units.slots,
            self._buffer("lse", has.num_heads).numpy(), spec.window or 0, np.float32(spec.scale),
            np.float32(spec.softcap or 0), np.float32(has.eps), step.logit_rows.numpy(), logits.numpy(),
        )  # fmt: skip
        self._helped = [help for help in self._helped if not help.done()]
        if len(self._helped) < MOST_LATE:
            self._helped += help_with(compiled.kernel, arguments, torch.get_num_threads())
        compiled.kernel(*arguments)
        return logits

    def _buffer(self, name: str, size: int) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(MOST_ROWS, size)
        return self._buffers[name]


def _compiled(has: Traits, matrices: Sequence[LayerMatrices], head: Tensor) -> Compiled:
    from .fused_kernel import WIDTH, kernel, num_counters

    compiled = kernel(has.head_dim, has.num_heads // has.num_kv, cache_folder() / "kernels")
    kinds = (
        [layer.qkv for layer in matrices],
        [layer.out for layer in matrices],
        [layer.gate_up[: has.inner] for layer in matrices],
        [layer.gate_up[has.inner :] for layer in matrices],
        [layer.down for layer in matrices],
    )
    found = (*(panels(kind, WIDTH) for kind in kinds), panels([head], WIDTH)[0])
    return Compiled(compiled, num_counters, found)


def panels(matrices: Sequence[Tensor], width: int) -> Any:
    """Matrices [outputs, inputs] as [matrices, panels, inputs, width], the last panel filled up with zeros."""
    outputs, inputs = matrices[0].shape
    found = np.zeros((len(matrices), -(-outputs // width), inputs, width), np.float32)
    whole = outputs // width
    for panel, matrix in zip(found, matrices, strict=True):
        numbers = matrix.float().numpy()
        panel[:whole] = numbers[: whole * width].reshape(whole, width, inputs).transpose(0, 2, 1)
        if whole < len(panel):
            panel[whole, :, : outputs - whole * width] = numbers[whole * width :].T
    return found

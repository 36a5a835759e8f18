"""One step on the model: a layout in, logits out. Where the step loop's integers become tensors on a device."""

from __future__ import annotations

from array import array
from typing import Protocol

import torch
from torch import Tensor

from .attention import Attention, AttnBatch, attn_batch, int32
from .attention.levels import CostModel
from .devices import CPU
from .kv import KVPool
from .layout import Layout
from .model import Model, StepInput


class Runner(Protocol):
    """Runs steps, one after the other, on the engine's thread."""

    @property
    def device(self) -> torch.device:
        """Where the logits are."""

    @property
    def attention_name(self) -> str:
        """Of the backend that computes attention: "cpu", "flashinfer", "triton", "reference"."""

    def forward(self, layout: Layout) -> Tensor:
        """Compute the rows of a step; float32 logits [L, V] of those wanted, until the next call."""

    def close(self) -> None:
        """Let go of what runs elsewhere. Twice is fine."""


class Replays(Protocol):
    """Recorded steps, which cost less to launch."""

    def forward(self, batch: AttnBatch, layout: Layout) -> Tensor | None:
        """As `Runner.forward`; None: this step is none of those recorded."""


class StepRunner:
    """A model on one device, its attention planned once a step."""

    def __init__(
        self,
        model: Model,
        attention: Attention,
        cost: CostModel | None,
        pool: KVPool,
        replays: Replays | None = None,
    ) -> None:
        """`cost` says when a span is worth reading once for several rows; None: never."""
        self.cost = cost
        self._model, self._attention, self._pool = model, attention, pool
        self._replays = replays

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def attention_name(self) -> str:
        return type(self._attention).__name__.removesuffix("Attention").lower()

    def forward(self, layout: Layout) -> Tensor:
        batch = attn_batch(layout, self._pool.scratch, CPU, self._pool.page_size, self.cost)
        if self._replays is not None and (logits := self._replays.forward(batch, layout)) is not None:
            return logits
        self._attention.plan(batch, self._model.specs)
        sizes = [batch.num_rows] * 3 + [len(layout.logit_rows)]
        integers = self._pool.transfers.upload(step_integers(batch, layout))
        return self._model.forward(step_input(integers, sizes, self._attention, self._pool))

    def close(self) -> None:
        """Nothing runs elsewhere."""


def step_integers(batch: AttnBatch, layout: Layout) -> Tensor:
    """Tokens, positions, write slots and wanted rows of a step, in one piece, so that they are one copy; int32."""
    together = layout.tokens + layout.positions + array("i", batch.write_slots.tolist()) + layout.logit_rows
    return int32(together)


def step_input(integers: Tensor, sizes: list[int], attention: Attention, pool: KVPool) -> StepInput:
    """What the model takes, from `step_integers` on its device."""
    tokens, positions, write_slots, logit_rows = torch.split(integers.long(), sizes)
    return StepInput(tokens, positions, write_slots, logit_rows, attention, pool)

"""The tokens of a step where the logits are on a GPU: what `draws.py` does on a CPU, without waiting in between.

The host says in plain arrays what each request changes about its row (masks as bits, penalties as few numbers), while
the GPU still computes the logits; one copy back brings all tokens. That copy is the only place where a step waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .draws import Draw, barred, no_number, nothing_left
from .penalties import BARRED, Change
from .sampling import SamplingParams, gumbel_of, noise_key
from .transfers import Transfers

FINE, NOTHING_LEFT, NO_NUMBER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Filters:
    """What is left to draw from: `SamplingParams` of some rows, on the device."""

    rows: Tensor         # int64 [F]
    temperature: Tensor  # float64 [F, 1]
    top_k: Tensor        # int64 [F, 1], V for none
    top_p: Tensor        # float64 [F, 1]
    min_p: Tensor        # float64 [F, 1]


class Operations(Protocol):
    """What is done to scores x, float32 [J, V], on their device, in place where nothing is returned."""

    def mask(self, x: Tensor, rows: Tensor, bits: Tensor) -> None:
        """-inf where a bit is 0: bit v % 32 of bits[m, v // 32] is for x[rows[m], v]; int64 [M], int32 [M, words]."""

    def keep(self, x: Tensor, filters: Filters) -> None:
        """-inf for what `top_k`, then `top_p`, and `min_p` leave out, as `sampling.sample` has it."""

    def draw(self, x: Tensor, rows: Tensor, words: Tensor, temperature: Tensor) -> Tensor:
        """Of row rows[i] the token with the greatest sum of score / temperature[i] and noise, int64 [N].

        words: int32 [N, 2], what names the draw (`sampling.noise_key`); temperature: float64 [N, 1].
        """


class DeviceDrawer:
    """Draws the tokens of one engine's steps. On the engine's thread only."""

    def __init__(self, eos_ids: frozenset[int], operations: Operations, transfers: Transfers) -> None:
        self._eos_ids = eos_ids
        self._operations = operations
        self._transfers = transfers

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int | Exception]:
        """A token for each, or why there is none.

        Args:
            logits: float32 [L, V].
        """
        plan = _Plan(draws, self._eos_ids, logits.shape[1])
        if not draws:
            return []
        tokens, told = self._transfers.read(self._launch(logits, plan)).tolist()
        return [
            plan.errors.get(i) or (token if status == FINE else _failure(draws[i], status))
            for i, (token, status) in enumerate(zip(tokens, told, strict=True))
        ]

    @torch.inference_mode()
    def _launch(self, logits: Tensor, plan: _Plan) -> Tensor:
        """int64 [2, J]: tokens, and what is wrong with those that are none."""
        operations = self._operations
        x = logits.index_select(0, self._upload(plan.rows))
        if plan.changed_rows:
            change(
                x,
                self._upload(plan.changed_rows),
                self._upload(plan.changed_tokens),
                self._upload(np.array(plan.changes, np.float32).T, np.float32),
            )
        if plan.masks:
            operations.mask(x, self._upload(plan.masked_rows), self._upload(np.stack(plan.masks), np.int32))
        highest = x.amax(-1)  # nan if one score is
        status = torch.where(highest == -torch.inf, NOTHING_LEFT, torch.where(highest.isnan(), NO_NUMBER, FINE))
        tokens = x.argmax(-1)
        if plan.drawn:
            if plan.filtered:
                operations.keep(x, self._filters(plan.filtered, x.shape[1]))
            rows = self._upload(plan.drawn)
            temperature = self._upload([[s.temperature] for s in plan.sampling], np.float64)
            tokens[rows] = operations.draw(x, rows, self._upload(plan.words, np.int32), temperature)
        return torch.stack([tokens, status])

    def _filters(self, filtered: Sequence[tuple[int, SamplingParams]], size: int) -> Filters:
        sampling = [params for _, params in filtered]
        return Filters(
            self._upload([row for row, _ in filtered]),
            self._upload([[s.temperature] for s in sampling], np.float64),
            self._upload([[size if s.top_k is None else min(s.top_k, size)] for s in sampling]),
            self._upload([[s.top_p] for s in sampling], np.float64),
            self._upload([[s.min_p] for s in sampling], np.float64),
        )

    def _upload(self, values: Sequence[object] | NDArray[np.generic], dtype: type[np.generic] = np.int64) -> Tensor:
        return self._transfers.upload(on_host(values, dtype))


class _Plan:
    """What the draws of a step ask for, in lists; the copy of the logits has a row for each draw."""

    def __init__(self, draws: Sequence[Draw], eos_ids: frozenset[int], size: int) -> None:
        self.rows = [draw.row for draw in draws]
        self.errors: dict[int, Exception] = {}  # of single requests
        self.changed_rows, self.changed_tokens = list[int](), list[int]()
        self.changes: list[Change] = []
        self.masked_rows, self.masks = list[int](), list[NDArray[np.int32]]()
        self.drawn, self.sampling, self.words = list[int](), list[SamplingParams](), list[tuple[int, int]]()
        self.filtered: list[tuple[int, SamplingParams]] = []
        for place, draw in enumerate(draws):
            try:
                self._adjust(place, draw, eos_ids, size)
            except Exception as error:
                self.errors[place] = error
            params = draw.request.sampling
            if not params.greedy:
                self.drawn.append(place)
                self.sampling.append(params)
                self.words.append(noise_key(params, len(draw.request.tokens)))
                if not params.whole:
                    self.filtered.append((place, params))

    def _adjust(self, place: int, draw: Draw, eos_ids: frozenset[int], size: int) -> None:
        request = draw.request
        if not draw.adjusted:
            return
        if request.held is not None:
            self._mask(place, request.held.masks[0], size)
            return
        changes = request.repeated.changes(request.tokens, request.num_prompt) if request.repeated else {}
        if request.constraint is not None:
            self._mask(place, request.constraint.mask(), size)
        changes |= dict.fromkeys(barred(request, eos_ids), BARRED)
        self.changed_rows += [place] * len(changes)
        self.changed_tokens += changes
        self.changes += changes.values()

    def _mask(self, place: int, allowed: Tensor, size: int) -> None:
        self.masks.append(packed(allowed, size))
        self.masked_rows.append(place)


def on_host(values: Sequence[object] | NDArray[np.generic], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype))


def packed(allowed: Tensor, size: int) -> NDArray[np.int32]:
    """A mask, bool [size], as bits: bit v % 32 of word v // 32."""
    bits = np.zeros(-(-size // 32) * 4, np.uint8)
    given = np.packbits(allowed.numpy(), bitorder="little")
    bits[: len(given)] = given
    return bits.view(np.int32)


def _failure(draw: Draw, status: int) -> Exception:
    return nothing_left(draw.request) if status == NOTHING_LEFT else no_number(draw.request)


def change(x: Tensor, rows: Tensor, tokens: Tensor, changes: Tensor) -> None:
    """Apply penalties to single scores of x [J, V] in place.

    Args:
        rows, tokens: int64 [C], of the scores, each at most once.
        changes: float32 [3, C], the parts of a `Change`.
    """
    factor, taken, added = changes
    scores = x[rows, tokens]
    x[rows, tokens] = torch.where(scores > 0, scores / factor, scores * factor) - taken + added


class TorchOperations:
    """In torch's own operators, on any device."""

    def mask(self, x: Tensor, rows: Tensor, bits: Tensor) -> None:
        shifts = torch.arange(32, dtype=torch.int32, device=x.device)
        allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : x.shape[1]] == 1  # [M, V]
        x[rows] = x[rows].masked_fill(~allowed, -torch.inf)

    def keep(self, x: Tensor, filters: Filters) -> None:
        scaled = x[filters.rows].double() / filters.temperature                         # [F, V]
        values, order = scaled.sort(dim=-1, descending=True, stable=True)  # of equal ones the first go first
        place = torch.arange(x.shape[1], device=x.device)
        values = values.masked_fill(place >= filters.top_k, -torch.inf)
        before = values.softmax(-1).cumsum(-1).roll(1, -1)
        before[:, 0] = 0.0
        least = torch.where(filters.min_p > 0, values[:, :1] + filters.min_p.log(), -torch.inf)
        kept = (before < filters.top_p) & (values > -torch.inf) & (values >= least)
        left = torch.zeros_like(kept).scatter_(1, order, kept)
        x[filters.rows] = x[filters.rows].masked_fill(~left, -torch.inf)

    def draw(self, x: Tensor, rows: Tensor, words: Tensor, temperature: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
        return (x[rows].double() / temperature + gumbel_of(tokens, words[:, :1], words[:, 1:])).argmax(-1)

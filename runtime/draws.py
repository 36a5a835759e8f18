"""The tokens of a step: what follows each row, for each request that wants it.

All rows of a step are drawn from together, by compiled code on a CPU. A row that a request may not take as it is, since
it has a constraint or penalties, is copied first: others may share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .compiling import help_with, loading
from .devices import is_cpu
from .errors import ConstraintError, EngineError, as_error
from .models import cache_folder
from .request import Request
from .sampling import noise_key, sample

Kernel = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Draw:
    """The token that follows the row `row` of the logits is wanted for `request`."""

    request: Request
    row: int

    @property
    def adjusted(self) -> bool:
        """The request cannot take the row as it is."""
        r = self.request
        return r.held is not None or r.constraint is not None or r.repeated is not None or r.num_sampled < r.min_tokens


class Drawer(Protocol):
    """Draws the tokens of one engine's steps. On the engine's thread only."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int | Exception]:
        """A token for each, or why there is none.

        Args:
            logits: float32 [L, V].
        """


class HostDrawer:
    """A `Drawer` whose rows are looked at from the host as they are drawn."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        loading_kernel()
        self._eos_ids = eos_ids

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int | Exception]:
        tokens: list[int | Exception] = [0] * len(draws)
        plain = [i for i, draw in enumerate(draws) if not draw.adjusted]
        self._fill(tokens, plain, logits, [draws[i].row for i in plain], draws)
        adjusted = [i for i, draw in enumerate(draws) if draw.adjusted]
        if adjusted:
            rows = logits[[draws[i].row for i in adjusted]]
            fine: list[int] = []
            for place, i in enumerate(adjusted):
                try:
                    self._adjust(rows[place], draws[i].request)
                except BaseException as error:  # of this request alone: compiled code may panic
                    tokens[i] = as_error(error)
                else:
                    fine.append(place)
            self._fill(tokens, [adjusted[place] for place in fine], rows, fine, draws)
        return tokens

    def _fill(
        self,
        tokens: list[int | Exception],
        places: Sequence[int],
        logits: Tensor,
        rows: Sequence[int],
        draws: Sequence[Draw],
    ) -> None:
        """Draw `tokens[i]` from row `row` for each i of `places` and row of `rows`."""
        kinds: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
        for i, row in zip(places, rows, strict=True):
            kinds[draws[i].request.sampling.greedy].append((i, row))
        for kind, choose in zip(kinds, (self._drawn, _likeliest), strict=True):
            if not kind:
                continue
            taken = [row for _, row in kind]
            found = choose(logits, taken, [draws[i].request for i, _ in kind])
            scores = logits[taken, [max(token, 0) for token in found]].tolist()
            for (i, _), token, score in zip(kind, found, scores, strict=True):
                tokens[i] = token if token >= 0 and not math.isnan(score) else no_number(draws[i].request)

    def _drawn(self, logits: Tensor, rows: list[int], requests: list[Request]) -> list[int]:
        """By chance; -1 where no score is a number."""
        kernel = kernel_for(logits)
        if kernel is None:
            return [sample(logits[row], r.sampling, len(r.tokens)) for row, r in zip(rows, requests, strict=True)]
        numbers = _of_rows(logits, rows, lambda some: ~some.sum(-1).isnan())
        if not all(numbers):  # the compiled code takes none
            kept = [i for i, fine in enumerate(numbers) if fine]
            drawn = self._drawn(logits, [rows[i] for i in kept], [requests[i] for i in kept]) if kept else []
            tokens = dict(zip(kept, drawn, strict=True))
            return [tokens.get(i, -1) for i in range(len(rows))]
        sampling = [request.sampling for request in requests]
        words = [noise_key(request.sampling, len(request.tokens)) for request in requests]
        size = logits.shape[1]
        out = np.empty(len(rows), np.int32)
        arguments = (
            logits.contiguous().numpy(),
            np.array(rows, np.int32),
            np.array(words, np.int32).view(np.uint32),
            np.array([s.temperature for s in sampling], np.float64),
            np.array([size if s.top_k is None else s.top_k for s in sampling], np.int64),
            np.array([s.top_p for s in sampling], np.float64),
            np.array([s.min_p for s in sampling], np.float64),
            np.zeros(1, np.int32),
            out,
        )
        helped = help_with(kernel, arguments, len(rows) - 1)
        kernel(*arguments)
        for future in helped:
            if not future.cancel():
                future.result()
        found: list[int] = out.tolist()
        return found

    def _adjust(self, logits: Tensor, request: Request) -> None:
        """Make `logits` [V], in place, what `request` draws from."""
        if request.held is not None:
            logits.masked_fill_(~request.held.masks[0].to(logits.device), -torch.inf)
            return
        if request.repeated is not None:
            request.repeated.apply(logits, request.tokens, request.num_prompt)
        if request.constraint is not None:
            logits.masked_fill_(~request.constraint.mask().to(logits.device), -torch.inf)
        if tokens := barred(request, self._eos_ids):
            logits[list(tokens)] = -torch.inf
        if bool((logits == -torch.inf).all()):
            raise nothing_left(request)


def barred(request: Request, eos_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that would end a request's text, as long as it shall not end."""
    if request.constraint is not None and request.constraint.is_finished:
        return frozenset()
    if request.num_sampled < request.min_tokens:
        return eos_ids | request.stop_ids
    return eos_ids if request.ignore_eos and request.constraint is not None else frozenset()


def _likeliest(logits: Tensor, rows: list[int], requests: list[Request]) -> list[int]:
    return _of_rows(logits, rows, lambda some: some.argmax(-1))


def _of_rows(logits: Tensor, rows: list[int], reduce: Callable[[Tensor], Tensor]) -> list[int]:
    """`reduce` of some rows; they are copied only if they are few of all."""
    if 2 * len(rows) < len(logits):
        few: list[int] = reduce(logits[rows]).tolist()
        return few
    of_all: list[int] = reduce(logits).tolist()
    return [of_all[row] for row in rows]


def no_number(request: Request) -> EngineError:
    return EngineError(
        f"request {request.id}: the model's scores for the next token are not numbers (nan). Its weights may be "
        "damaged, or too large for this dtype."
    )


def nothing_left(request: Request) -> ConstraintError:
    return ConstraintError(f"after {request.text!r} no token can follow in this constraint.")


def kernel_for(logits: Tensor) -> Kernel | None:
    """The compiled code for these logits, or None: there is none, or it is not loaded yet; the first call begins."""
    if not is_cpu(logits.device) or logits.dtype != torch.float32:
        return None
    kernel = loading_kernel()
    return kernel.result() if kernel.done() else None


@cache
def loading_kernel() -> Future[Kernel | None]:
    """The compiled code on its way: None if it cannot be had."""
    return loading(_compiled, "branchwise-draws-kernel")


def _compiled() -> Kernel:
    from .draw_kernel import kernel

    return kernel(cache_folder() / "kernels")

"""What a request changes about the model's scores before a token is drawn: bias, and penalties for repeating."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """In this order: `repetition` divides a positive score of a token that is in the prompt or was generated, and
    multiplies a negative one (Keskar et al. 2019, CTRL, section 4.1); `frequency` is subtracted for each time that it
    was generated, `presence` once (OpenAI's API reference, "Create completion"); `bias` is added."""

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.frequency or self.presence or self.repetition != 1.0 or self.bias)


Change: TypeAlias = tuple[float, float, float]
"""A factor that divides a positive score and multiplies another, what is then taken away, and what is then added."""

BARRED: Change = (1.0, 0.0, -math.inf)


class Repeated:
    """What one request has said so far, and what that costs."""

    def __init__(self, penalties: Penalties) -> None:
        self._penalties = penalties
        self._given: set[int] = set()  # the prompt's tokens
        self._counts: Counter[int] = Counter()  # of what was generated
        self._read = 0

    def apply(self, logits: Tensor, tokens: Sequence[int], num_prompt: int) -> None:
        """Change `logits` [V] in place, for the token that follows `tokens`, of which the first are the prompt's."""
        penalties = self._penalties
        self._read_on(tokens, num_prompt)
        if penalties.repetition != 1.0:
            seen = torch.tensor(sorted(self._given.union(self._counts)), dtype=torch.int64, device=logits.device)
            scores = logits[seen]
            logits[seen] = torch.where(scores > 0, scores / penalties.repetition, scores * penalties.repetition)
        if self._counts and (penalties.frequency or penalties.presence):
            generated = torch.tensor(list(self._counts), dtype=torch.int64, device=logits.device)
            counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype, device=logits.device)
            logits[generated] -= penalties.frequency * counts + penalties.presence
        if penalties.bias:
            biased = torch.tensor(list(penalties.bias), dtype=torch.int64, device=logits.device)
            logits[biased] += torch.tensor(list(penalties.bias.values()), dtype=logits.dtype, device=logits.device)

    def changes(self, tokens: Sequence[int], num_prompt: int) -> dict[int, Change]:
        """The same by token, for scores that are not at hand."""
        penalties = self._penalties
        self._read_on(tokens, num_prompt)
        found = dict.fromkeys(self._given, (penalties.repetition, 0.0, 0.0)) if penalties.repetition != 1.0 else {}
        for token, count in self._counts.items():
            taken = np.float32(penalties.frequency) * np.float32(count) + np.float32(penalties.presence)
            found[token] = penalties.repetition, float(taken), 0.0
        for token, bias in penalties.bias.items():
            factor, less, _ = found.get(token, (1.0, 0.0, 0.0))
            found[token] = factor, less, bias
        return found

    def _read_on(self, tokens: Sequence[int], num_prompt: int) -> None:
        self._given.update(tokens[self._read : num_prompt])
        self._counts.update(tokens[max(self._read, num_prompt) :])
        self._read = len(tokens)

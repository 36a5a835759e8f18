"""The seam between a prompt and what is generated after it.

A prompt that ends in the middle of what would be one token (`"http:"`, `"She is "`) ends in tokens that
the model has hardly ever seen in that place. So its last tokens are held back: each of them is sampled
again, among itself and the longer tokens that begin with all that is held back. The text stays what it
was; the tokens become those that the model would have written. What is held back is a draft of the
first step, so it costs no step and, if it stays, no more than its own rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .constrain import State
from .constrain.vocab import Vocab

MOST_HELD = 4
"""So many tokens at most are held back."""


@dataclass(frozen=True, slots=True)
class Held:
    """The end of a prompt that is decided again.

    tokens: what it is now, oldest first.
    masks: for each of them, which tokens may stand in its place, bool [V].
    """

    tokens: tuple[int, ...]
    masks: tuple[Tensor, ...]
    vocab: Vocab

    @property
    def size(self) -> int:
        """Bytes of all its tokens."""
        return sum(len(self.vocab.token_bytes[token]) for token in self.tokens)

    def rest(self) -> Held | None:
        """What is left to decide when the first token has stayed."""
        return Held(self.tokens[1:], self.masks[1:], self.vocab) if len(self.tokens) > 1 else None

    def advance(self, state: State, token: int) -> bool:
        """Advance a constraint by what `token`, which replaces all that is held back, says after it.

        A constraint is about text: it does not matter which tokens spell it. False: it is not allowed.
        """
        return _advance(state, self.vocab.token_bytes[token][self.size :], self.vocab)


class Healer:
    """Holds back the ends of prompts of one model. Any thread may use it."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._mask_after = lru_cache(maxsize=256)(self._mask)

    def hold_back(self, tokens: Sequence[int], most_bytes: int, state: State | None = None) -> Held | None:
        """What of the end of a prompt is worth deciding again; None if nothing is.

        The most tokens, of the last `MOST_HELD`, that a longer token begins with, and whose text is within the last
        `most_bytes` of the prompt: before that is a role's beginning, or text that was generated.

        Args:
            state: the constraint on what follows the prompt; it is not changed.
        """
        spelled = self._vocab.token_bytes
        count, text = 0, b""
        for number in range(1, min(MOST_HELD, len(tokens) - 1) + 1):  # something must come before it
            token = tokens[-number]
            text = spelled[token] + text
            if not spelled[token] or len(text) > most_bytes:
                break
            if len(_extending(text, self._vocab)) > (text in self._vocab.spellings):
                count = number
        last = tuple(tokens[len(tokens) - count :])
        masks: list[Tensor] = []
        for place, token in enumerate(last):
            text = b"".join(spelled[later] for later in last[place:])
            mask = self._mask_after(text) if state is None else self._mask(text, state)
            masks.append(mask.index_fill(0, torch.tensor([token]), True))
        if all(int(mask.sum()) == 1 for mask in masks):
            return None  # nothing else can stand there
        return Held(last, tuple(masks), self._vocab)

    def _mask(self, text: bytes, state: State | None = None) -> Tensor:
        """The tokens that begin with `text` and go on as `state` allows, bool [V]."""
        spellings = self._vocab.spellings
        longer = _extending(text, self._vocab)
        if state is not None:
            allowed = state.mask().tolist()
            longer = [s for s in longer if _can_follow(state, allowed, s[len(text) :], self._vocab)]
        mask = torch.zeros(self._vocab.size, dtype=torch.bool)
        mask[[token for spelled in longer for token in spellings[spelled]]] = True
        return mask


def _spell(data: bytes, vocab: Vocab) -> list[int] | None:
    """Tokens that are exactly `data`, long ones first; None if that leads nowhere."""
    tokens: list[int] = []
    while data:
        size = next((size for size in range(len(data), 0, -1) if data[:size] in vocab.spellings), 0)
        if not size:
            return None
        tokens.append(vocab.spellings[data[:size]][0])
        data = data[size:]
    return tokens


def _advance(state: State, data: bytes, vocab: Vocab) -> bool:
    tokens = _spell(data, vocab)
    return tokens is not None and all(state.advance(token) for token in tokens)


def _can_follow(state: State, allowed: list[bool], data: bytes, vocab: Vocab) -> bool:
    if not data:
        return True
    tokens = _spell(data, vocab)
    if tokens is None or not allowed[tokens[0]]:
        return False
    return len(tokens) == 1 or _advance(state.fork(), data, vocab)


def _extending(text: bytes, vocab: Vocab) -> list[bytes]:
    """The spellings that begin with `text`."""
    ordered = vocab.spellings_in_order
    first = bisect_left(ordered, text)
    end = bisect_left(ordered, text + b"\xff" * 8, lo=first)  # after every text that begins so
    return ordered[first:end]

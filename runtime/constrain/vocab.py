"""The vocabulary as constraints see it: what each token spells, and which tokens end a text.

Control tokens spell nothing: a pattern that holds their names is satisfied by ordinary tokens alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from outlines_core import Vocabulary

from .pattern import FENCE

# No token may hold the first byte of the fence's characters, or it could step over the fence.
FENCE_BYTE = 0xF4


class Vocab:
    """Tokens by id as bytes; b"" is a token that no text needs. An id is usable, an end, or neither."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Iterable[int],
        eos_ids: Iterable[int],
        *,
        size: int | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        """
        Args:
            size: the number of ids the model has logits for, if it is not that of `token_bytes`.
            encode: the model's own way from a text that continues another to tokens.
        """
        self._encode = encode
        self.size = len(token_bytes) if size is None else size
        self.eos_ids = tuple(sorted({token for token in eos_ids if 0 <= token < self.size}))
        never = {*special_ids, *self.eos_ids}
        known = [b"" if token in never else spelled for token, spelled in enumerate(token_bytes[: self.size])]
        self.token_bytes: list[bytes] = known + [b""] * (self.size - len(known))

    @property
    def opening(self) -> int:
        """The id of the fence before a text; like `closing` and `unused`, it lies past the model's ids."""
        return self.size

    @property
    def closing(self) -> int:
        return self.size + 1

    @cached_property
    def fingerprint(self) -> str:
        """Equal for vocabularies that a constraint cannot tell apart."""
        digest = hashlib.sha256(repr((self.size, self.eos_ids)).encode())
        for spelled in self.token_bytes:
            digest.update(len(spelled).to_bytes(4, "little") + spelled)
        return digest.hexdigest()

    @cached_property
    def spellings(self) -> dict[bytes, list[int]]:
        """Every usable spelling, with all the ids that share it."""
        spellings: dict[bytes, list[int]] = {}
        for token, spelled in enumerate(self.token_bytes):
            if spelled and FENCE_BYTE not in spelled:
                spellings.setdefault(spelled, []).append(token)
        return spellings

    @cached_property
    def spellings_in_order(self) -> list[bytes]:
        """The usable spellings, sorted: those that begin alike stand together."""
        return sorted(self.spellings)

    @cached_property
    def spelling_nothing(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The ids that no text needs."""
        return np.array([token for token, spelled in enumerate(self.token_bytes) if not spelled], dtype=np.int64)

    @cached_property
    def single_bytes(self) -> dict[int, int]:
        """The bytes that have a token of their own, and that token."""
        return {spelled[0]: tokens[0] for spelled, tokens in self.spellings.items() if len(spelled) == 1}

    def spell(self, text: str) -> list[int]:
        """The model's own tokens for `text`; others where those would say something else, as some change letters."""
        data = text.encode()
        if self._encode is not None:
            tokens = list(self._encode(text))
            if all(token < self.size for token in tokens) and self.spelled(tokens) == data:
                return tokens
        return self._spell_greedily(data)

    def spell_bytes(self, data: bytes) -> list[int]:
        """Tokens for `data`, which may begin or end inside a character."""
        try:
            return self.spell(data.decode())
        except UnicodeDecodeError:
            return self._spell_greedily(data)

    def spelled(self, tokens: Iterable[int]) -> bytes:
        """What `tokens` say."""
        return b"".join(self.token_bytes[token] for token in tokens)

    def _spell_greedily(self, data: bytes) -> list[int]:
        """The longest token first; a byte that no token is left for ends it."""
        tokens: list[int] = []
        at = 0
        while at < len(data):
            end = min(len(data), at + self._longest)
            while end > at and data[at:end] not in self.spellings:
                end -= 1
            if end == at:
                break
            tokens.append(self.spellings[data[at:end]][0])
            at = end
        return tokens

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.spellings), default=0)

    def count_first_bytes(self, alphabet: int) -> list[int]:
        """How many tokens begin with each byte, of those spelled in `alphabet` alone: the bytes whose bit is set."""
        words = torch.tensor([_word(alphabet, number) for number in range(4)])
        counts = torch.zeros(257, dtype=torch.int64)  # the last is of those outside the alphabet
        for first, held in self._byte_table:
            inside = ((held & ~words) == 0).all(dim=1)
            counts += torch.bincount(torch.where(inside, first, 256), minlength=257)
        listed: list[int] = counts[:256].tolist()
        return listed

    @cached_property
    def _byte_table(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For T usable tokens, [T] int64 the first byte, and [T, 4] int64 the set of all bytes as bits.

        In pieces so small that torch wakes no other threads: waiting for them would take longer.
        """
        tokens = [(spelled, _byte_set(spelled)) for spelled, ids in self.spellings.items() for _ in ids]
        first = torch.tensor([spelled[0] for spelled, _ in tokens], dtype=torch.int64)
        held = torch.tensor([[_word(held, number) for number in range(4)] for _, held in tokens], dtype=torch.int64)
        starts = range(0, len(first), 4096)
        return [(first[start : start + 4096], held[start : start + 4096]) for start in starts]

    @cached_property
    def fenced(self) -> Vocabulary:
        """The compiling library's vocabulary, with the two characters of the fence as tokens of their own."""
        fence = {FENCE[0].encode(): [self.opening], FENCE[1].encode(): [self.closing]}
        unused = self.size + 2  # the library wants an end token; after the closing fence nobody looks for it
        return Vocabulary(unused, {**self.spellings, **fence})

    def can_spell(self, text: str) -> bool:
        """Whether some sequence of tokens is exactly `text`."""
        try:
            data = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            return False
        if all(bytes((byte,)) in self.spellings for byte in set(data)):
            return True
        reached = [True] + [False] * len(data)
        for end in range(1, len(data) + 1):
            starts = range(max(0, end - self._longest), end)
            reached[end] = any(reached[start] and data[start:end] in self.spellings for start in starts)
        return reached[-1]


def _byte_set(data: bytes) -> int:
    return sum(1 << byte for byte in set(data))


def _word(bits: int, number: int) -> int:
    """The 64 bits of `bits` from 64 x `number` on, as the signed integer a tensor holds."""
    word = bits >> 64 * number & 0xFFFF_FFFF_FFFF_FFFF
    return word - (1 << 64) if word >> 63 else word

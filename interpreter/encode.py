"""A conversation as tokens: append-only, what was generated is never encoded again.

The text of a conversation only ever grows, or goes back to a prefix of itself when a chat template
rewrites what it said before. Text the model generated keeps the tokens it was generated with; the
constant text between is encoded in one go, so that it does not matter in how many pieces it came.

Text from users is data. Where it spells a control token (`<|im_end|>`), that spelling is *escaped*:
a noncharacter is put into it, which keeps templates and the tokenizer from taking it for the token,
and is taken out again when the characters are encoded.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

ESCAPE = "\ufdd0"  # a noncharacter: never part of a text that programs exchange


class Vocabulary(Protocol):
    """What is asked of the tokenizer; see `runtime.tokenizer`."""

    @property
    def special_texts(self) -> Iterable[str]: ...
    def encode(self, text: str, *, at_start: bool, control: bool, bos: bool = True) -> list[int]: ...


class Encoder:
    """Text in which control tokens may be escaped, to tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        spellings = sorted(filter(None, vocabulary.special_texts), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    def escape(self, text: str) -> str:
        """`text` with every spelling of a control token made plain."""
        text = text.replace(ESCAPE, ESCAPE * 2)
        return self._control.sub(lambda m: m[0][0] + ESCAPE + m[0][1:], text) if self._control else text

    def encode(self, text: str, *, at_start: bool, bos: bool) -> list[int]:
        """The tokens of escaped `text`. At the start of a conversation, with the model's BOS if `bos`."""
        if ESCAPE not in text:
            return self._vocabulary.encode(text, at_start=at_start, control=True, bos=bos)
        tokens: list[int] = []
        for piece, control in self._pieces(text):
            tokens += self._vocabulary.encode(piece, at_start=at_start, control=control, bos=bos)
            at_start = False
        return tokens

    def _pieces(self, text: str) -> Iterable[tuple[str, bool]]:
        """The text in order, as control tokens (True) and plain text (False)."""
        start = 0
        for match in self._control.finditer(text) if self._control else ():
            if match.start() > start:
                yield unescape(text[start : match.start()]), False
            yield match[0], True
            start = match.end()
        if start < len(text):
            yield unescape(text[start:]), False


def unescape(text: str) -> str:
    """The text that `Encoder.escape` was given."""
    return re.sub(f"{ESCAPE}({ESCAPE}?)", r"\1", text)


@dataclass(frozen=True, slots=True)
class TokenStream:
    """What of a conversation has become tokens. Immutable: forks share it.

    `marks` are the places, as (characters, tokens), that the stream can go back to: between constant
    and generated text.
    """

    text: str = ""  # escaped
    tokens: array[int] = field(default_factory=lambda: array("i"))
    marks: tuple[tuple[int, int], ...] = ((0, 0),)

    def reach(self, text: str, encoder: Encoder, *, bos: bool) -> TokenStream:
        """The stream of `text`: this one, from as far as the two agree on."""
        if text == self.text:
            return self
        common = len(self.text) if text.startswith(self.text) else _common_prefix(self.text, text)
        marks = [mark for mark in self.marks if mark[0] <= common]
        num_chars, num_tokens = marks[-1]
        more = encoder.encode(text[num_chars:], at_start=num_chars == 0, bos=bos)
        tokens = self.tokens[:num_tokens] + array("i", more)
        return TokenStream(text, tokens, (*marks, (len(text), len(tokens))))

    def add(self, tokens: Iterable[int], text: str) -> TokenStream:
        """The stream with generated tokens, whose escaped text is `text`, after it."""
        joined = self.tokens + array("i", tokens)
        return TokenStream(self.text + text, joined, (*self.marks, (len(self.text) + len(text), len(joined))))


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

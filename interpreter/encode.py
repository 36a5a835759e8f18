"""A conversation as tokens: append-only, what was generated is never encoded again.

The text of a conversation only ever grows, or goes back to a prefix of itself when a chat template
rewrites what it said before. Text the model generated keeps the tokens it was generated with; the
constant text between is encoded in one go, so that it does not matter in how many pieces it came.

Text from users is data. Where it spells a control token (`<|im_end|>`), that spelling is *escaped*:
noncharacters are put into it, which keep templates and the tokenizer from taking it for the token,
and are taken out again when the characters are encoded. Where two pieces would spell a token
together that neither spells alone, they stand between the pieces, at the start of the later one: so
what has tokens already stays as it is.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

# Noncharacters. In escaped text ESCAPE is always the first of a pair, and CUT is nowhere: `chat.py` cuts there.
ESCAPE, CUT = "\ufdd0", "\ufdd1"
PLAIN = ESCAPE + "\ufdd2"  # nothing, but no spelling goes on across it
_PAIRS = {ESCAPE: ESCAPE * 2, CUT: ESCAPE + "\ufdd3"}
_MEANINGS = {PLAIN: ""} | {pair: character for character, pair in _PAIRS.items()}


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
        any_spelling = "|".join(map(re.escape, spellings))
        self._control = re.compile(any_spelling) if spellings else None
        self._first_character = re.compile(f"(?={any_spelling})(.)", re.DOTALL) if spellings else None
        self._ends: dict[str, list[str]] = {}  # of the spellings that begin like this
        for spelling in spellings:
            for length in range(1, len(spelling)):
                self._ends.setdefault(spelling[:length], []).append(spelling[length:])
        self._longest_beginning = max(map(len, self._ends), default=0)

    def escape(self, text: str) -> str:
        """`text` with every spelling of a control token made plain."""
        text = protect(text)
        return self._first_character.sub(rf"\1{PLAIN}", text) if self._first_character else text

    def follow(self, before: str, after: str) -> str:
        """Escaped text `after` so that none of its characters can complete a control token that `before` begins."""
        for length in range(1, min(len(before), self._longest_beginning) + 1):
            for end in self._ends.get(before[-length:], ()):
                if after and (after.startswith(end) or end.startswith(after)):
                    return PLAIN + after
        return after

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


def protect(text: str) -> str:
    """`text` as escaped text in which the spelling of a control token is still that token."""
    return re.sub(f"[{ESCAPE}{CUT}]", lambda match: _PAIRS[match[0]], text)


def unescape(text: str) -> str:
    """The text that `Encoder.escape` or `protect` was given."""
    return re.sub(f"{ESCAPE}.", lambda match: _MEANINGS[match[0]], text)


@dataclass(frozen=True, slots=True)
class TokenStream:
    """What of a conversation has become tokens. Immutable: forks share it.

    `marks` are the places, as (characters, tokens), that the stream can go back to: between constant
    and generated text. The last `constant` characters are constant text.
    """

    text: str = ""  # escaped
    tokens: array[int] = field(default_factory=lambda: array("i"))
    marks: tuple[tuple[int, int], ...] = ((0, 0),)
    constant: int = 0

    def reach(self, text: str, encoder: Encoder, *, bos: bool) -> TokenStream:
        """The stream of `text`: this one, from as far as the two agree on."""
        if text == self.text:
            return self
        common = len(self.text) if text.startswith(self.text) else _common_prefix(self.text, text)
        marks = [mark for mark in self.marks if mark[0] <= common]
        num_chars, num_tokens = marks[-1]
        more = encoder.encode(text[num_chars:], at_start=num_chars == 0, bos=bos)
        tokens = self.tokens[:num_tokens] + array("i", more)
        return TokenStream(text, tokens, (*marks, (len(text), len(tokens))), len(text) - num_chars)

    def add(self, tokens: Iterable[int], text: str, *, healed: int = 0) -> TokenStream:
        """The stream with generated tokens, whose escaped text is `text`, after it.

        They stand for the last `healed` tokens as well, which they replace.
        """
        stays = len(self.tokens) - healed
        joined = self.tokens[:stays] + array("i", tokens)
        marks = [mark for mark in self.marks if mark[1] <= stays]
        return TokenStream(self.text + text, joined, (*marks, (len(self.text) + len(text), len(joined))))


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

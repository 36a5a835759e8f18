"""A conversation as tokens: append-only, what was generated is never encoded again.

The text of a conversation only ever grows, or goes back to a prefix of itself when a chat template
rewrites what it said before. Text the model generated keeps the tokens it was generated with; the
constant text between is encoded in one go, so that it does not matter in how many pieces it came.

Text from users is data. Where it spells a control token (`<|im_end|>`), that spelling is *escaped*:
noncharacters are put into it, which keep templates and the tokenizer from taking it for the token,
and are taken out again when the characters are encoded; a token of one character is replaced by
them. Where two pieces would spell a token together that neither spells alone, they stand between the
pieces, at the start of the later one: so what has tokens already stays as it is.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from .memo import Memo

# Noncharacters. In escaped text ESCAPE is always the first of a pair, and CUT is nowhere: `chat.py` cuts there.
ESCAPE, CUT = "\ufdd0", "\ufdd1"
PLAIN = ESCAPE + "\ufdd2"  # nothing, but no spelling goes on across it
HIDDEN = ESCAPE + "\ufdd4"  # the character whose code follows, in six digits that are noncharacters, too
_DIGITS = "".join(map(chr, range(0xFDE0, 0xFDF0)))
_PAIRS = {ESCAPE: ESCAPE * 2, CUT: ESCAPE + "\ufdd3"}
_BETWEEN_WORDS = re.compile("(?<=[A-Za-z])(?= [A-Za-z])")
PART_LEN = 200
"""Characters that are kept together, at least: less would be looked up more often, more would be shared less often."""
_MEANINGS = {PLAIN: ""} | {pair: character for character, pair in _PAIRS.items()}


class Vocabulary(Protocol):
    """What is asked of the tokenizer; see `runtime.tokenizer`."""

    @property
    def special_texts(self) -> Mapping[int, str]: ...
    @property
    def parts_at_words(self) -> bool: ...
    def encode(self, text: str, *, at_start: bool, control: bool, bos: bool = True) -> list[int]: ...


class Encoder:
    """Text in which control tokens may be escaped, to tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._memo = Memo()
        spellings = sorted(filter(None, vocabulary.special_texts.values()), key=len, reverse=True)
        any_spelling = "|".join(map(re.escape, spellings))
        self._control = re.compile(any_spelling) if spellings else None
        self._first_character = re.compile(f"(?={any_spelling})(.)", re.DOTALL) if spellings else None
        self._alone = frozenset(spelling for spelling in spellings if len(spelling) == 1)
        self._ends: dict[str, list[str]] = {}  # of the spellings that begin like this
        for spelling in spellings:
            for length in range(1, len(spelling)):
                self._ends.setdefault(spelling[:length], []).append(spelling[length:])
        self._longest_beginning = max(map(len, self._ends), default=0)

    def escape(self, text: str) -> str:
        """`text` with every spelling of a control token made plain."""
        text = protect(text)
        return self._first_character.sub(self._parted, text) if self._first_character else text

    def _parted(self, match: re.Match[str]) -> str:
        return hidden(match[1]) if match[1] in self._alone else match[1] + PLAIN

    def follow(self, before: str, after: str) -> str:
        """Escaped text `after` so that none of its characters can complete a control token that `before` begins."""
        for length in range(1, min(len(before), self._longest_beginning) + 1):
            for end in self._ends.get(before[-length:], ()):
                if after and (after.startswith(end) or end.startswith(after)):
                    return PLAIN + after
        return after

    def encode(self, text: str, *, at_start: bool, bos: bool) -> list[int]:
        """The tokens of escaped `text`. At the start of a conversation, with the model's BOS if `bos`.

        What was encoded before, and not too long ago, is not encoded again, nor is the beginning of a text that
        begins like one that was.
        """
        tokens: list[int] = []
        for part in parts(text) if self._vocabulary.parts_at_words else [text]:
            how = at_start, bos
            tokens += self._memo.tokens(part, how, partial(self._encode, part, at_start=at_start, bos=bos))
            at_start = bos = False
        return tokens

    def _encode(self, text: str, *, at_start: bool, bos: bool) -> list[int]:
        if ESCAPE not in text:
            return self._vocabulary.encode(text, at_start=at_start, control=True, bos=bos)
        tokens: list[int] = []
        for piece, control in self._pieces(text):
            tokens += self._vocabulary.encode(piece, at_start=at_start, control=control, bos=bos)
            at_start = False
        return tokens

    def edges(self, text: str, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Where control tokens begin in escaped `text` and in its `tokens`: no token spans such a place."""
        specials = self._vocabulary.special_texts
        spelled = list(self._control.finditer(text)) if self._control else []
        found = [(at, specials[token]) for at, token in enumerate(tokens) if token in specials]
        edges = []
        for match, (at, special) in zip(reversed(spelled), reversed(found), strict=False):  # a BOS may be in no text
            if match[0] != special:
                return []  # the tokenizer sees them in its own way
            edges.append((match.start(), at))
        return edges[::-1]

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


def parts(text: str) -> Iterator[str]:
    """`text` cut where no token lies across, each time after so many characters: equal beginnings have equal parts."""
    start = 0
    while cut := _BETWEEN_WORDS.search(text, start + PART_LEN):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def protect(text: str) -> str:
    """`text` as escaped text in which the spelling of a control token is still that token."""
    return re.sub(f"[{ESCAPE}{CUT}]", lambda match: _PAIRS[match[0]], text)


def unescape(text: str) -> str:
    """The text that `Encoder.escape` or `protect` was given."""
    return re.sub(f"{HIDDEN}([{_DIGITS}]{{6}})|{ESCAPE}.", _meaning, text)


def hidden(character: str) -> str:
    """`character`, escaped so that it does not stand in the text at all."""
    return HIDDEN + "".join(_DIGITS[ord(character) >> shift & 15] for shift in range(20, -1, -4))


def _meaning(match: re.Match[str]) -> str:
    if match[1] is None:
        return _MEANINGS[match[0]]
    return chr(int("".join(f"{_DIGITS.index(digit):x}" for digit in match[1]), 16))


@dataclass(frozen=True, slots=True)
class TokenStream:
    """What of a conversation has become tokens. Immutable: forks share it.

    `marks` are the places, as (characters, tokens), that the stream can go back to: between constant
    and generated text, and before control tokens. The last `constant` characters are constant text.
    """

    text: str = ""  # escaped
    tokens: array[int] = field(default_factory=lambda: array("i"))
    marks: tuple[tuple[int, int], ...] = ((0, 0),)
    constant: int = 0

    def reach(self, text: str, encoder: Encoder, *, bos: bool) -> TokenStream:
        """The stream of `text`: this one, from as far as the two agree on."""
        if text == self.text and (text or self.tokens):
            return self
        common = len(self.text) if text.startswith(self.text) else _common_prefix(self.text, text)
        marks = [mark for mark in self.marks if mark[0] <= common]
        num_chars, num_tokens = marks[-1]
        more = encoder.encode(text[num_chars:], at_start=num_tokens == 0, bos=bos)
        tokens = self.tokens[:num_tokens] + array("i", more)
        if not text:
            return TokenStream(text, tokens)  # a BOS at most, which goes together with the text to come
        edges = encoder.edges(text[num_chars:], more)
        marks += [(num_chars + chars, num_tokens + count) for chars, count in edges if chars]
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

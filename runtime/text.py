"""Streams of text: bytes of tokens into characters.

Gives out only what is certain. Knows no tokenizer and no model: tokens come as ids with a table of
their bytes. What stops a text is looked for in `stops.py`.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence


class Detokenizer:
    """Tokens to text, one at a time, at a constant cost each.

    What was given out is never taken back: the bytes of a character that is not complete yet are
    held. Bytes that can never become a character come out as U+FFFD, as with `errors="replace"`.
    The pieces joined are the bytes of all tokens decoded at once; a special token ends a character.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        *,
        specials: Mapping[int, str] | None = None,
        drop_first_space: bool = False,
    ) -> None:
        """
        Args:
            token_bytes: what each token spells, b"" for a special one.
            specials: what special tokens become; None shows nothing for them.
            drop_first_space: the first text token begins with a space that was not in the text.
        """
        self._token_bytes = token_bytes
        self._specials = specials
        self._drop_first_space = drop_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int, *, skip: int = 0) -> str:
        """The text that is certain now that `token` follows, whose first `skip` bytes are no part of it."""
        data = self._token_bytes[token]
        if not data:
            return self.flush() + (self._specials or {}).get(token, "")
        data = data[skip:]
        if self._drop_first_space:
            self._drop_first_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end of the text: U+FFFD if the tokens stop inside a character, or nothing."""
        return self._decoder.decode(b"", True)

    def copy(self) -> Detokenizer:
        """One that goes on from here on its own."""
        other = Detokenizer(self._token_bytes, specials=self._specials, drop_first_space=self._drop_first_space)
        other._decoder.setstate(self._decoder.getstate())
        return other

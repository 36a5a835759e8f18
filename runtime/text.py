"""Streams of text: bytes of tokens into characters, and the watch for stop strings.

Both give out only what is certain. Neither knows a tokenizer or a model: tokens come as ids with a
table of their bytes, stops as strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from .errors import RequestError


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


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, however it is cut.

    First is the match that starts earliest; of two that start together, the shorter. A piece of text
    is held back exactly as long as it may be the start of a match. `matched` is the stop that was
    found, and None until then.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """
        Raises:
            RequestError: a stop is empty, or `stops` is one string instead of several.
        """
        if isinstance(stops, str):
            raise RequestError(f"stop must be a sequence of strings here, got the string {stops!r}.")
        if "" in stops:
            raise RequestError(f"stop: an empty string is found in every text; leave it out of {list(stops)!r}.")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop, now that `text` follows."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        growing = self._start_of_growing()
        found = self._first_match()
        # A complete match waits for one that starts before it and may still become complete.
        if found is not None and found[0] <= growing:
            return self._match(*found)
        certain, self._held = self._held[:growing], self._held[growing:]
        return certain

    def flush(self) -> str:
        """The text held back, now that nothing follows: up to the first stop, if it holds one."""
        found = self._first_match()
        if found is not None:
            return self._match(*found)
        rest, self._held = self._held, ""
        return rest

    def copy(self) -> StopMatcher:
        """One that goes on from here on its own."""
        other = StopMatcher(self._stops)
        other._held, other.matched = self._held, self.matched
        return other

    def _first_match(self) -> tuple[int, str] | None:
        """Where the first complete stop in the held text starts, and which it is."""
        found = [(start, len(stop), stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop

    def _start_of_growing(self) -> int:
        """Where the longest suffix of the held text starts that is a proper prefix of a stop."""
        end = len(self._held)
        for start in range(max(0, end - self._longest + 1), end):
            suffix = self._held[start:]
            if any(len(suffix) < len(stop) and stop.startswith(suffix) for stop in self._stops):
                return start
        return end

    def _match(self, start: int, stop: str) -> str:
        self.matched = stop
        before, self._held = self._held[:start], ""
        return before

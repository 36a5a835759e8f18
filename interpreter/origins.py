"""Where the tokens of a generation came from, spelled when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Origin = Literal["cached", "computed", "forced", "sampled"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, how it came to be there, and how likely it was, where that is known.

    `alternatives` are other tokens that could have stood there, with their log-probabilities.
    """

    text: str
    origin: Origin
    logprob: float | None = None
    alternatives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The tokens of one generation. `spell` gives the text of each of some tokens, the first `skip` bytes left out.

    computed: the tokens at the prompt's end that were not in the cache; what stands before them was.
    """

    computed: Sequence[int]
    generated: Sequence[int]
    forced_at: frozenset[int]
    spell: Callable[[Sequence[int], int], list[str]]
    skip: int = 0  # bytes of the first generated token that are text of the prompt
    logprobs: Sequence[float | None] = ()
    alternatives: Sequence[Sequence[tuple[str, float]]] = ()

    def prompt(self) -> list[Piece]:
        """The end of the prompt, with the marks of the chat template, that was computed for this generation."""
        return [Piece(text, "computed") for text in self.spell(self.computed, 0)]

    def output(self, text: str) -> list[Piece]:
        """`text`, which is what the generation gave, token by token."""
        pieces, left = list[Piece](), text
        for index, spelled in enumerate(self.spell(self.generated, self.skip)):
            told = spelled if left.startswith(spelled) else left  # a stop cuts the last one
            left = left[len(told) :]
            if told:
                logprob = self.logprobs[index] if index < len(self.logprobs) else None
                others = tuple(self.alternatives[index]) if index < len(self.alternatives) else ()
                pieces.append(Piece(told, "forced" if index in self.forced_at else "sampled", logprob, others))
        return [*pieces, Piece(left, "sampled")] if left else pieces

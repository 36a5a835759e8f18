"""Where the tokens of a generation came from, spelled when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Origin = Literal["cached", "computed", "forced", "sampled", "chosen"]
Likely: TypeAlias = tuple[tuple[str, float], ...]
"""Tokens' texts and natural log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, how it came to be there, and how likely it was; None is what nobody knows.

    `likely` are the likeliest tokens in its place.
    """

    text: str
    origin: Origin | None = None
    logprob: float | None = None
    likely: Likely = ()


@dataclass(frozen=True, slots=True)
class Origins:
    """The tokens of one generation. `spell` gives the text of each of some tokens, the first `skip` bytes left out.

    computed: the tokens at the prompt's end that were not in the cache; what stands before them was.
    """

    computed: Sequence[int]
    generated: Sequence[int]
    forced_at: frozenset[int]
    spell: Callable[[Sequence[int], int], list[str]]
    skip: int = 0  # bytes of the first generated token that are text of the prompt

    def prompt(self) -> str:
        """The end of the prompt, with the marks of the chat template, that was computed for this generation."""
        return "".join(self.spell(self.computed, 0))

    def output(self, text: str, logprobs: Sequence[tuple[float, Likely]] = ()) -> list[Piece]:
        """`text`, which is what the generation gave, token by token; of the tokens that say more than it, its part."""
        pieces, left = list[Piece](), text
        for index, spelled in enumerate(self.spell(self.generated, self.skip)):
            told = spelled if left.startswith(spelled) else left
            if not spelled.startswith(told):
                break  # the text is not what its tokens spell
            left = left[len(told) :]
            if told:
                logprob, likely = logprobs[index] if index < len(logprobs) else (None, ())
                pieces.append(Piece(told, "forced" if index in self.forced_at else "sampled", logprob, likely))
        return [*pieces, Piece(left)] if left else pieces

"""How one generation is done: checked when made, data from then on."""

from __future__ import annotations

from dataclasses import dataclass

from .constrain import Choices, Regex
from .errors import RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateParams:
    """Options of one generation.

    max_tokens: tokens to sample at most.
    temperature: 0 takes the likeliest token; 1 draws from the model's own distribution.
    top_p, top_k: draw from the likeliest tokens only: as many as reach this probability, and at most so many.
    seed: the same seed, prompt and options give the same text, whoever else is computed beside it.
    stop: the text ends before the first of these strings.
    ignore_eos: do not stop at the model's end tokens.
    regex, choices: what the whole text must be; at most one of the two.
    cache_salt: requests share the keys and values of equal prefixes only with others of the same salt.
    priority: higher ones are admitted first, sent back to wait last, and stay cached longer under "priority".
    routing_key: the policy "routing-key" keeps requests of one key together.
    timeout_s: seconds after which it ends with what it has, waiting or running.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    regex: str | None = None
    choices: tuple[str, ...] | None = None
    cache_salt: str | None = None
    priority: int = 0
    routing_key: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not self.max_tokens >= 1:
            raise RequestError(
                f"max_tokens must be at least 1, got {self.max_tokens!r}. To score given text, use score()."
            )
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature must be 0 or more, got {self.temperature!r}.")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p!r}.")
        if self.top_k is not None and not self.top_k >= 1:
            raise RequestError(f"top_k must be at least 1, got {self.top_k!r}; None turns it off.")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise RequestError(f"timeout_s must be more than 0, got {self.timeout_s!r}.")
        if self.regex is not None and self.choices is not None:
            raise RequestError("regex and choices exclude each other.")

    def constraint(self) -> Regex | Choices | None:
        if self.regex is not None:
            return Regex(self.regex)
        return Choices(tuple(self.choices)) if self.choices is not None else None

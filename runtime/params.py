"""How one generation is done: checked when made, data from then on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .constrain import Choices, Regex
from .errors import RequestError
from .messages import check_name, shown
from .stops import StopMatcher

_KINDS: tuple[tuple[str, Any, str, bool], ...] = (
    ("max_tokens", int, "a whole number", False),
    ("temperature", int | float, "a number", False),
    ("top_p", int | float, "a number", False),
    ("top_k", int, "a whole number", True),
    ("seed", int, "a whole number", True),
    ("ignore_eos", bool, "True or False", False),
    ("heal", bool, "True or False", False),
    ("regex", str, "a string", True),
    ("cache_salt", str, "a string", True),
    ("priority", int, "a whole number", False),
    ("routing_key", str, "a string", True),
    ("timeout_s", int | float, "a number", True),
)
"""Each option with the types it may have, how a message calls them, and whether it may be None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateParams:
    """Options of one generation.

    max_tokens: tokens to sample at most.
    temperature: 0 takes the likeliest token; 1 draws from the model's own distribution.
    top_p, top_k: draw from the likeliest tokens only: as many as reach this probability, and at most so many.
    seed: the same seed, prompt and options give the same text, whoever else is computed beside it.
    stop: the text ends before the first of these strings.
    stop_regex: likewise before the first text that matches one of these patterns; "first" is where it begins.
    ignore_eos: do not stop at the model's end tokens.
    heal: the last tokens of the prompt may become part of longer ones, as if its text and what follows it had been
        written in one go: see `healing.py`. The text of the prompt stays what it is.
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
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    heal: bool = False
    regex: str | None = None
    choices: tuple[str, ...] | None = None
    cache_salt: str | None = None
    priority: int = 0
    routing_key: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name, types, kind, optional in _KINDS:
            value = getattr(self, name)
            fits = isinstance(value, types) and isinstance(value, bool) == (types is bool)
            if not fits and not (optional and value is None):
                raise RequestError(f"{name} must be {kind}{', or None' if optional else ''}, got {shown(value)}.")
        if self.max_tokens < 1:
            raise RequestError(
                f"max_tokens must be at least 1, got {self.max_tokens}. To score given text, use score()."
            )
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature must be 0 or more, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.top_k is not None and self.top_k < 1:
            raise RequestError(f"top_k must be at least 1, got {self.top_k}; None turns it off.")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise RequestError(f"timeout_s must be more than 0, got {self.timeout_s}.")
        self._settle_strings()
        if self.regex is not None and self.choices is not None:
            raise RequestError("regex and choices exclude each other.")

    def _settle_strings(self) -> None:
        """Lists become tuples; one stop, or none, is a tuple, too."""
        for name in ("stop", "stop_regex"):
            stop: object = getattr(self, name)
            given = () if stop is None else (stop,) if isinstance(stop, str) else stop
            object.__setattr__(self, name, _strings(name, given))
        StopMatcher(self.stop, self.stop_regex)  # raises what is wrong with them
        if self.choices is not None:
            object.__setattr__(self, "choices", _strings("choices", self.choices))
            if not self.choices:
                raise RequestError("choices must be at least one string, got none. None turns it off.")

    def constraint(self) -> Regex | Choices | None:
        if self.regex is not None:
            return Regex(self.regex)
        return Choices(self.choices) if self.choices is not None else None


def generate_params(**given: Any) -> GenerateParams:
    """The options of one generation, by name.

    Raises:
        RequestError: there is no such option, or it has a value it cannot have.
    """
    for name in given:
        check_name(name, GenerateParams.__dataclass_fields__)
    return GenerateParams(**given)


def _strings(name: str, given: object) -> tuple[str, ...]:
    """The strings of a list, tuple or other collection that is not a string itself."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list of strings, got {shown(given)}.")
    strings = tuple(given)
    for index, string in enumerate(strings):
        if not isinstance(string, str):
            raise RequestError(f"{name}[{index}] must be a string, got {shown(string)}.")
    return strings

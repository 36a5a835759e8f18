"""How one generation is done: checked when made, data from then on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .constrain import Choices, Grammar, JsonSchema, Regex, Spec
from .errors import RequestError
from .messages import check_name, shown
from .penalties import Penalties
from .stops import StopMatcher

_KINDS: tuple[tuple[str, Any, str, bool], ...] = (
    ("max_tokens", int, "a whole number", False),
    ("min_tokens", int, "a whole number", False),
    ("temperature", int | float, "a number", False),
    ("top_p", int | float, "a number", False),
    ("top_k", int, "a whole number", True),
    ("min_p", int | float, "a number", False),
    ("frequency_penalty", int | float, "a number", False),
    ("presence_penalty", int | float, "a number", False),
    ("repetition_penalty", int | float, "a number", False),
    ("seed", int, "a whole number", True),
    ("return_logprob", bool, "True or False", False),
    ("top_logprobs", int, "a whole number", False),
    ("logprob_start", int, "a whole number", True),
    ("ignore_eos", bool, "True or False", False),
    ("heal", bool, "True or False", False),
    ("regex", str, "a string", True),
    ("json_schema", str, "JSON text", True),
    ("grammar", str, "a string", True),
    ("on_truncate", str, '"keep" or "close"', False),
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
    min_tokens: before these no token ends the text; a stop string still does.
    temperature: 0 takes the likeliest token; 1 draws from the model's own distribution.
    top_p, top_k: draw from the likeliest tokens only: as many as reach this probability, and at most so many.
    min_p: draw from those only that are at least so many times as likely as the likeliest (Nguyen et al. 2024).
    frequency_penalty, presence_penalty, repetition_penalty, logit_bias: see `Penalties`; 0, 0, 1 and {} change nothing.
    seed: the same seed, prompt and options give the same text, whoever else is computed beside it.
    stop: the text ends before the first of these strings.
    stop_regex: likewise before the first text that matches one of these patterns; "first" is where it begins.
    stop_token_ids: likewise at one of these tokens, which is not in the text.
    ignore_eos: do not stop at the model's end tokens.
    return_logprob: the result has the log-probability of each token, and of the `top_logprobs` likeliest in its place.
    logprob_start: and those of the prompt from this token on; the first has none.
    heal: the last tokens of the prompt may become part of longer ones, as if its text and what follows it had been
        written in one go: see `healing.py`. The text of the prompt stays what it is.
    regex, choices, json_schema, grammar: what the whole text must be; at most one of them. A schema is JSON text.
    on_truncate: "close" takes a short way to a complete text before `max_tokens` runs out; "keep" does not.
    cache_salt: requests share the keys and values of equal prefixes only with others of the same salt.
    priority: higher ones are admitted first, sent back to wait last, and stay cached longer under "priority".
    routing_key: the policy "routing-key" keeps requests of one key together.
    timeout_s: seconds after which it ends with what it has, waiting or running.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # a dict becomes that
    seed: int | None = None
    return_logprob: bool = False
    top_logprobs: int = 0
    logprob_start: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    heal: bool = False
    regex: str | None = None
    choices: tuple[str, ...] | None = None
    json_schema: str | None = None
    grammar: str | None = None
    on_truncate: str = "keep"
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
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be in [0, 1], got {self.min_p}; 0 turns it off.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise RequestError(f"repetition_penalty must be above 0, got {self.repetition_penalty}; 1 turns it off.")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise RequestError(f"{name} must be finite, got {getattr(self, name)}.")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(f"min_tokens must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}.")
        if self.top_logprobs < 0 or (self.logprob_start or 0) < 0:
            raise RequestError(
                f"top_logprobs and logprob_start must be 0 or more, got {self.top_logprobs} and {self.logprob_start}."
            )
        self._settle_ids()
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise RequestError(f"timeout_s must be more than 0, got {self.timeout_s}.")
        self._settle_strings()
        if self.on_truncate not in ("keep", "close"):
            raise RequestError(f'on_truncate must be "keep" or "close", got {shown(self.on_truncate)}.')
        said = [name for name in ("regex", "choices", "json_schema", "grammar") if getattr(self, name) is not None]
        if len(said) > 1:
            raise RequestError(f"{said[0]} and {said[1]} exclude each other.")

    def _settle_ids(self) -> None:
        stops: object = self.stop_token_ids
        if isinstance(stops, str | bytes) or not isinstance(stops, Iterable):
            raise RequestError(f"stop_token_ids must be a list of token ids, got {shown(stops)}.")
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", stops))
        bias: object = self.logit_bias or {}
        bias = dict(bias) if isinstance(bias, tuple) else bias
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must be a dict of token ids and numbers, got {shown(bias)}.")
        if not all(isinstance(number, int | float) and not math.isnan(number) for number in bias.values()):
            raise RequestError(f"logit_bias must have numbers as values, got {shown(bias)}.")
        ids = _token_ids("logit_bias", bias)
        object.__setattr__(self, "logit_bias", tuple(zip(ids, bias.values(), strict=True)))

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

    @property
    def penalties(self) -> Penalties:
        return Penalties(
            frequency=self.frequency_penalty,
            presence=self.presence_penalty,
            repetition=self.repetition_penalty,
            bias=dict(self.logit_bias),
        )

    def constraint(self) -> Spec | None:
        if self.regex is not None:
            return Regex(self.regex)
        if self.json_schema is not None:
            return JsonSchema(self.json_schema)
        if self.grammar is not None:
            return Grammar(self.grammar)
        return Choices(self.choices) if self.choices is not None else None


def _token_ids(name: str, given: Iterable[object]) -> tuple[int, ...]:
    ids: list[int] = []
    for token in given:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise RequestError(f"{name} must have token ids, whole numbers from 0 on, got {shown(token)}.")
        ids.append(token)
    return tuple(ids)


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

"""How a `gen` should be done: checked when written, merged with defaults when run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import checks
from .checks import OnTruncate
from .errors import OptionError
from .schema import Schema, schema_of


@dataclass(frozen=True, kw_only=True, slots=True)
class GenOptions:
    """Options of one generation. None means not given: a default of the run, then of the function, fills it."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    seed: int | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    heal: bool | None = None
    return_logprob: bool | None = None
    top_logprobs: int | None = None
    logprob_start_len: int | None = None
    regex: str | None = None
    choices: tuple[str, ...] | None = None
    json_schema: Schema | None = None
    grammar: str | None = None
    on_truncate: OnTruncate | None = None

    @property
    def constrained(self) -> bool:
        """Whether they say what the text must be."""
        said = (self.regex, self.choices, self.json_schema, self.grammar)
        return any(one is not None for one in said)

    def over(self, defaults: GenOptions) -> GenOptions:
        """These options, with `defaults` where they say nothing."""
        given = {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None}
        return dataclasses.replace(defaults, **given)

    def filled(self) -> GenOptions:
        """These options as a backend gets them: `FALLBACK` where nothing is said, None for a `top_k` that is off."""
        options = self.over(FALLBACK)
        return dataclasses.replace(options, top_k=None) if options.top_k == -1 else options


FALLBACK = GenOptions(
    max_tokens=256, stop=(), stop_regex=(), temperature=1.0, top_p=1.0, n=1, ignore_eos=False, heal=True,
    on_truncate="keep",
)  # fmt: skip
"""What holds where nobody says anything: call, run, function and backend are asked first, in this order."""

_CHECKS: Mapping[str, Callable[[object, str], Any]] = {
    "max_tokens": checks.max_tokens,
    "min_tokens": checks.count,
    "stop": checks.stop,
    "stop_regex": checks.patterns,
    "stop_token_ids": checks.token_ids,
    "temperature": checks.temperature,
    "top_p": checks.top_p,
    "top_k": checks.top_k,
    "min_p": checks.probability,
    "frequency_penalty": checks.real_number,
    "presence_penalty": checks.real_number,
    "repetition_penalty": checks.factor,
    "logit_bias": checks.logit_bias,
    "seed": checks.seed,
    "n": checks.sample_count,
    "ignore_eos": checks.flag,
    "heal": checks.flag,
    "return_logprob": checks.flag,
    "top_logprobs": checks.count,
    "logprob_start_len": checks.count,
    "regex": checks.string,
    "choices": checks.choices,
    "json_schema": schema_of,
    "grammar": checks.string,
    "on_truncate": checks.on_truncate,
}

OPTION_NAMES: tuple[str, ...] = tuple(_CHECKS)

LANGUAGES = ("regex", "choices", "json_schema", "grammar")
"""The options that say what the whole text must be: one of them at most."""

DEFAULT_NAMES: tuple[str, ...] = tuple(name for name in _CHECKS if name not in ("n", *LANGUAGES))
"""What a run or a function may set for all its gens; the others say what one gen is, so they belong to its call."""


def checked_options(call: str, given: Mapping[str, object]) -> GenOptions:
    """The options of `call` (`gen("age")`), every value checked; None counts as not given.

    Raises:
        OptionError: a value its option cannot have, with `call` in front.
    """
    kept = {name: _CHECKS[name](value, f"{call}: {name}") for name, value in given.items() if value is not None}
    return GenOptions(**kept)


def checked_defaults(call: str, given: object) -> GenOptions:
    """The options that `call` sets for all gens, every name and value checked.

    Raises:
        OptionError: it is no dict, names what is no default, or has a value its option cannot have.
    """
    if not isinstance(given, Mapping):
        raise OptionError(f"{call} must be a dict of options, got {checks.shown(given)}.")
    for name in given:
        if name not in DEFAULT_NAMES:
            if name in OPTION_NAMES:
                said = [f"{name} says what one gen is, so it belongs to its call."]
            else:
                said = [f"there is no option {name}.", checks.did_you_mean(str(name), DEFAULT_NAMES)]
            known = f"Known: {', '.join(DEFAULT_NAMES)}."
            raise OptionError(f"{call}: {' '.join(filter(None, [*said, known]))}")
    return checked_options(call, given)

"""Fields of a request as options of the language and of the runtime, checked by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from branchwise import runtime
from branchwise.lang import Gen
from branchwise.lang.options import checked_options

from ..local import Engine, generate_params
from .bodies import ResponseFormat, Sampling
from .config import MOST_SAMPLES, ServeConfig
from .errors import ApiError

SAME = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "min_tokens", "stop", "stop_regex", "stop_token_ids", "ignore_eos", "regex", "choices", "grammar", "heal",
    "on_truncate",
)  # fmt: skip
"""Fields that are options of `gen` by the same name."""


class Caller:
    """Who asks: the namespace of the cache that is theirs alone; None is everybody's."""

    def __init__(self, namespace: str | None = None) -> None:
        self.namespace = namespace

    def salt(self, given: str | None) -> str | None:
        """The cache's namespace for a request of theirs with this `cache_salt`."""
        if self.namespace is None:
            return given
        return self.namespace if given is None else f"{self.namespace}/{given}"


def params_of(
    body: Sampling, engine: Engine, config: ServeConfig, caller: Caller, *, max_tokens: int, **more: Any
) -> runtime.GenerateParams:
    """How the texts of `body` are generated; `more` are options that its endpoint knows.

    Raises:
        OptionError, RequestError: an option has a value it cannot have.
    """
    given: dict[str, Any] = {name: getattr(body, name) for name in SAME}
    given |= {"max_tokens": max_tokens, "seed": _seed(body.seed), "logit_bias": _bias(body.logit_bias)}
    given |= _format(body.response_format) | more
    said = {name: value for name, value in given.items() if value is not None}
    options = checked_options("request", said).over(engine.defaults).filled()
    params = generate_params(Gen(None, options))
    return replace(
        params,
        cache_salt=caller.salt(body.cache_salt),
        priority=body.priority or 0,
        timeout_s=config.timeout_s if body.timeout_s is None else min(body.timeout_s, config.timeout_s),
    )


def num_samples(body: Sampling) -> int:
    """How many texts are asked for, of each prompt."""
    count = body.n or 1
    if count > MOST_SAMPLES:
        raise ApiError(400, f"n is at most {MOST_SAMPLES}, got {count}", param="n")
    return count


def check_model(asked: str | None, engine: Engine, config: ServeConfig) -> str:
    """The name of the model, if it is the one that is here."""
    name = config.served_name or engine.name
    if asked not in (None, name, engine.name):
        raise ApiError(
            404, f"there is no model {asked!r} here; it is {name!r}", param="model", code="model_not_found"
        )
    return name


def _seed(seed: int | None) -> int | None:
    return None if seed is None else seed & ((1 << 63) - 1)  # OpenAI's may be negative


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise ApiError(400, "logit_bias must have token ids as names", param="logit_bias") from None


def _format(asked: ResponseFormat | None) -> dict[str, Any]:
    if asked is None or asked.type == "text":
        return {}
    if asked.type == "json_object":
        return {"json_schema": {"type": "object"}}
    schema = asked.json_schema.schema_ if asked.json_schema is not None else None
    if schema is None:
        raise ApiError(400, "response_format must have json_schema.schema", param="response_format")
    return {"json_schema": json.dumps(schema)}

"""What kinds of servers speak OpenAI's protocol, and what each takes beyond it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from branchwise.lang import OptionError
from branchwise.lang.checks import nearest

Prefill = Literal["continue_final_message", "prefix"]
"""How a server is told to go on with the last message: a field of the request (and no new turn), or of the message."""

Spell = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """What one kind of server takes.

    name: as an error says it.
    constraints: for "regex", "choices", "grammar" and "json_schema" the fields of the request that say it; a schema
        (JSON text) that is missing here goes to chats as `response_format`.
    sampling: options of `gen` beyond OpenAI's that are fields of the same name.
    limit: the field of a chat that limits its tokens.
    echo: whether completions score their prompt, by `echo` and `logprobs`.
    prefill: how a text inside an open turn of the assistant is continued; None where that cannot be said.
    """

    name: str
    constraints: Mapping[str, Spell] = field(default_factory=dict)
    sampling: frozenset[str] = frozenset()
    limit: str = "max_tokens"
    echo: bool = False
    prefill: Prefill | None = None


def _same(name: str) -> Spell:
    return lambda value: {name: value}


def _structured(name: str) -> Spell:
    return lambda value: {"structured_outputs": {name: value}}


def _alternatives(choices: tuple[str, ...]) -> dict[str, Any]:
    return {"regex": "(" + "|".join(re.escape(choice) for choice in choices) + ")"}


_EXTRA_SAMPLING = frozenset(
    {"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"}
)

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "openai": Dialect(name="openai", limit="max_completion_tokens"),
        "branchwise": Dialect(
            name="branchwise",
            constraints={name: _same(name) for name in ("regex", "choices", "grammar")},
            sampling=_EXTRA_SAMPLING,
            echo=True,
            prefill="continue_final_message",
        ),
        # https://docs.sglang.io/basic_usage/openai_api_completions.html: regex, ebnf, json_schema, no list of choices.
        "sglang": Dialect(
            name="sglang",
            constraints={"regex": _same("regex"), "choices": _alternatives, "json_schema": _same("json_schema")},
            sampling=_EXTRA_SAMPLING,
            echo=True,
            prefill="continue_final_message",
        ),
        # https://docs.vllm.ai/en/latest/features/structured_outputs.html
        "vllm": Dialect(
            name="vllm",
            constraints={
                "regex": _structured("regex"),
                "choices": lambda choices: {"structured_outputs": {"choice": list(choices)}},
                "grammar": _structured("grammar"),
                "json_schema": _structured("json"),
            },
            sampling=_EXTRA_SAMPLING,
            echo=True,
            prefill="continue_final_message",
        ),
    }
)


def dialect_of(server: object, where: str) -> Dialect:
    """The dialect that is named, or given.

    Raises:
        OptionError: there is none of that name.
    """
    if isinstance(server, Dialect):
        return server
    if isinstance(server, str) and server in DIALECTS:
        return DIALECTS[server]
    raise OptionError(f"{where}: there is no kind of server {server!r}. {nearest(str(server), DIALECTS)}")

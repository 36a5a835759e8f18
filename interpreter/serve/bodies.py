"""What clients send: the fields of OpenAI's requests, and those that are usual beyond them.

Types are checked here, values where the language checks its options. A field that nobody knows is refused, as what it
asks for would silently not be done; fields that change nothing about the text are taken and left alone.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_SURROGATE = re.compile("[\ud800-\udfff]")

Finite = Annotated[float, Field(allow_inf_nan=False)]
Ids = list[Annotated[int, Field(ge=0, lt=1 << 31)]]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class WellFormed(BaseModel):
    """A body in which all text is text."""

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        if not _is_text(value):
            raise ValueError("a text has half a character in it (a surrogate without its other half)")
        return value


def _is_text(value: Any) -> bool:
    match value:
        case str():
            return value.isascii() or not _SURROGATE.search(value)
        case list():
            return all(map(_is_text, value))
        case dict():
            return all(map(_is_text, value)) and all(map(_is_text, value.values()))
        case _:
            return True


class Strict(WellFormed):
    """A body whose unknown fields are refused, unless they ask for nothing: routers and clients send all they know."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        return {n: v for n, v in value.items() if n in known or not (n in NO_MATTER or _is_off(v))}


NO_MATTER = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "rid",
        "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "separate_reasoning",
        "stream_reasoning",
    }
)  # fmt: skip
"""Fields of other servers, and those that change nothing about the text."""


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(strict=True, populate_by_name=True)

    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class Sampling(Strict):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Finite | None = None
    top_p: Finite | None = None
    frequency_penalty: Finite | None = None
    presence_penalty: Finite | None = None
    logit_bias: dict[str, Finite] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # Beyond OpenAI's, by the names of vLLM and SGLang
    top_k: int | None = None
    min_p: Finite | None = None
    repetition_penalty: Finite | None = None
    min_tokens: Count | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    choices: list[str] | None = None
    grammar: str | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None

    # Our own: see `branchwise.gen`
    stop_regex: str | list[str] | None = None
    heal: bool | None = None
    on_truncate: Literal["keep", "close"] | None = None
    timeout_s: Finite | None = None


class CompletionBody(Sampling):
    """A request for `/v1/completions`."""

    prompt: str | list[str] | Ids | list[Ids]
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Count | None = None
    suffix: str | None = None


class Part(BaseModel):
    """A piece of a message; text is all that a language model reads."""

    model_config = ConfigDict(strict=True)

    type: str
    text: str | None = None


class Message(BaseModel):
    """A turn. What else it says (`name`, `tool_call_id`, ...) goes to the model's template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Function(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: Function


class Named(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str


class ToolChoice(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: Named


class ChatBody(Sampling):
    """A request for `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

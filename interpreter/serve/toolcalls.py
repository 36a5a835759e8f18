"""Calls of tools: how the model is held to them, and how they are read from what it wrote.

Models say a call in a form of their own, which their template shows: behind `<tool_call>`, behind `[TOOL_CALLS]`, or as
JSON alone. A call that is begun is constrained to a tool that there is and to arguments that fulfil its schema.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jsonschema import ValidationError, validate

from .bodies import ChatBody, Tool, ToolChoice
from .errors import ApiError

MOST_CALLS = 16
"""A message makes at most so many."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a model writes a call: what stands before its JSON and after it, and what the JSON calls the arguments."""

    begin: str
    end: str
    arguments: Literal["arguments", "parameters"] = "arguments"


MARKED = Form("<tool_call>\n", "\n</tool_call>")
MISTRAL = Form("[TOOL_CALLS] [", "]")
ALONE = Form("", "", "parameters")


def form_of(template: str | None) -> Form:
    """The form that a chat template shows."""
    said = template or ""
    if "<tool_call>" in said:
        return MARKED
    return MISTRAL if "[TOOL_CALLS]" in said else ALONE if '"parameters"' in said else Form("", "")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request says about tools: those that may be called, and whether one must be."""

    tools: tuple[Tool, ...] = ()
    must: bool = False
    several: bool = True


def wanted(body: ChatBody) -> Wanted:
    """Raises: ApiError: the tools and the choice among them do not go together."""
    tools, choice = tuple(body.tools or ()), body.tool_choice
    if choice == "none" or (not tools and choice in (None, "auto")):
        return Wanted()
    if not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "two tools have the same name", param="tools")
    if isinstance(choice, ToolChoice):
        tools = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        if not tools:
            raise ApiError(400, f"tool_choice names {choice.function.name!r}, which is none of the tools",
                           param="tool_choice")  # fmt: skip
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(400, "tools and response_format exclude each other", param="response_format")
    if any((body.regex, body.choices, body.grammar)):
        raise ApiError(400, "tools and a constraint of the text exclude each other", param="tools")
    must = choice == "required" or isinstance(choice, ToolChoice)
    return Wanted(tools, must, several=body.parallel_tool_calls is not False)


def schema_of(tools: Sequence[Tool], form: Form) -> str:
    """JSON Schema, as JSON, of a call of any of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                form.arguments: tool.function.parameters or {"type": "object"},
            },
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})


def call_in(text: str, tools: Sequence[Tool], form: Form) -> dict[str, Any] | None:
    """The call that `text` is, in OpenAI's shape; None if it is none."""
    try:
        said = json.loads(text)
    except ValueError:
        return None
    if not isinstance(said, dict) or said.get("name") not in [tool.function.name for tool in tools]:
        return None
    arguments = said.get(form.arguments, said.get("arguments"))
    if not isinstance(arguments, dict):
        return None
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": said["name"], "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def arguments_fit(call: dict[str, Any], tools: Sequence[Tool]) -> bool:
    """Whether the arguments of a call that nothing held to its schema fulfil it."""
    function = call["function"]
    (schema,) = [tool.function.parameters for tool in tools if tool.function.name == function["name"]]
    try:
        validate(json.loads(function["arguments"]), schema or {})
    except ValidationError:
        return False
    return True

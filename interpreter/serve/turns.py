"""Messages of a chat as the prompt of the model, by its own template."""

from __future__ import annotations

import json
from collections.abc import Sequence

from branchwise.lang import RoleBegin, RoleEnd, Text, Tools

from ..local import Engine, LocalSession
from .bodies import ChatBody, Message, Tool
from .errors import ApiError


def session_of(body: ChatBody, engine: Engine, tools: Sequence[Tool]) -> LocalSession:
    """A session in which the messages are said, and where it is the assistant's turn to write.

    Raises:
        ApiError: a message holds what is no text, or the last one cannot be continued.
    """
    session = engine.open_session()
    if tools:
        session.append(Tools(json.dumps([tool.model_dump(exclude_none=True) for tool in tools])))
    *before, last = body.messages
    for message in before:
        _say(session, message)
        session.append(RoleEnd(message.role))
    if body.continue_final_message:
        if last.role != "assistant":
            raise ApiError(400, f"the last message is of {last.role}, and only the assistant's can be continued",
                           param="continue_final_message")  # fmt: skip
        if body.add_generation_prompt:
            raise ApiError(400, "continue_final_message and add_generation_prompt exclude each other",
                           param="add_generation_prompt")  # fmt: skip
        _say(session, last)
        return session
    if body.add_generation_prompt is False:
        raise ApiError(400, "without a new turn there is nothing to write; continue_final_message goes on with one",
                       param="add_generation_prompt")  # fmt: skip
    _say(session, last)
    session.append(RoleEnd(last.role))
    session.append(RoleBegin("assistant"))
    return session


def _say(session: LocalSession, message: Message) -> None:
    said = {**(message.model_extra or {}), "tool_calls": message.tool_calls or None}
    fields = {name: value for name, value in said.items() if value is not None}
    session.append(RoleBegin(message.role, json.dumps(fields) if fields else ""))
    session.append(Text(_text(message), control=False))


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "input_text", "refusal") or part.text is None:
            raise ApiError(400, f"a message of {message.role} has a part of type {part.type!r}; this model reads text",
                           param="messages")  # fmt: skip
    return "".join(part.text or "" for part in message.content)

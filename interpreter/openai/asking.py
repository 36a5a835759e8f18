"""What a call of a program becomes as a request; what a server cannot be asked is refused here.

Pure functions: segments and options in, the fields of a request out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from branchwise.lang import Gen, RoleBegin, RoleEnd, Select, Text, Tools

from .client import Request
from .dialect import Dialect
from .errors import Unsupported

BOTH = (
    "the program has text outside of its turns. A chat is made of turns only, a completion of text only: "
    "put it into a turn, or leave the roles out."
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a program said so far: turns, or text without any. Copied on change, so a fork is the same object.

    `broken` says why no request can hold it; "" if one can.
    """

    text: str = ""
    turns: tuple[dict[str, Any], ...] = ()
    role: str | None = None  # of the open turn, the last one
    broken: str = field(default="")

    @property
    def chat(self) -> bool:
        return bool(self.turns)

    def then(self, segment: Text | RoleBegin | RoleEnd | Tools) -> Prompt:
        """This, with `segment` after it."""
        match segment:
            case Text(text, control):
                why = "text(raw=True) names tokens, and a server takes text." if control else ""
                return self.said(text, broken=why)
            case RoleBegin(role, fields):
                turn = {"role": role, "content": "", **json.loads(fields or "{}")}
                return self._with(turns=(*self.turns, turn), role=role, broken=BOTH if self.text else "")
            case RoleEnd():
                return self._with(role=None)
            case Tools():
                return self._with(
                    broken="tools() is for a model in this process: a server's calls come beside the text, not in it."
                )

    def said(self, text: str, broken: str = "") -> Prompt:
        """This, with `text` after it."""
        if self.role is not None:
            last = self.turns[-1]
            return self._with(turns=(*self.turns[:-1], {**last, "content": last["content"] + text}), broken=broken)
        if self.chat and text:
            return self._with(broken=broken or BOTH)
        return self._with(text=self.text + text, broken=broken)

    def _with(
        self, *, turns: tuple[dict[str, Any], ...] | None = None, text: str | None = None,
        role: str | None = "", broken: str = "",
    ) -> Prompt:  # fmt: skip
        return Prompt(
            self.text if text is None else text,
            self.turns if turns is None else turns,
            self.role if role == "" else role,
            self.broken or broken,
        )


def generation(prompt: Prompt, gen: Gen, dialect: Dialect) -> Request:
    """The request for `gen`.

    Raises:
        Unsupported: the server cannot do that.
    """
    arguments, extra = _start(prompt, gen.call, dialect)
    check(gen, dialect, chat=prompt.chat)
    options = gen.options
    arguments[dialect.limit if prompt.chat else "max_tokens"] = options.max_tokens
    for name in ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty"):
        if (value := getattr(options, name)) is not None:
            arguments[name] = value
    if options.stop:
        arguments["stop"] = list(options.stop)
    if (options.n or 1) > 1:
        arguments["n"] = options.n
    if options.logit_bias:
        arguments["logit_bias"] = {str(token): bias for token, bias in options.logit_bias}
    if options.return_logprob:
        top = options.top_logprobs or 0
        arguments |= {"logprobs": True, "top_logprobs": top} if prompt.chat else {"logprobs": top}
    for name in dialect.sampling:
        value = getattr(options, name)
        if value is not None and value is not False:
            extra[name] = list(value) if isinstance(value, tuple) else value
    for name in ("regex", "choices", "grammar", "json_schema"):
        if (value := getattr(options, name)) is not None:
            _constrain(arguments, extra, name, value.text if name == "json_schema" else value, dialect)
    return Request("chat" if prompt.chat else "completions", arguments, extra)


def constrained_choice(prompt: Prompt, select: Select, dialect: Dialect) -> Request:
    """The request that writes one of the choices, for a server that cannot score them. `choice_in` reads the answer.

    Raises:
        Unsupported: the server cannot be held to choices either.
    """
    arguments, extra = _start(prompt, select.call, dialect)
    arguments["temperature"] = 0
    arguments[dialect.limit if prompt.chat else "max_tokens"] = 32 + max(len(c.encode()) for c in select.choices) * 2
    if "choices" in dialect.constraints:
        _constrain(arguments, extra, "choices", select.choices, dialect)
    elif prompt.chat and not prompt.turns[-1]["content"]:
        schema = {
            "type": "object",
            "properties": {"choice": {"type": "string", "enum": list(select.choices)}},
            "required": ["choice"],
            "additionalProperties": False,
        }
        _constrain(arguments, extra, "json_schema", json.dumps(schema, ensure_ascii=False), dialect)
    else:
        raise Unsupported(
            f"{select.call}: a server of kind {dialect.name} neither scores the choices nor can be held to them here. "
            'Ask in a new turn of the assistant, or say OpenAI(server=...) if the server takes "choices".'
        )
    return Request("chat" if prompt.chat else "completions", arguments, extra)


def choice_in(text: str, choices: Sequence[str]) -> str | None:
    """Which choice the answer to `constrained_choice` is; None: none of them."""
    if text in choices:
        return text
    try:
        said = json.loads(text)
    except ValueError:
        return None
    choice = said.get("choice") if isinstance(said, dict) else None
    return choice if choice in choices else None


def scored_choices(prompt: Prompt, select: Select, dialect: Dialect) -> Request:
    """The request that scores all choices after the prompt, by echo; one token more is written, and not used.

    Raises:
        Unsupported: the prompt cannot be sent.
    """
    arguments, extra = _start(prompt, select.call, dialect)
    arguments["prompt"] = [prompt.text + choice for choice in select.choices]
    arguments |= {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    return Request("completions", arguments, extra, stream=False)


def check(gen: Gen, dialect: Dialect, *, chat: bool | None) -> None:
    """Refuse what no request for `gen` could say. `chat` is None where it is not known yet.

    Raises:
        Unsupported: with the call and the option.
    """
    options = gen.options
    for name in ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"):
        if getattr(options, name) and name not in dialect.sampling:
            raise _refused(gen, name, dialect)
    for name in ("stop_regex", "logprob_start_len"):
        if getattr(options, name):
            raise Unsupported(f"{gen.call}: {name} is not something that OpenAI's protocol can say. Leave it out.")
    if options.on_truncate == "close":
        raise Unsupported(f'{gen.call}: on_truncate="close" is for a model in this process. Leave it out.')
    for name in ("regex", "choices", "grammar"):
        if getattr(options, name) is not None and name not in dialect.constraints:
            raise _refused(gen, name, dialect)
    if options.json_schema is not None and chat is False and "json_schema" not in dialect.constraints:
        raise Unsupported(
            f"{gen.call}: json_schema is for chats on a server of kind {dialect.name}. Ask inside assistant(...)."
        )


def _refused(gen: Gen, name: str, dialect: Dialect) -> Unsupported:
    return Unsupported(
        f"{gen.call}: a server of kind {dialect.name} takes no {name}. Leave it out, or say which kind it is: "
        'OpenAI(server="branchwise"), "sglang" or "vllm".'
    )


def _constrain(arguments: dict[str, Any], extra: dict[str, Any], name: str, value: Any, dialect: Dialect) -> None:
    if name in dialect.constraints:
        extra |= dialect.constraints[name](list(value) if name == "choices" else value)
    else:
        schema = {"name": "answer", "schema": json.loads(value), "strict": True}
        arguments["response_format"] = {"type": "json_schema", "json_schema": schema}


def _start(prompt: Prompt, call: str, dialect: Dialect) -> tuple[dict[str, Any], dict[str, Any]]:
    """The conversation's fields, of the client and beyond it."""
    if prompt.broken:
        raise Unsupported(f"{call}: {prompt.broken}")
    if not prompt.chat:
        return {"prompt": prompt.text}, {}
    if prompt.role != "assistant":
        where = "outside of the turns" if prompt.role is None else f"in the turn of {prompt.role}"
        raise Unsupported(
            f"{call} stands {where}, and what a chat writes is the assistant's. Write assistant(...) around it."
        )
    last = prompt.turns[-1]
    if not last["content"]:
        return {"messages": list(prompt.turns[:-1])}, {}
    match dialect.prefill:
        case None:
            raise Unsupported(
                f"{call} goes on with text in the assistant's turn, which a server of kind {dialect.name} does not do. "
                'Give it a turn of its own, or say how the server does: OpenAI(prefill="continue_final_message") or '
                '"prefix".'
            )
        case "continue_final_message":
            return {"messages": list(prompt.turns)}, {"continue_final_message": True, "add_generation_prompt": False}
        case "prefix":
            return {"messages": [*prompt.turns[:-1], {**last, "prefix": True}]}, {}

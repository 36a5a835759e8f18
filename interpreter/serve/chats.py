"""`/v1/chat/completions`: the assistant's next turn, and the tools that it calls."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from branchwise import runtime

from ..local import Engine, completion
from .asking import Caller, num_samples, params_of
from .bodies import ChatBody
from .config import ServeConfig
from .errors import ApiError
from .job import Done, Job, Piece, Prompt
from .shapes import chat_logprobs, checked, finish_of, usage_of
from .toolcalls import MOST_CALLS, Form, Wanted, arguments_fit, call_in, form_of, schema_of, wanted
from .turns import session_of


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read."""

    prompt: Prompt
    tools: Wanted
    form: Form
    logprobs: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """What the assistant said, one sample of it: text, calls of tools, and how they were computed."""

    index: int
    text: str
    calls: tuple[dict[str, Any], ...]
    results: tuple[runtime.Result, ...]  # one after the other; the first is the text's

    @property
    def finish(self) -> str:
        return "tool_calls" if self.calls else finish_of(self.results[-1])


async def read(body: ChatBody, engine: Engine, config: ServeConfig, caller: Caller) -> Asked:
    """What `body` asks for."""
    return await asyncio.to_thread(_read, body, engine, config, caller)


def _read(body: ChatBody, engine: Engine, config: ServeConfig, caller: Caller) -> Asked:
    tools, count = wanted(body), num_samples(body)
    if tools.tools and not tools.must and count > 1:
        raise ApiError(400, "n must be 1 where the model may call tools", param="n")
    session = session_of(body, engine, tools.tools)
    form = form_of(engine.tokenizer.tool_template)
    tokens = session.prompt()
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit == 0:
        raise ApiError(400, "max_tokens must be at least 1, got 0", param="max_tokens")
    more: dict[str, Any] = {"heal": bool(body.continue_final_message) if body.heal is None else body.heal}
    if body.logprobs:
        more |= {"return_logprob": True, "top_logprobs": body.top_logprobs or 0}
    elif body.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if tools.must:
        tokens += _encoded(engine, form.begin)
        more |= {"json_schema": schema_of(tools.tools, form), "heal": False}
    room = max(1, engine.context_length - len(tokens))
    params = params_of(body, engine, config, caller, max_tokens=room if limit is None else limit, **more)
    prompt = Prompt(tokens, params, count, None if tools.must else session.plain_bytes())
    return Asked(prompt, tools, form, bool(body.logprobs))


async def turns(asked: Asked, engine: Engine, gone: Callable[[], Any]) -> AsyncGenerator[Piece | Turn]:
    """Text as it comes, and each sample's whole turn at its end."""
    if asked.tools.tools and not asked.tools.must:
        async for event in _turn_with_tools(asked, engine, gone):
            yield event
        return
    async with Job(engine, [asked.prompt], gone) as job:
        async for told in job.events():
            match told:
                case Piece():
                    if not asked.tools.must:
                        yield told
                case Done(index, result):
                    plain = Turn(index, checked(result).text, (), (result,))
                    yield _must_turn(asked, index, result) if asked.tools.must else plain


def answer(asked: Asked, engine: Engine, said: Sequence[Turn]) -> dict[str, Any]:
    """The choices and the usage of a whole answer."""
    choices = []
    for turn in sorted(said, key=lambda turn: turn.index):
        message: dict[str, Any] = {"role": "assistant", "content": turn.text if turn.text or not turn.calls else None}
        if turn.calls:
            message["tool_calls"] = list(turn.calls)
        choices.append({"index": turn.index, "message": message, **_end(asked, engine, turn)})
    return {"choices": choices, "usage": usage(asked, said)}


async def chunks(asked: Asked, engine: Engine, gone: Callable[[], Any]) -> AsyncGenerator[dict[str, Any]]:
    """The choices of the chunks of a stream, then one with the usage alone."""

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"choices": [{"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}]}

    said: list[Turn] = []
    begun = False
    async for event in turns(asked, engine, gone):
        if not begun:  # what fails at once is an error, and no stream
            begun = True
            for index in range(asked.prompt.n):
                yield chunk(index, {"role": "assistant", "content": ""})
        match event:
            case Piece(index, text):
                yield chunk(index, {"content": text})
            case Turn() as turn:
                said.append(turn)
                if turn.calls:
                    calls = [{"index": number, **call} for number, call in enumerate(turn.calls)]
                    yield chunk(turn.index, {"tool_calls": calls})
                yield chunk(turn.index, {}, **_end(asked, engine, turn))
    yield {"choices": [], "usage": usage(asked, said)}


def usage(asked: Asked, said: Sequence[Turn]) -> dict[str, Any]:
    """What all samples took; the prompt counts once, and what a turn went on from was written by itself."""
    firsts = [turn.results[0] for turn in sorted(said, key=lambda turn: turn.index)]
    total = usage_of([asked.prompt], firsts)
    rest = [result for turn in said for result in turn.results[1:]]
    total["completion_tokens"] += sum(len(result.tokens) for result in rest)
    total["completion_tokens_details"]["forced_tokens"] += sum(result.forced_tokens for result in rest)
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return total


def _end(asked: Asked, engine: Engine, turn: Turn) -> dict[str, Any]:
    told = completion(turn.results[0], lambda token: engine.tokenizer.decode([token]))
    return {
        "logprobs": chat_logprobs(told) if asked.logprobs else None,
        "finish_reason": turn.finish,
        "stop_reason": turn.results[-1].detail,
    }


def _must_turn(asked: Asked, index: int, result: runtime.Result) -> Turn:
    """The turn of a model that was held to a call. One that was cut off is no call: its text is what there is."""
    call = call_in(checked(result).text, asked.tools.tools, asked.form) if result.complete else None
    return Turn(index, "" if call else result.text, (call,) if call else (), (result,))


async def _turn_with_tools(
    asked: Asked, engine: Engine, gone: Callable[[], Any]
) -> AsyncGenerator[Piece | Turn]:
    """Free text until the model begins a call, which is then held to the tools' schemas; and again behind it."""
    form, params, tokens = asked.form, asked.prompt.params, asked.prompt.tokens
    marker = form.begin.strip().removesuffix("[").strip()
    begin = _encoded(engine, marker)
    ids = tuple(begin) if len(begin) == 1 else ()
    free = params
    if marker:
        free = replace(params, stop=(*params.stop, marker), stop_token_ids=(*params.stop_token_ids, *ids))
    held = replace(params, json_schema=schema_of(asked.tools.tools, form), regex=None, heal=False,
                   return_logprob=False, top_logprobs=0, stop=(), stop_regex=(), min_tokens=0)  # fmt: skip
    plain_bytes, text, left = asked.prompt.plain_bytes, "", params.max_tokens
    calls: list[dict[str, Any]] = []
    results: list[runtime.Result] = []
    while left > 0 and len(calls) < MOST_CALLS:
        step = replace(free, max_tokens=left, min_tokens=min(params.min_tokens, left))
        async with Job(engine, [Prompt(tokens, step, 1, plain_bytes)], gone) as job:
            async for told in job.events():
                if isinstance(told, Done):
                    results.append(checked(told.result))
                elif not calls:  # what stands between calls is their form
                    text += told.text
                    yield told
        result = results[-1]
        left -= len(result.tokens)
        begun = bool(marker) and (result.detail == repr(marker) or (bool(ids) and result.tokens[-1:] == ids))
        if not begun or left < 1:
            break
        tokens = tokens + array("i", result.tokens[: result.kept]) + _encoded(engine, result.tail + form.begin)
        async with Job(engine, [Prompt(tokens, replace(held, max_tokens=left))], gone) as job:
            (result,) = await job.results()
        results.append(checked(result))
        left -= len(result.tokens)
        call = call_in(result.text, asked.tools.tools, form) if result.complete else None
        if call is None:
            break
        calls.append(call)
        if not asked.tools.several:
            break
        tokens = tokens + array("i", result.tokens[: result.kept]) + _encoded(engine, form.end)
        plain_bytes = 0
    if not marker and (call := call_in(text, asked.tools.tools, form)) and arguments_fit(call, asked.tools.tools):
        calls, text = [call], ""
    yield Turn(0, text.rstrip() if calls else text, tuple(calls), tuple(results))


def _encoded(engine: Engine, text: str) -> array[int]:
    return array("i", engine.tokenizer.encode(text, at_start=False, control=True) if text else ())

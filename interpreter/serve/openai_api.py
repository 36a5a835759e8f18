"""The endpoints of OpenAI's protocol."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from . import chats, completions
from .asking import check_model
from .bodies import ChatBody, CompletionBody, Sampling
from .job import Job
from .server import Server, caller_of, gone, streamed


def router(server: Server) -> APIRouter:
    """`/v1/models`, `/v1/completions` and `/v1/chat/completions`."""
    routes = APIRouter(prefix="/v1")
    engine, config = server.engine, server.config
    name = config.served_name or engine.name

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(server, name)]}

    @routes.get("/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        return _model(server, check_model(model, engine, config))

    @routes.post("/completions", response_model=None)
    async def complete(body: CompletionBody, request: Request) -> dict[str, Any] | Response:
        head = _head("cmpl", "text_completion", check_model(body.model, engine, config))
        asked = await completions.read(body, engine, config, caller_of(request))
        count = sum(prompt.n for prompt in asked.prompts)
        if body.stream:
            events = completions.chunks(asked, engine, gone(request))
            return await streamed(request, server, count, _counted(server, request, body, head, events))
        with server.gate.enter(count):
            async with Job(engine, asked.prompts, gone(request)) as job:
                results = await job.results()
        for result in results:
            server.figures.count(result)
        return _whole(request, head, completions.answer(asked, engine, results))

    @routes.post("/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> dict[str, Any] | Response:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = _head("chatcmpl", kind, check_model(body.model, engine, config))
        asked = await chats.read(body, engine, config, caller_of(request))
        if body.stream:
            events = chats.chunks(asked, engine, gone(request))
            return await streamed(request, server, asked.prompt.n, _counted(server, request, body, head, events))
        with server.gate.enter(asked.prompt.n):
            said = [turn async for turn in chats.turns(asked, engine, gone(request)) if isinstance(turn, chats.Turn)]
        for turn in said:
            for result in turn.results:
                server.figures.count(result)
        return _whole(request, head, chats.answer(asked, engine, said))

    return routes


async def _counted(
    server: Server, request: Request, body: Sampling, head: dict[str, Any], events: AsyncGenerator[dict[str, Any]]
) -> AsyncGenerator[dict[str, Any]]:
    """The chunks of a stream with what all of them say; that with the usage only if it was asked for."""
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    try:
        async for event in events:
            if usage := event.get("usage"):
                request.state.usage = _counts(usage)
                if not wants_usage:
                    continue
            yield head | event | ({"usage": event.get("usage")} if wants_usage else {})
    finally:
        await events.aclose()


def _whole(request: Request, head: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    request.state.usage = _counts(answer["usage"])
    return head | answer


def _counts(usage: dict[str, Any]) -> dict[str, int]:
    """What the log says of it."""
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "hit_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def _model(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.began,
        "owned_by": "branchwise",
        "max_model_len": server.engine.context_length,
    }

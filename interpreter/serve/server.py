"""What the endpoints of one server share: who may ask, how many at once, and how an answer is sent as it grows."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..local import Engine
from .asking import Caller
from .config import ServeConfig
from .errors import ApiError, ClientGone, api_error
from .gate import Gate
from .seen import Figures

log = logging.getLogger("branchwise.serve")


class Server:
    """What the endpoints of one server share."""

    def __init__(self, engine: Engine, config: ServeConfig) -> None:
        self.engine = engine
        self.config = config
        self.gate = Gate(config.max_requests)
        self.figures = Figures(engine, self.gate)
        self.began = int(time.time())
        self._keys = {key.encode(): hashlib.sha256(key.encode()).hexdigest()[:16] for key in config.api_keys}

    def caller(self, authorization: str) -> Caller:
        """Who sends this header. Every key is compared in full, so the time says nothing about them.

        Raises:
            ApiError: it is none of the keys.
        """
        if not self._keys:
            return Caller()
        given = authorization.removeprefix("Bearer ").strip().encode()
        namespace = None
        for key, name in self._keys.items():
            if hmac.compare_digest(key, given):
                namespace = name
        if namespace is None:
            raise ApiError(401, "the API key is missing or wrong", kind="authentication_error", code="invalid_api_key")
        return Caller(namespace)


def caller_of(request: Request) -> Caller:
    """Who sent it, as its key says."""
    caller: Caller = request.state.caller
    return caller


def gone(request: Request) -> Callable[[], Awaitable[None]]:
    """Awaits the moment at which the client of `request` has gone. Its body must have been read."""

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return wait


class EventStream(StreamingResponse):
    """Lines that are sent as they come; `end` is called when that is over, however it ends."""

    def __init__(self, lines: AsyncGenerator[str], end: Callable[[], Any]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._lines = lines
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()
            await self._lines.aclose()


async def streamed(request: Request, server: Server, count: int, events: AsyncGenerator[dict[str, Any]]) -> EventStream:
    """`events`, for which `count` texts are computed. What fails before the first is answered as an error, and what
    fails later is an event of its own.

    Raises:
        ApiError: there is no room for so many texts.
    """
    inside = ExitStack()
    inside.enter_context(server.gate.enter(count))
    try:
        first = await anext(events)
    except BaseException:
        inside.close()
        raise

    async def lines() -> AsyncGenerator[str]:
        try:
            yield _line(first)
            async for event in events:
                yield _line(event)
            yield "data: [DONE]\n\n"
        except ClientGone:
            return
        except Exception as error:
            told = api_error(error)
            if told.status == 500:
                log.error("request %s failed", request.state.request_id, exc_info=error)
            yield _line(told.body)
            yield "data: [DONE]\n\n"
        finally:
            await events.aclose()

    return EventStream(lines(), inside.close)


def _line(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

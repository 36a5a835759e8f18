"""The server's endpoints, and what holds for all of them: keys, sizes, request ids, errors in one shape."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from branchwise import runtime
from branchwise.lang import LangError

from ..errors import RunError
from ..local import Engine
from . import looks, openai_api, sglang_api
from .config import VERSION, ServeConfig
from .errors import CLIENT_GONE, ApiError, ClientGone, api_error
from .seen import log_request
from .server import Server

log = logging.getLogger("branchwise.serve")

TEXT_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/generate"})
"""What asks for texts: refused before it is read, if there is no room."""

OPEN_PATHS = frozenset({"/health", "/ping"})
"""What is answered without a key."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def make_app(engine: Engine, config: ServeConfig | None = None) -> FastAPI:
    """The server as an ASGI application. Closing it leaves the engine open: that is who made it to close."""
    server = Server(engine, config or ServeConfig())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.gate.closing = True

    app = FastAPI(
        title="branchwise", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.state.server = server
    app.add_middleware(_Edge, server=server)
    if server.config.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(server.config.origins), allow_methods=["*"], allow_headers=["*"]
        )
    _answer_errors(app)
    for part in (openai_api, sglang_api, looks):
        app.include_router(part.router(server))
    return app


class _Edge:
    """Around every request: its id, its key, its size, and a line in the log at its end."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        server, began = self._server, time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"request_id": request_id, "usage": {}}
        status = CLIENT_GONE
        size = 0

        async def sized_receive() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > server.config.max_body_bytes:
                raise HTTPException(413, f"the request has more than {server.config.max_body_bytes} bytes")
            return message

        async def identified_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            try:
                if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
                    state["caller"] = server.caller(headers.get("authorization", ""))
                length = headers.get("content-length", "0")
                if length.isdecimal() and int(length) > server.config.max_body_bytes:
                    raise ApiError(413, f"the request has more than {server.config.max_body_bytes} bytes")
                if scope["path"] in TEXT_PATHS and server.gate.is_full:
                    while (await sized_receive()).get("more_body"):
                        pass
                    raise server.gate.refusal()
            except ApiError as error:
                await _error_response(error)(scope, receive, identified_send)
                return
            await self._app(scope, sized_receive, identified_send)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            server.figures.requests.labels(path, str(status)).inc()
            log_request(request_id, scope["method"], scope["path"], status, began, state["usage"])


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


def _answer_errors(app: FastAPI) -> None:
    async def failed(request: Request, error: Exception) -> Response:
        told = api_error(error)
        if told.status >= 500 and not isinstance(error, ApiError):
            log.error("request %s failed", request.state.request_id, exc_info=error)
        return _error_response(told)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if part != "body")
        match first["type"]:
            case "json_invalid":
                return _error_response(ApiError(400, f"the body is not JSON: {first['ctx']['error']}"))
            case "extra_forbidden":
                return _error_response(ApiError(400, f"there is no field {name}; see /openapi.json", param=name))
            case _:
                return _error_response(ApiError(400, f"{name or 'the body'}: {first['msg']}", param=name or None))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        response = _error_response(told)
        response.headers.update(error.headers or {})
        return response

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    for kind in (ApiError, runtime.EngineError, LangError, RunError, Exception):
        app.add_exception_handler(kind, failed)

"""Endpoints that say how the server is: health, figures, and the cache as a tree where that is allowed."""

from __future__ import annotations

import asyncio
import html
from dataclasses import asdict
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from .server import Server

PAGE = """<!doctype html><meta charset="utf-8"><title>branchwise: the cache</title>
<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="{every_s}">
<style>body{{margin:2em;font:15px system-ui;color-scheme:light dark}}</style>
<h1>The cache of {name}</h1>{picture}"""
EVERY_S = 2
"""How often the page of the tree is drawn anew."""


def router(server: Server) -> APIRouter:
    """`/health`, `/metrics`, and `/tree` if the server is to show it."""
    routes = APIRouter()
    engine = server.engine

    @routes.get("/health", response_class=PlainTextResponse)
    @routes.get("/ping", response_class=PlainTextResponse)
    async def health() -> Response:
        return Response(status_code=503 if server.gate.closing else 200)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(server.figures.page), media_type=CONTENT_TYPE_LATEST)

    if server.config.tree:

        @routes.get("/tree", response_class=JSONResponse)
        async def tree(form: Literal["json", "html"] = "json") -> Response:
            picture = await asyncio.to_thread(lambda: engine.tree)
            if form == "html":
                name = html.escape(engine.name)
                return HTMLResponse(PAGE.format(every_s=EVERY_S, name=name, picture=picture._repr_html_()))
            return JSONResponse(asdict(picture))

    return routes


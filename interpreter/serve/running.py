"""Running the server until a signal says stop."""

from __future__ import annotations

import signal
from contextlib import suppress
from socket import socket

import uvicorn
from fastapi import FastAPI

from ..local import Engine


class Announcing(uvicorn.Server):
    """Says what it serves and where it listens, once it does."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            engine = self._engine
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            said = f"page size {engine.config.page_size}, attention: {engine.attention_name}"
            print(f"{engine!r}, {said}, at {address}", flush=True)


def run(app: FastAPI, engine: Engine, *, host: str, port: int, grace_s: float) -> int:
    """Serve until SIGINT or SIGTERM; the exit code, 1 if it could not listen. What runs then has `grace_s` to end."""
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )  # fmt: skip
    server = Announcing(config, engine)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the server raises the signal that ended it once more, at its end
    with suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else 1

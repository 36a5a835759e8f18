"""A real server on a port of this machine, in a thread, and its engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import uvicorn

from branchwise import Engine, OpenAI
from branchwise.interpreter.serve.app import make_app
from branchwise.interpreter.serve.config import ServeConfig
from branchwise.interpreter.serve.server import Server


@dataclass(frozen=True)
class Live:
    engine: Engine
    server: Server
    url: str

    def client(self, key: str = "none") -> openai.OpenAI:
        """The official client; it tries nothing again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def backend(self, **options: Any) -> OpenAI:
        """Our own client."""
        return OpenAI(self.engine.name, base_url=f"{self.url}/v1", server="branchwise", **options)

    def http(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        with self.http() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        with self.http() as client:
            return client.get(path, **options)

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits, no slot is held, and nobody is inside."""
        stats = self.engine.stats
        busy = stats.running + stats.waiting + stats.protected_slots + stats.held_slots
        return busy == 0 and self.server.gate.inside == 0


@contextmanager
def live(model: Path, config: ServeConfig | None = None, **options: Any) -> Iterator[Live]:
    """Serve `model` while this lasts; at the end nothing may be left, and the tree is checked."""
    with Engine(model, **options) as engine:
        app = make_app(engine, config)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, name="uvicorn")
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                threading.Event().wait(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield Live(engine, app.state.server, f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            thread.join(timeout=30)
        assert not thread.is_alive()
        engine.check()

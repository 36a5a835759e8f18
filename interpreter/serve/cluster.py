"""Several servers as one, on Ray Serve: each a process with its own engine; texts go where their beginning is known.

Ray's proxies take the requests, the `Front` reads them and asks a `Replica`, chosen by `PrefixRouter`. A replica
answers by the same application as a server alone, so everything of `app.py` holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from branchwise.lang import OptionError

from .config import ServeConfig
from .errors import ApiError
from .prefixes import IMBALANCE, Prefixes, text_of

RAY: Any = ray
SERVE: Any = serve
"""Some of their functions have no types."""

log = logging.getLogger("branchwise.serve")

APPLICATION = "branchwise"
MOST_REQUESTS = 1 << 14
"""So many requests are held open; replicas refuse more than they can take much earlier."""

ATTEMPTS = 3
"""How many replicas are asked at most, if those before ended and had said nothing."""


class PrefixRouter(RequestRouter):
    """Ray's interface to `Prefixes`. One is in each process that asks replicas, and knows what went through it."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once; there are no options."""
        self._prefixes: Prefixes[ReplicaID] = Prefixes()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica after the other, the best first; one that takes no more is passed over."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(name) or 0 for name in by_id}
        ranked = self._prefixes.ranked(_text(pending_request), loads, IMBALANCE)
        return [[by_id[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """`replica_id` took it."""
        if text := _text(pending_request):
            self._prefixes.add(text, replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """What it knew is gone."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.forget(replica_id)


def _text(pending_request: PendingRequest | None) -> str:
    return pending_request.kwargs.get("text", "") if pending_request is not None else ""


class Replica:
    """One engine and the application over it, asked by messages."""

    def __init__(self, model: str, options: Mapping[str, Any], config: ServeConfig) -> None:
        from ..local import Engine
        from .app import make_app

        self._engine = Engine(model, **options)
        self._app = make_app(self._engine, config)

    async def ask(self, scope: dict[str, Any], body: bytes, *, text: str) -> AsyncIterator[Message]:
        """What the application sends for a request, message by message. `text` is for the router."""
        messages: asyncio.Queue[Message | BaseException | None] = asyncio.Queue()
        given = iter([{"type": "http.request", "body": body, "more_body": False}])
        left = asyncio.Event()

        async def receive() -> Message:
            for message in given:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        async def answer() -> None:
            try:
                await self._app({**scope, "app": None, "state": {}}, receive, send)
                messages.put_nowait(None)
            except BaseException as error:
                messages.put_nowait(error)

        task = asyncio.create_task(answer())
        try:
            while (message := await messages.get()) is not None:
                if isinstance(message, BaseException):
                    raise message
                yield message
        finally:  # the client has gone, or it is all said
            left.set()
            await asyncio.wait([task], timeout=5)
            task.cancel()

    async def check_health(self) -> None:
        """Raises if the engine does not answer any more; Ray then starts another replica."""
        await asyncio.to_thread(lambda: self._engine.stats)

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            engine.close()


class Front:
    """What Ray's proxies send requests to."""

    def __init__(self, replicas: DeploymentHandle[Any], max_body_bytes: int) -> None:
        self._application = Passing(replicas, max_body_bytes)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._application


class Passing:
    """An ASGI application that reads a request, and passes on what a replica answers."""

    def __init__(self, replicas: DeploymentHandle[Any], max_body_bytes: int) -> None:
        self._ask = replicas.options(method_name="ask", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # there is nothing to begin or to end
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = await _read(receive, self._max_body_bytes)
        if body is None:
            error = ApiError(413, f"the request has more than {self._max_body_bytes} bytes")
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return
        plain = {name: scope[name] for name in ("type", "http_version", "method", "scheme", "query_string", "headers")}
        path = scope["path"]
        plain |= {"path": path, "raw_path": path.encode(), "root_path": "", "asgi": {"version": "3.0"}}
        text = text_of(body)
        for attempt in range(1, ATTEMPTS + 1):
            begun = False
            answer: Any = self._ask.remote(plain, body, text=text)
            try:
                async for message in answer:
                    begun = True
                    await send(message)
                return
            except (ray.exceptions.RayActorError, RayServeException) as error:
                if begun or attempt == ATTEMPTS:  # what was told cannot be taken back
                    raise
                log.warning("a replica ended before it answered; another is asked (%s)", type(error).__name__)
            finally:
                answer.cancel()


async def _read(receive: Receive, most: int) -> bytes | None:
    """The whole body; None if it is larger than that."""
    parts, size, more = list[bytes](), 0, True
    while more:
        message = await receive()
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)


def deploy(
    model: str,
    options: Mapping[str, Any],
    config: ServeConfig,
    *,
    replicas: int,
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> None:
    """Run so many replicas, or let those that run be replaced one after the other if something has changed.

    Args:
        options: of each engine.
        cpus, gpus: that each replica takes; Ray sets the number of its threads by them.

    Raises:
        OptionError: the cluster has too little for them.
    """
    check_room(replicas, {"CPU": cpus, "GPU": gpus})
    made = SERVE.deployment
    router: Any = PrefixRouter
    replica = made(Replica).options(
        name="Replica",
        num_replicas=replicas,
        max_ongoing_requests=config.max_requests,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        request_router_config=RequestRouterConfig(request_router_class=router),
        graceful_shutdown_timeout_s=config.grace_s,
        health_check_period_s=2,
        health_check_timeout_s=30,
    )
    front = made(serve.ingress()(Front)).options(
        name="Front", max_ongoing_requests=MOST_REQUESTS, ray_actor_options={"num_cpus": 0}
    )
    application = front.bind(replica.bind(model, dict(options), config), config.max_body_bytes)
    serve.run(application, name=APPLICATION, route_prefix="/")


def check_room(replicas: int, each: Mapping[str, float]) -> None:
    """Refuse what would wait for ever for machines that are not there.

    Raises:
        OptionError: the cluster has too little.
    """
    there = RAY.cluster_resources()
    for name, amount in each.items():
        if replicas * amount > there.get(name, 0):
            raise OptionError(
                f"serve: {replicas} replicas with {amount:g} {name} each need {replicas * amount:g}, and the cluster "
                f"has {there.get(name, 0):g}. Lower --replicas, or what each takes."
            )


def start(address: str | None, *, host: str, port: int, cpus: int | None = None) -> None:
    """Join the cluster at `address`, or start one on this machine; listen at host and port on each of its machines.

    Args:
        cpus: how many of this machine its own cluster may use; None: all.
    """
    if address is None:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    else:
        ray.init(address=address, log_to_driver=False)
    serve.start(http_options=HTTPOptions(host=host, port=port))


def leave(*, end: bool) -> None:
    """Leave the cluster; with `end` the replicas end, each when what runs there has, or its grace time is over."""
    if end:
        SERVE.shutdown()
    RAY.shutdown()

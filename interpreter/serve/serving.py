"""What `branchwise serve` does: checks what it was told, then an engine, then a server; or replicas on Ray."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from threading import Event
from typing import Any

from branchwise.lang import LangError, OptionError
from branchwise.runtime.config import engine_config
from branchwise.runtime.errors import EngineError

from ..local import Engine
from .app import make_app
from .config import ServeConfig
from .running import run

ENGINE_OPTIONS = (
    "dtype", "device", "quantization", "num_slots", "page_size", "policy", "eviction", "max_running",
    "max_step_tokens", "context_length", "threads",
)  # fmt: skip


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal says stop. What is wrong with the arguments is said before weights are loaded."""
    given = {name: value for name in ENGINE_OPTIONS if (value := getattr(options, name)) is not None}
    try:
        config = ServeConfig(
            api_keys=_keys(options),
            served_name=options.served_model_name,
            max_requests=options.max_requests,
            max_body_bytes=options.max_body_bytes,
            timeout_s=options.timeout,
            grace_s=options.grace,
            tree=options.tree,
            origins=tuple(options.cors_origin),
        )
        engine_config(**given)
        if options.replicas is not None and options.replicas < 1:
            raise OptionError(f"serve: replicas must be at least 1, got {options.replicas}.")
    except (LangError, EngineError, OSError) as error:
        print(f"branchwise serve: error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.replicas is not None:
        return _serve_replicas(options, given, config)
    with Engine(options.model, **given) as engine:
        app = make_app(engine, config)
        return run(app, engine, host=options.host, port=options.port, grace_s=options.grace)


def _serve_replicas(options: argparse.Namespace, given: dict[str, Any], config: ServeConfig) -> int:
    try:
        from . import cluster
    except ImportError as error:
        print(f'branchwise: error: {error}. Write: pip install "branchwise[cluster]"', file=sys.stderr)
        return 1
    stopped = Event()
    cluster.start(options.address, host=options.host, port=options.port)
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has set its own, which abort
        signal.signal(number, lambda *_: stopped.set())
    try:
        cluster.deploy(
            options.model, given, config, replicas=options.replicas, cpus=options.cpus_per_replica,
            gpus=options.gpus_per_replica,
        )  # fmt: skip
        where = f"at http://{options.host}:{options.port}" + (" on every machine" if options.address else "")
        print(f"{options.replicas} replicas of {options.model}, {where}", flush=True)
        if options.address is None:
            stopped.wait()
        else:
            print("They run on; to change them, say this again with other options; serve shutdown ends them.")
    except LangError as error:
        print(f"branchwise serve: error: {error}", file=sys.stderr)
        return 2
    finally:
        cluster.leave(end=options.address is None)
    return 0


def _keys(options: argparse.Namespace) -> tuple[str, ...]:
    keys = list(options.api_key)
    if key := os.environ.get("BRANCHWISE_API_KEY"):
        keys.append(key)
    if options.api_key_file is not None:
        keys += options.api_key_file.read_text(encoding="utf-8").split()
    return tuple(dict.fromkeys(keys))

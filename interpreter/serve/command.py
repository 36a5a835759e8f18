"""`branchwise serve`: arguments, then an engine, then a server."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from branchwise.lang import LangError

EPILOG = """examples:
  branchwise serve smollm2-135m
  branchwise serve ./my-model --port 9000 --dtype bfloat16 --num-slots 100000
  branchwise serve smollm2-135m --host 0.0.0.0 --api-key-file keys.txt

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "The capital of France is", "max_tokens": 8}'
"""


def add_parser(commands: Any) -> None:
    """`serve`, among the other commands."""
    parser = commands.add_parser(
        "serve", help="answer OpenAI's and SGLang's requests over HTTP", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a short name, a folder, or org/name")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; 0.0.0.0 is everywhere (default: here)")
    parser.add_argument("--port", type=_port, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--served-model-name", help="the model's name in requests")
    parser.add_argument("--api-key", action="append", default=[], help="may be said again; $BRANCHWISE_API_KEY is one")
    parser.add_argument("--api-key-file", type=Path, help="a file with a key a line; unlike arguments, nobody sees it")
    parser.add_argument("--max-requests", type=int, default=2048, help="texts at once; more are refused (429)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a text may take")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds that running requests have at the end")
    parser.add_argument("--max-body-bytes", type=int, default=16 << 20, help="larger requests are refused (413)")
    parser.add_argument("--cors-origin", action="append", default=[], help="let web pages of this origin ask")
    parser.add_argument("--tree", action="store_true", help="show the cache and the texts in it at /tree?form=html")
    engine = parser.add_argument_group("the engine")
    engine.add_argument("--dtype", help="auto, fastest, float32, bfloat16 or float16")
    engine.add_argument("--device", help="cpu, cuda, cuda:1, ...")
    engine.add_argument("--quantization", choices=["int8", "int4"], help="pack the weights, on a CPU")
    engine.add_argument("--num-slots", type=int, help="tokens in the cache")
    engine.add_argument("--page-size", type=int)
    engine.add_argument("--policy", help="which request is next: lpm, dfs-weight, fcfs, ...")
    engine.add_argument("--eviction", help="what is forgotten first: lru, lfu, ...")
    engine.add_argument("--max-running", type=int, help="texts in one step")
    engine.add_argument("--max-step-tokens", type=int, help="rows of one step")
    engine.add_argument("--context-length", type=int)
    engine.add_argument("--threads", type=int)


ENGINE_OPTIONS = (
    "dtype", "device", "quantization", "num_slots", "page_size", "policy", "eviction", "max_running",
    "max_step_tokens", "context_length", "threads",
)  # fmt: skip


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal says stop. What is wrong with the arguments is said before weights are loaded."""
    try:
        from .app import make_app
        from .config import ServeConfig
        from .running import run
    except ImportError as error:
        print(f'branchwise: error: {error}. Write: pip install "branchwise[serve]"', file=sys.stderr)
        return 1
    from branchwise.runtime.config import engine_config
    from branchwise.runtime.errors import EngineError

    from ..local import Engine

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
    except (LangError, EngineError, OSError) as error:
        print(f"branchwise serve: error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with Engine(options.model, **given) as engine:
        app = make_app(engine, config)
        return run(app, engine, host=options.host, port=options.port, grace_s=options.grace)


def _keys(options: argparse.Namespace) -> tuple[str, ...]:
    keys = list(options.api_key)
    if key := os.environ.get("BRANCHWISE_API_KEY"):
        keys.append(key)
    if options.api_key_file is not None:
        keys += options.api_key_file.read_text(encoding="utf-8").split()
    return tuple(dict.fromkeys(keys))


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 1 << 16:
        raise ValueError
    return port

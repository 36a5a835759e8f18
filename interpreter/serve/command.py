"""`branchwise serve`: its arguments. What it needs is loaded when they are read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EPILOG = """examples:
  branchwise serve smollm2-135m
  branchwise serve ./my-model --port 9000 --dtype bfloat16 --num-slots 100000
  branchwise serve smollm2-135m --host 0.0.0.0 --api-key-file keys.txt
  branchwise serve smollm2-135m --replicas 4 --cpus-per-replica 8

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
    several = parser.add_argument_group("several replicas, on Ray")
    several.add_argument("--replicas", type=int, help="so many engines, each in a process of its own")
    several.add_argument("--address", help="of a Ray cluster (auto: the one this machine is part of); without it, here")
    several.add_argument("--cpus-per-replica", type=float, default=1.0, help="and so many threads (default: 1)")
    several.add_argument("--gpus-per-replica", type=float, default=0.0)
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


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal says stop; the exit code."""
    try:
        from .serving import serve
    except ImportError as error:
        print(f'branchwise: error: {error}. Write: pip install "branchwise[serve]"', file=sys.stderr)
        return 1
    return serve(options)


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 1 << 16:
        raise ValueError
    return port

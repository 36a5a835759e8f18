"""`python -m branchwise`, which is also the command `branchwise`: reading arguments, and nothing else."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import branchwise
from branchwise.interpreter.serve import command as serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 1 if it failed. A wrong argument exits with 2 at once."""
    options = _parser().parse_args(arguments)
    if options.command == "serve":
        return serve.serve(options)
    # Here, so that --help and --version answer without loading what an engine needs.
    from branchwise.runtime.errors import EngineError

    try:
        if options.action == "fetch":
            return _fetch(options.name)
        return _list()
    except EngineError as error:
        print(f"branchwise: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("branchwise: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="branchwise", description=branchwise.__doc__)
    parser.add_argument("--version", action="version", version=f"branchwise {branchwise.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    serve.add_parser(commands)
    models = commands.add_parser("models", help="list the models that have a short name, or fetch one")
    actions = models.add_subparsers(dest="action", metavar="action")
    fetch = actions.add_parser("fetch", help="get a model and keep it in the cache; nothing happens if it is there")
    fetch.add_argument("name", help="the short name, for instance smollm2-135m")
    return parser


def _list() -> int:
    from branchwise.runtime.models import listings

    for listing in listings():
        state = f"ready: {listing.folder}" if listing.folder else "not fetched"
        print(f"{listing.model.name}  {state}\n  {listing.model.size}; from {listing.model.source}")
    return 0


def _fetch(name: str) -> int:
    from branchwise.runtime.models import fetch

    print(f"{name} is ready: {fetch(name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m branchwise`, which is also the command `branchwise`: reading arguments, and nothing else."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TypeAlias

import branchwise
from branchwise.interpreter.serve import command as serve

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What add_subparsers() gives; argparse has no public name for it."""

MODEL = "smollm2-135m"
EXAMPLES = """examples:
  branchwise demo                                     what sharing does, in a minute
  branchwise run tips.py:advice --show                one program of a file, token by token
  branchwise chat                                     talk to the model
  branchwise tree --film evolution.html               the cache over nine moments, as a film

Each command says more: branchwise run --help
Exit codes: 0 done, 1 failed, 2 wrong argument, 130 interrupted. NO_COLOR is respected.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 1 if it failed. A wrong argument exits with 2 at once."""
    options = _parser().parse_args(arguments)
    if options.command == "serve":
        return serve.serve(options)
    try:
        # Loaded by name, so that --help and --version answer without loading what an engine needs.
        perform = import_module("branchwise.interpreter.commands").perform
        code: int = perform(options)
    except KeyboardInterrupt:
        print("branchwise: interrupted", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="branchwise",
        description=branchwise.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"branchwise {branchwise.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_run(commands)
    _add_chat(commands)
    _add_demo(commands)
    _add_tree(commands)
    _add_bench(commands)
    serve.add_parser(commands)
    _add_models(commands)
    return parser


def _command(commands: Commands, name: str, does: str, more: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"a short name, a folder, a GGUF file, or org/name on the Hugging Face hub; {MODEL} if not given",
    )


def _add_run(commands: Commands) -> None:
    run = _command(
        commands,
        "run",
        "run a program of a file",
        """examples:
  branchwise run facts.py:facts --arg country=Japan
  branchwise run facts.py:facts --arg country=Japan --show     watch it grow, each token in the colour of its origin
  branchwise run facts.py:facts --arg country=Japan --json     one JSON object: text, variables, what it cost
  branchwise run math.py:solve --arg n=8 --temperature 0.7 --seed 1

A value is JSON where it can be read as that (n=8, names='["Ann", "Tom"]'), else text; where the parameter is
annotated as str it is text always. With one program in the file, :program can be left out.
What the function returns goes to stdout, or the text where it returns nothing; what sharing saved goes to stderr.
""",
    )
    run.add_argument("program", metavar="FILE[:PROGRAM]", help="a Python file, and the name of an @function in it")
    run.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of the program; may be repeated"
    )
    _add_model(run)
    how = run.add_mutually_exclusive_group()
    how.add_argument("--show", action="store_true", help="show the state while it grows, tokens coloured by origin")
    how.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    how.add_argument("--quiet", action="store_true", help="print the result and nothing else")
    run.add_argument("--max-tokens", type=int, metavar="N", help="default for each gen that says nothing else")
    run.add_argument("--temperature", type=float, metavar="T", help="default for each gen that says nothing else")
    run.add_argument("--seed", type=int, metavar="N", help="default for each gen that says nothing else")


def _add_chat(commands: Commands) -> None:
    chat = _command(
        commands,
        "chat",
        "talk to a model in the terminal",
        """examples:
  branchwise chat
  branchwise chat Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
  echo "What is the capital of France?" | branchwise chat --temperature 0

In the chat, /undo takes the last turn back, /retry asks it again, /tree shows what the cache holds, /help the rest.
Ctrl-C stops an answer, Ctrl-D ends the chat. Piped in, each line is a turn and only the answers are printed.
""",
    )
    chat.add_argument("model", nargs="?", metavar="MODEL", help=f"as in run --model; {MODEL} if not given")
    chat.add_argument("--system", metavar="TEXT", default="You are a helpful assistant.", help="the system turn")
    chat.add_argument("--max-tokens", type=int, metavar="N", default=512, help="the most of an answer (512)")
    chat.add_argument("--temperature", type=float, metavar="T", default=0.7, help="0 is always the likeliest (0.7)")
    chat.add_argument("--seed", type=int, metavar="N", help="the same answers again")


def _add_demo(commands: Commands) -> None:
    demo = _command(
        commands,
        "demo",
        "show what sharing does: a fork, a batch, a typed object",
        "The model is fetched at the first time (93 to 270 MB) and kept; branchwise models says where.\n",
    )
    _add_model(demo)


def _add_tree(commands: Commands) -> None:
    tree = _command(
        commands,
        "tree",
        "show nine moments in the life of the cache",
        """examples:
  branchwise tree                          in the terminal
  branchwise tree --film evolution.html    and as a page that plays, steps and scrubs in any browser

Two chats, a split, an eviction, a batch, a return and a vote, after figure 3 of the SGLang paper (Zheng et al.).
""",
    )
    tree.add_argument("--film", metavar="FILE", help="write the film to this page; it needs nothing but a browser")
    _add_model(tree)


def _add_bench(commands: Commands) -> None:
    bench = _command(
        commands,
        "bench",
        "run the same programs with and without sharing",
        "Small and quick, to see it on your machine; benchmarks/ in the repository has the measured ones.\n",
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    _add_model(bench)


def _add_models(commands: Commands) -> None:
    models = _command(
        commands,
        "models",
        "list the models that have a short name, or fetch one",
        "examples:\n  branchwise models\n  branchwise models fetch smollm2-135m\n",
    )
    actions = models.add_subparsers(dest="action", metavar="action")
    fetch = actions.add_parser("fetch", help="get a model and keep it in the cache; nothing happens if it is there")
    fetch.add_argument("name", help="the short name, for instance smollm2-135m")


if __name__ == "__main__":
    sys.exit(main())

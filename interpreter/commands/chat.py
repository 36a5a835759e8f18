"""`branchwise chat`: a conversation in the terminal. A turn is a fork of the one before, so taking it back is free."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

from rich.console import Console

from branchwise.lang import assistant, gen, system, user

from ..local import Engine
from ..run import function
from ..session import Completion
from ..show.terminal_tree import tree_as_rich
from ..state import State
from .opening import open_engine

HELP = """/undo   take the last turn back
/retry  ask it again
/tree   what the cache holds
/stats  what was computed so far
/quit   end, as Ctrl-D does; Ctrl-C stops an answer"""


def run(options: Namespace) -> int:
    piped = not sys.stdin.isatty()
    with open_engine(Engine, options.model, quiet=piped) as engine:
        defaults = {"max_tokens": options.max_tokens, "temperature": options.temperature}
        if options.seed is not None:
            defaults["seed"] = options.seed
        console = Console(highlight=False)
        if not piped:
            console.print(f"{engine.name} · /help says what there is", style="dim")
        conversation.run(engine, console, _piped() if piped else _typed(console), options.system, **defaults,
                         backend=engine)
    return 0


@function
def conversation(s: State, engine: Engine, console: Console, lines: Iterator[str], about: str) -> None:
    """Answer each line, and do what those say that begin with a slash."""
    if about:
        s += system(about)
    turns, asked = [s], list[str]()
    for line in lines:
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/undo" | "/retry" as command:
                if not asked:
                    console.print("there is no turn to take back", style="dim")
                    continue
                last = asked.pop()
                turns.pop()
                if command == "/undo":
                    console.print(f"taken back: {last}", style="dim", markup=False)
                    continue
                line = last
            case "/tree":
                console.print(tree_as_rich(engine.tree))
                continue
            case "/stats":
                console.print(str(engine.stats), markup=False)
                continue
            case command if command.startswith("/"):
                console.print(HELP, style="dim", markup=False)
                continue
        turn = turns[-1].copy()
        turn += user(line) + assistant(gen("answer"))
        try:
            for piece in turn.text_iter("answer", graphemes=True):
                console.out(piece, end="")
        except KeyboardInterrupt:
            console.print(" … stopped, and taken back", style="dim")
            continue
        console.print()
        _tell(console, turn)
        turns.append(turn)
        asked.append(line)


def _tell(console: Console, turn: State) -> None:
    """What the answer took, for who sits in front of it."""
    answer = turn.meta("answer")
    if not console.is_terminal or not isinstance(answer, Completion):
        return
    usage, seconds = answer.usage, answer.times.total_s or 0.0
    cut = " · cut off by --max-tokens" if answer.finish_reason == "length" else ""
    console.print(
        f"{usage.hit_tokens} of {usage.prompt_tokens} prompt tokens were there already · "
        f"{usage.completion_tokens} tokens in {seconds:.1f} s{cut}\n",
        style="dim",
    )


def _typed(console: Console) -> Iterator[str]:
    with suppress(ImportError):  # Windows has none
        import_module("readline")  # gives input() a history, and keys to edit with
    while True:
        try:
            yield console.input("[bold]› [/]")
        except KeyboardInterrupt:
            console.print("\nCtrl-D ends the chat", style="dim")
        except EOFError:
            console.print()
            return


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\n")

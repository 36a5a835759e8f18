"""`branchwise run file.py:program`: one program of a file, with its arguments from the command line."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from contextlib import nullcontext

from rich.console import Console
from rich.live import Live

from branchwise.lang import Program

from ..local import Engine
from ..session import Completion
from ..show.spans import settled
from ..show.terminal import Tail, as_rich
from ..state import State
from .opening import open_engine
from .program import Arguments, load_program, read_arguments
from .tracebacks import of_the_user
from .values import plain

EVERY_S = 0.08
DEFAULTS = ("max_tokens", "temperature", "seed")


def run(options: Namespace) -> int:
    with of_the_user():
        program = load_program(options.program)
    arguments = read_arguments(program, options.arg)
    defaults = {name: given for name in DEFAULTS if (given := getattr(options, name)) is not None}
    with open_engine(Engine, options.model, quiet=options.quiet or options.json) as engine:
        before, start = engine.stats, time.perf_counter()
        with of_the_user():
            if options.show:
                state = _shown(program, {**arguments, **defaults}, engine)
            else:
                state = program.run(**arguments, **defaults, backend=engine)
        seconds, spent = time.perf_counter() - start, engine.stats.since(before)
        if options.json:
            told = {
                "program": program.name,
                "arguments": plain(arguments),
                "value": plain(state.ret_value),
                "text": state.text(),
                "messages": state.messages(),
                "variables": {name: plain(state[name]) for name in state._transcript.names()},
                "ended_by": _ends(state),
                "prompt_tokens": spent.prompt_tokens,
                "hit_tokens": spent.hit_tokens,
                "computed_tokens": spent.computed_tokens,
                "generated_tokens": spent.generated_tokens,
                "forced_tokens": spent.forced_tokens,
                "seconds": round(seconds, 3),
            }
            print(json.dumps(told, ensure_ascii=False, indent=2))
            return 0
        if state.ret_value is not None:
            _print_value(state.ret_value)
        elif not options.show:
            print(state.text())
        if not options.quiet:
            print(f"{spent.hits}; {spent.generated_tokens} generated; {seconds:.1f} s", file=sys.stderr)
    return 0


def _shown(program: Program[State], arguments: Arguments, engine: Engine) -> State:
    """Run it and show it: in a terminal while it grows, else when it is done."""
    state = program.stream(**arguments, backend=engine)
    transcript, console = state._transcript, Console()
    growing = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else nullcontext()
    try:
        with growing as live:
            while not (transcript.ended.done and settled(transcript)):
                time.sleep(EVERY_S)
                if live is not None:
                    live.update(Tail(as_rich(transcript)), refresh=True)
    except KeyboardInterrupt:
        state.cancel()
        console.print(as_rich(transcript))
        raise
    console.print(as_rich(transcript))
    state.sync()  # raises what went wrong
    return state


def _ends(state: State) -> dict[str, str]:
    """Why each generation ended that a variable has."""
    ends = {}
    for name in state._transcript.names():
        outcome = state._transcript.find(name)
        result = outcome.result()
        if isinstance(result, Completion):
            ends[name] = result.detail or result.finish_reason
    return ends


def _print_value(value: object) -> None:
    print(value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False, indent=2))

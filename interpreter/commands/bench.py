"""`branchwise bench`: the same programs with and without sharing, on one engine, one after the other."""

from __future__ import annotations

import itertools
import json
import time
from argparse import Namespace
from array import array
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from branchwise.lang import Program, assistant, gen, system, user
from branchwise.runtime import GenerateParams, Handle

from ..local import Engine
from ..run import function
from ..state import State
from .demo import QUESTIONS, SHOWN, answer
from .opening import open_engine

REPEATS = 3
"""Of which the fastest counts: what else the machine does makes a run slower, never faster."""

TIPS = ["sleep", "food", "sport", "friends", "work", "light", "water", "rest"]


@dataclass(frozen=True)
class Measured:
    """One workload: seconds and computed tokens with and without sharing."""

    name: str
    shared_s: float
    alone_s: float
    shared_tokens: int
    alone_tokens: int
    same_answers: bool


class Comparing(Engine):
    """An engine that can be told to share nothing: then each request is in a namespace of its own."""

    sharing = True
    _salts = itertools.count()

    def start(self, prompt: array[int], params: GenerateParams, **more: Any) -> Handle:
        if not self.sharing:
            params = replace(params, cache_salt=f"alone {next(self._salts)}")
        return super().start(prompt, params, **more)


@function(temperature=0, max_tokens=12, stop="\n")
def branches(s: State) -> list[str]:
    s += SHOWN + "\n".join(f"Note {i}: health is made of many small habits, day after day." for i in range(20))
    with s.fork(len(TIPS)) as each:
        each += lambda i: f"\nOne sentence about {TIPS[i]}:" + gen("tip")
    return list(each["tip"])


@function(temperature=0, max_tokens=24, stop="\n")
def conversation(s: State) -> list[str]:
    s += system("You are a helpful assistant. Answer in one short sentence.")
    for number, question in enumerate(QUESTIONS):
        s += user(question) + assistant(gen(f"answer {number}"))
    return [s[f"answer {number}"] for number in range(len(QUESTIONS))]


@function(temperature=0)
def questions(s: State) -> list[str]:
    def one(branch: State, question: str) -> str:
        answer(branch, question)
        return str(branch["answer"])

    return s.map(QUESTIONS * 2, one)


WORKLOADS = {
    "12 few-shot questions": questions,
    f"a fork of {len(TIPS)} over a long text": branches,
    f"a chat of {len(QUESTIONS)} turns": conversation,
}


def run(options: Namespace) -> int:
    console = Console(highlight=False)
    with open_engine(Comparing, options.model, quiet=options.json) as engine:
        found = []
        with Console(stderr=True, quiet=options.json).status("") as status:
            for name, program in WORKLOADS.items():
                status.update(f"{name} …")
                found.append(_measured(engine, name, program))
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        console.print(_table(found))
        console.print("alone: each call computes all of its prompt, as if there were no cache", style="dim")
        console.print(f"{engine!r}; the fastest of {REPEATS} runs", style="dim")
    return 0 if all(one.same_answers for one in found) else 1


def _measured(engine: Comparing, name: str, program: Program[State]) -> Measured:
    program.run(backend=engine)  # what is compiled at the first use is not measured
    seconds: dict[bool, list[float]] = {True: [], False: []}
    tokens, answers = dict[bool, int](), list[list[str]]()
    for sharing in (True, False) * REPEATS:
        engine.sharing = sharing
        engine.reset_cache()
        before, start = engine.stats, time.perf_counter()
        answers.append(program.run(backend=engine).ret_value)
        seconds[sharing].append(time.perf_counter() - start)
        spent = engine.stats.since(before)
        tokens[sharing] = spent.computed_tokens + spent.repeated_rows
    engine.sharing = True
    same = all(one == answers[0] for one in answers)
    return Measured(name, min(seconds[True]), min(seconds[False]), tokens[True], tokens[False], same)


def _table(found: list[Measured]) -> Table:
    table = Table("", "shared", "alone", "faster", "tokens computed", "alone", "same answers", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for one in found:
        table.add_row(
            one.name, f"{one.shared_s:.2f} s", f"{one.alone_s:.2f} s", f"{one.alone_s / one.shared_s:.1f}×",
            str(one.shared_tokens), str(one.alone_tokens), "yes" if one.same_answers else "[red]no[/]",
        )  # fmt: skip
    return table

"""`branchwise demo`: three programs, what they say token by token, and what sharing saved."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from branchwise.lang import gen
from branchwise.runtime.stats import Stats

from ..local import Engine
from ..run import function
from ..show.terminal import as_rich
from ..show.terminal_tree import tree_as_rich
from ..state import State
from .opening import open_engine

SHOWN = "Answer each question with one or two words.\n\n" + "".join(
    f"Q: {question}\nA: {answer}\n\n"
    for question, answer in [
        ("What is the capital of Portugal?", "Lisbon"),
        ("What is the chemical symbol of gold?", "Au"),
        ("Which planet is known as the red planet?", "Mars"),
        ("Who wrote Romeo and Juliet?", "William Shakespeare"),
    ]
)
QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is the chemical symbol of oxygen?",
    "Which planet is closest to the sun?",
    "Who wrote Hamlet?",
    "Who painted the Mona Lisa?",
]
EXTRACTED = (
    "Text: Ada Lovelace, born in 1815, was a mathematician.\n"
    'JSON: {"name": "Ada Lovelace", "born": 1815, "profession": "mathematician"}\n\n'
)
TEXTS = [
    "Alan Turing, born in 1912, was a computer scientist.",
    "Marie Curie was a physicist. She was born in 1867 in Warsaw.",
]


@dataclass
class Person:
    name: str
    born: int
    profession: str


@function(temperature=0, max_tokens=4)
def facts(s: State, country: str) -> None:
    s += "Facts about countries, in one word each.\n"
    s += "Italy: capital Rome, language Italian, continent Europe.\n" + f"{country}:"
    branches = s.fork(3)
    branches += lambda i: [" capital", ", language", ", continent"][i] + gen("fact", stop=[",", "."])
    branches.join()


@function(temperature=0, max_tokens=8, stop="\n")
def answer(s: State, question: str) -> None:
    s += SHOWN + f"Q: {question}\nA:" + gen("answer")


@function(temperature=0)
def extract(s: State, text: str) -> None:
    s += EXTRACTED + f"Text: {text}\nJSON: " + gen("person", json_schema=Person, max_tokens=60)


def run(options: Namespace) -> int:
    console = Console(highlight=False)
    with open_engine(Engine, options.model) as engine:
        console.print(f"{engine!r}", style="dim")
        saved = Table("", "prompt tokens", "cached", "", "generated", "forced", "seconds", box=None)
        for column in saved.columns[1:]:
            column.justify = "right"
        for act in (_forks, _batch, _typed):
            spent = _timed(engine, console, act)
            stats = spent.stats
            share = stats.hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
            saved.add_row(
                (act.__doc__ or "").splitlines()[0].rstrip("."), str(stats.prompt_tokens),
                str(stats.hit_tokens), f"{share:.0%}", str(stats.generated_tokens), str(stats.forced_tokens),
                f"{spent.seconds:.1f}",
            )  # fmt: skip
        console.print(Rule("What sharing saved", style="dim"))
        console.print(saved)
        console.print("Next: branchwise tree, branchwise chat, or a program of your own: branchwise run --help")
    return 0


@dataclass(frozen=True)
class Spent:
    stats: Stats
    seconds: float


def _timed(engine: Engine, console: Console, act: Callable[[Engine, Console], None]) -> Spent:
    console.print(Rule((act.__doc__ or "").splitlines()[0].rstrip("."), style="dim"))
    before, start = engine.stats, time.perf_counter()
    act(engine, console)
    console.print()
    return Spent(engine.stats.since(before), time.perf_counter() - start)


def _forks(engine: Engine, console: Console) -> None:
    """One prompt, three branches."""
    for country in ("Japan", "Chile"):
        state = facts.run(country, backend=engine)
        console.print(as_rich(state._transcript), "")
    console.print("In the cache each shared beginning is a node of its own:")
    console.print(tree_as_rich(engine.tree))


def _batch(engine: Engine, console: Console) -> None:
    """Six questions, one prefix."""
    table = Table("question", "answer", box=None, header_style="dim")
    states = answer.run_batch([{"question": question} for question in QUESTIONS], backend=engine)
    for question, state in zip(QUESTIONS, states, strict=True):
        table.add_row(question, state["answer"].strip(), style="")
    console.print(table)


def _typed(engine: Engine, console: Console) -> None:
    """Two objects of a type."""
    states = extract.run_batch([{"text": text} for text in TEXTS], backend=engine)
    console.print(as_rich(states[-1]._transcript))
    for state in states:
        console.print(f"{state['person']!r}", markup=False)

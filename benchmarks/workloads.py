"""What every system is given to do: the shapes, fixed here before any system was measured.

A workload is a number of programs that start at once (or one after the other), and a program is a list of calls. A call
has a prompt, of token ids and of what earlier calls of its program gave, so calls form a graph: one can start as soon
as those that it quotes are done. The shapes are after the programs in the SGLang paper (Zheng et al. 2024, section 6):
how much is shared, how often it branches, how long questions and answers are; smaller, so that two cores are enough.

All text is random tokens of the demo model's vocabulary, the same ids for every system, and the lengths of answers are
forced, so every system does the same work whatever it answers. `json` alone is real text: its grammar must see letters.
Nothing here is imported but the standard library; nothing here knows a system.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

ORDINARY_TOKENS = range(1000, 40_000)
"""Of the demo model's 49,152; the first and last are control tokens and rarities."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Stands in a prompt for all that call number `call` of the same program gave."""

    call: int


Part: TypeAlias = tuple[int, ...] | Answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One use of a model.

    prompt: its parts, one after the other.
    output: exactly so many tokens are generated (by each of `samples`); 0 where choices are scored instead.
    samples: at temperature 1 if there are several, else greedy.
    choices: continuations whose log-probabilities are wanted.
    text, regex: in the place of `prompt` and `output`: a prompt as text, and what the answer must match.
    """

    prompt: tuple[Part, ...] = ()
    output: int = 0
    samples: int = 1
    choices: tuple[tuple[int, ...], ...] = ()
    text: str | None = None
    regex: str | None = None


Program: TypeAlias = tuple[Call, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is timed, and what is counted in it.

    unit: the result is so many of these a second: "tokens" (generated), "requests" (calls), "choices"; or it is
        "seconds", of a program.
    before: programs that run before the clock starts, and leave in the cache what they leave.
    one_by_one: a program starts when the one before it is done.
    """

    unit: str
    programs: tuple[Program, ...]
    before: tuple[Program, ...] = ()
    one_by_one: bool = False

    @property
    def amount(self) -> int:
        """How much there is of the unit."""
        calls = [call for program in self.programs for call in program]
        count: Callable[[Call], int] = {
            "tokens": lambda call: call.output * call.samples,
            "requests": lambda call: 1,
            "choices": lambda call: len(call.choices),
            "seconds": lambda call: 0,
        }[self.unit]
        return sum(map(count, calls))


class Writer:
    """Random text of given lengths; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(ORDINARY_TOKENS, k=length))


def few_shot(write: Writer) -> Workload:
    """MMLU's shape: 64 questions below the same 1,000 tokens of examples, 4 tokens each."""
    examples = write.tokens(1000)
    return Workload(
        unit="requests",
        programs=tuple((Call(prompt=(examples, write.tokens(40)), output=4),) for _ in range(64)),
    )


def choices(write: Writer) -> Workload:
    """HellaSwag's shape: 32 items of 40 tokens below the same 500, and for each which of 6 endings is the likeliest."""
    examples = write.tokens(500)
    return Workload(
        unit="choices",
        programs=tuple(
            (Call(prompt=(examples, write.tokens(40)), choices=tuple(write.tokens(16) for _ in range(6))),)
            for _ in range(32)
        ),
    )


def agents(write: Writer) -> Workload:
    """ReAct's shape: 8 agents with the same 600 tokens of instructions think, act and observe, four times each."""
    instructions = write.tokens(600)
    return Workload(unit="tokens", programs=tuple(_turns(write, instructions, 4, 60, 20) for _ in range(8)))


def generative_agents(write: Writer) -> Workload:
    """A village: 6 kinds of question (200 tokens of template), each about 5 people, 120 tokens of their memories."""
    programs: list[Program] = []
    for _ in range(6):
        template = write.tokens(200)
        programs += [(Call(prompt=(template, write.tokens(120)), output=20),) for _ in range(5)]
    return Workload(unit="tokens", programs=tuple(write.rng.sample(programs, len(programs))))


def tree_of_thought(write: Writer) -> Workload:
    """Three thoughts of 16 tokens below 500 of a task, three below each of those, and three again: 39 calls."""
    calls: list[Call] = []
    level: list[tuple[Part, ...]] = [(write.tokens(500),)]
    for _ in range(3):
        deeper: list[tuple[Part, ...]] = []
        for path in level:
            for _ in range(3):
                prompt = (*path, write.tokens(4))
                deeper.append((*prompt, Answer(len(calls))))
                calls.append(Call(prompt=prompt, output=16))
        level = deeper
    return Workload(unit="tokens", programs=(tuple(calls),))


def skeleton_of_thought(write: Writer) -> Workload:
    """4 questions below the same 150 tokens: a skeleton of 30 tokens, then its 6 points at once, 30 each."""
    instructions = write.tokens(150)
    programs: list[Program] = []
    for _ in range(4):
        question = (instructions, write.tokens(50))
        points = [Call(prompt=(*question, Answer(0), write.tokens(12)), output=30) for _ in range(6)]
        programs.append((Call(prompt=question, output=30), *points))
    return Workload(unit="tokens", programs=tuple(programs))


def judge(write: Writer) -> Workload:
    """Branch, solve, merge: 3 essays of 600 tokens, each judged in 5 respects (40 tokens) by 32 each, then in all."""
    programs: list[Program] = []
    for _ in range(3):
        essay = write.tokens(600)
        respects = [Call(prompt=(essay, write.tokens(40)), output=32) for _ in range(5)]
        merged = (essay, *(Answer(i) for i in range(5)), write.tokens(20))
        programs.append((*respects, Call(prompt=merged, output=32)))
    return Workload(unit="tokens", programs=tuple(programs))


def json(write: Writer) -> Workload:
    """16 short biographies below the same instructions, and a JSON object about each."""
    instructions = (
        "Read the note about a person and write down what it says as JSON with the keys name, city, year, trade and "
        "married, in this order, and nothing else. The name is the first name alone. The year is the year of birth, "
        "as a number. Where the note does not say something, write what is most likely.\n\n"
        "Note: Ada was born in Turin in 1961. She has been a baker all her life, and married young.\n"
        'JSON: {"name": "Ada", "city": "Turin", "year": 1961, "trade": "baker", "married": true}\n\n'
        "Note: In Leeds there lives a man called Owen, a roofer, on his own since he came there. He is of 1974.\n"
        'JSON: {"name": "Owen", "city": "Leeds", "year": 1974, "trade": "roofer", "married": false}\n\n'
    )
    names = ["Mira", "Jonas", "Ilse", "Pavel", "Nora", "Tomas", "Greta", "Hugo"]
    cities = ["Porto", "Vienna", "Tartu", "Bergen", "Ghent", "Split", "Cork", "Basel"]
    trades = ["joiner", "nurse", "printer", "farmer", "tailor", "teacher", "pilot", "cook"]
    programs: list[Program] = []
    for _ in range(16):
        name, city, trade = (write.rng.choice(words) for words in (names, cities, trades))
        note = (
            f"Note: {name} came to {city} as a child, and was born in {write.rng.randint(1930, 1999)}. Neighbours "
            f"remember a quiet {trade} with {write.rng.randint(2, 9)} cats, who was seen at the market every "
            f"{write.rng.choice(['Monday', 'Friday', 'Sunday'])} with {write.rng.choice(['a husband', 'a wife'])}.\n"
            "JSON: "
        )
        programs.append((Call(text=instructions + note, regex=PERSON),))
    return Workload(unit="requests", programs=tuple(programs))


PERSON = (
    r'\{"name": "[A-Z][a-z]{2,9}", "city": "[A-Z][a-z]{2,9}", "year": (19|20)[0-9][0-9], '
    r'"trade": "[a-z]{3,9}", "married": (true|false)\}'
)
"""Every answer takes about as many tokens, and there is an end to it."""


def chat_short(write: Writer) -> Workload:
    """8 chats of 4 turns, 100 tokens asked and 16 answered."""
    return Workload(unit="tokens", programs=tuple(_turns(write, write.tokens(32), 4, 100, 16) for _ in range(8)))


def chat_long(write: Writer) -> Workload:
    """8 chats of 4 turns, 100 tokens asked and 48 answered."""
    return Workload(unit="tokens", programs=tuple(_turns(write, write.tokens(32), 4, 100, 48) for _ in range(8)))


def rag(write: Writer) -> Workload:
    """24 questions below the same 100 tokens of instructions and 3 of 6 passages of 200 in their order; 16 each."""
    instructions = write.tokens(100)
    passages = [write.tokens(200) for _ in range(6)]
    found = [sorted(write.rng.sample(range(6), 3)) for _ in range(24)]
    return Workload(
        unit="tokens",
        programs=tuple(
            (Call(prompt=(instructions, *(passages[i] for i in best), write.tokens(24)), output=16),) for best in found
        ),
    )


def self_consistency_32(write: Writer) -> Workload:
    """32 samples of 32 tokens below 700."""
    return Workload(unit="tokens", programs=((Call(prompt=(write.tokens(700),), output=32, samples=32),),))


def self_consistency_64(write: Writer) -> Workload:
    """64 samples of 24 tokens below 700."""
    return Workload(unit="tokens", programs=((Call(prompt=(write.tokens(700),), output=24, samples=64),),))


def no_sharing(write: Writer) -> Workload:
    """16 streams that have nothing in common: 100 tokens each, 48 more."""
    return Workload(unit="tokens", programs=tuple((Call(prompt=(write.tokens(100),), output=48),) for _ in range(16)))


def one_stream(write: Writer) -> Workload:
    """One prompt of 100 tokens, and 64 more."""
    return Workload(unit="tokens", programs=((Call(prompt=(write.tokens(100),), output=64),),))


def first_token_cold(write: Writer) -> Workload:
    """1,000 tokens that nobody has seen, and one more; five times."""
    programs = tuple((Call(prompt=(write.tokens(1000),), output=1),) for _ in range(5))
    return Workload(unit="seconds", programs=programs, one_by_one=True)


def first_token_warm(write: Writer) -> Workload:
    """1,000 tokens that went before, 16 that did not, and one more; five times."""
    seen = write.tokens(1000)
    return Workload(
        unit="seconds",
        programs=tuple((Call(prompt=(seen, write.tokens(16)), output=1),) for _ in range(5)),
        before=((Call(prompt=(seen, write.tokens(16)), output=1),),),
        one_by_one=True,
    )


def _turns(write: Writer, begin: tuple[int, ...], turns: int, asked: int, answered: int) -> Program:
    """A conversation: each turn is `asked` tokens more, and an answer of `answered`."""
    prompt: tuple[Part, ...] = (begin,)
    calls: list[Call] = []
    for turn in range(turns):
        prompt = (*prompt, write.tokens(asked))
        calls.append(Call(prompt=prompt, output=answered))
        prompt = (*prompt, Answer(turn))
    return tuple(calls)


WORKLOADS: dict[str, Callable[[Writer], Workload]] = {
    make.__name__: make
    for make in (
        few_shot, choices, agents, generative_agents, tree_of_thought, skeleton_of_thought, judge, json, chat_short,
        chat_long, rag, self_consistency_32, self_consistency_64, no_sharing, one_stream, first_token_cold,
        first_token_warm,
    )
}  # fmt: skip

QUICK = ("tree_of_thought", "self_consistency_32", "no_sharing", "one_stream")
"""Those of a quick run."""


def workload(name: str, seed: int) -> Workload:
    """The workload of that name, its texts drawn by `seed`."""
    return WORKLOADS[name](Writer(seed))

"""Nine moments in the life of the cache, after figure 3 of the SGLang paper (Zheng et al., "SGLang: Efficient
Execution of Structured Language Model Programs")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from branchwise.lang import assistant, gen, system, user

from ..local import Engine
from ..run import function
from ..state import State

NUM_SLOTS = 112
"""So few that two chats and a batch do not fit together: something has to go."""

EXAMPLES = (
    "Great food! -> positive\nToo loud. -> negative\nI would come back. -> positive\n"
    "Cold soup, rude waiter. -> negative\n"
)
REVIEWS = ["Best pizza in town.", "We waited an hour.", "Lovely staff!"]


@dataclass(frozen=True)
class Moment:
    title: str
    says: str
    happens: Callable[[Engine], object]


@function(temperature=0, max_tokens=12, stop="\n")
def chat(s: State, question: str) -> None:
    s += system("You are a helpful assistant. Be brief.")
    go_on(s, question)


def go_on(s: State, question: str) -> None:
    """One more turn, and wait for its answer."""
    s += user(question) + assistant(gen("answer"))
    s.sync()


@function(temperature=0, max_tokens=1)
def review(s: State, text: str) -> None:
    s += EXAMPLES + f"{text} ->" + gen("verdict")


@function
def samples(s: State) -> None:
    s += EXAMPLES + "Fine, I suppose. ->" + gen("why", n=5, temperature=1.2, seed=4, max_tokens=4)


def moments_of() -> list[Moment]:
    """The nine, to be played in order on an engine of `NUM_SLOTS` slots; they hold the states of the two chats."""
    chats: dict[str, State] = {}

    def begin(name: str, question: str) -> Callable[[Engine], None]:
        return lambda engine: chats.update({name: chat.run(question, backend=engine)})

    def reviewed(engine: Engine) -> None:
        review.run_batch([{"text": text} for text in REVIEWS], backend=engine)

    return [
        Moment("An empty cache", "Nothing was asked yet.", lambda _: None),
        Moment(
            "A first chat",
            "System turn and question are one node, the answer is another below it.",
            begin("first", "What is bread made of?"),
        ),
        Moment(
            "Its second turn",
            "It goes on where the answer ended: only the new turn is computed.",
            lambda _: go_on(chats["first"], "And butter?"),
        ),
        Moment(
            "A second chat",
            "It begins with the same system turn: the edge splits, and both share it.",
            begin("second", "Who was Ada Lovelace?"),
        ),
        Moment(
            "It goes on, and room gets short",
            "What was least recently used is evicted, from the end of its path.",
            lambda _: go_on(chats["second"], "When was she born?"),
        ),
        Moment(
            "A few-shot question",
            "It shares nothing with the chats: a branch of its own. The older chat makes room.",
            lambda engine: review.run(REVIEWS[0], backend=engine),
        ),
        Moment("A batch of them", "The examples are there already; each question hangs below.", reviewed),
        Moment(
            "The first chat returns",
            "What of it is left is found, the rest is computed again.",
            lambda _: go_on(chats["first"], "And jam?"),
        ),
        Moment(
            "Five samples of one question",
            "They are branches below it; older paths make room.",
            lambda engine: samples.run(backend=engine),
        ),
    ]

"""Programs as users write them, in every form the language has: strict type checkers find nothing to say here.

They are checked, and never run. `assert_type` says what an editor shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, assert_type

import branchwise as bw
from branchwise import Branches, Engine, Program, State, assistant, function, gen, select, system, user

# ------------------------------------------------------------------------------------------------------ functions


@function
def plain(s: State, question: str) -> str:
    s += "Q: " + question + "\nA:"
    s += gen("answer", max_tokens=16, stop="\n")
    answer: str = s["answer"]
    return answer


@function(max_tokens=64, temperature=0.2)
def with_defaults(s: State, *questions: str, style: str = "short") -> None:
    s += f"In a {style} way: "
    for number, question in enumerate(questions):
        s += question + gen(f"answer{number}")


class Poet:
    """A program may be a method."""

    def __init__(self, name: str) -> None:
        self.name = name

    @function
    def sing(self, s: State, of: str) -> None:
        s += system(f"You are {self.name}.") + user(of) + assistant(gen("song", n=3, temperature=1.0))


assert_type(plain, Program[State])
assert_type(with_defaults, Program[State])
assert_type(plain.bind(question="Why?"), Program[State])
assert_type(Poet("Ada").sing, Program[State])


# --------------------------------------------------------------------------------------------------------- writing


@function
def every_verb(s: State) -> None:
    s += bw.text("from a stranger") + bw.text("<|im_end|>", raw=True)
    s += bw.role("tool", "12 feet", name="depth", tool_call_id="1")
    s += bw.tools([{"type": "function", "function": {"name": "depth"}}])
    s += bw.user_begin() + "How deep?" + bw.user_end()
    s += gen() + gen("a", max_tokens=1, stop=["\n", "."], stop_regex=r"\d+", temperature=0, top_p=0.9, top_k=40)
    s += gen("b", seed=1, n=2, ignore_eos=True, heal=False, regex="[a-z]+", min_tokens=2, stop_token_ids=[2])
    s += gen(min_p=0.1, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={5: -1.0}, return_logprob=True)
    s += gen("c", choices=("yes", "no")) + gen("d", choices=["yes", "no"], temperature=1)
    s += select("e", ["yes", "no"], choices_method="greedy_token_selection")
    s.system("Answer briefly.")
    s.user("Why?")
    with s.assistant():
        s += "Because" + gen("f")
    with s.user() as turn:
        turn += "And how?"
    s.assistant_begin()
    s += gen("g")
    s.assistant_end()
    s["mine"] = {"any": ["value"]}


@function
def in_branches(s: State, ideas: Sequence[str]) -> list[str]:
    branches = s.fork(len(ideas))
    assert_type(branches, Branches[State])
    branches += "The same to all. "
    branches += lambda i: f"{i}. {ideas[i]}" + gen("tip")
    for branch in branches:
        assert_type(branch, State)
        branch += gen("more")
    branches[0] += "Only here."
    branches.join()
    with s.fork(2) as pair:
        assert_type(pair, Branches[State])
        pair += gen("opinion")
    other = s.copy()
    assert_type(other, State)
    assert_type(branches["tip"], list[Any])
    assert_type(branches[1], State)
    assert_type(branches[:1], list[State])
    tips: list[str] = s["tip"]
    return tips


@function
def composed(s: State) -> None:
    plain(s, "Why?")
    s += str(s["answer"])
    every_verb(s)


# --------------------------------------------------------------------------------------------------------- running


def running(engine: Engine) -> State:
    bw.set_default_backend(engine)
    state = plain.run("Why?", backend=engine, temperature=0.5, max_tokens=8)
    assert_type(state, State)
    assert_type(plain.run(question="Why?", stream=True), State)
    assert_type(plain.stream("Why?"), State)
    states = plain.run_batch([{"question": "Why?"}], num_threads=4, progress_bar=True, return_exceptions=True)
    for result in states:
        if not isinstance(result, Exception):
            reading(result)
    return state


def reading(s: State) -> None:
    assert_type(s.text(), str)
    assert_type(s.messages(), list[dict[str, Any]])
    assert_type(s.text_iter("answer", graphemes=True), Iterator[str])
    assert_type("answer" in s, bool)
    s.get("answer", "none")
    s.sync()
    s.cancel()
    meta = s.meta("answer")
    if isinstance(meta, bw.Completion):
        assert_type(meta.text, str)
        assert_type(meta.usage.hit_tokens, int)
        assert_type(meta.times.total_s, float | None)
    else:
        assert_type(meta, bw.Selection)
        assert_type(meta.scores, tuple[float, ...])
    failure = s.error
    if failure is not None:
        raise failure


def planning(engine: Engine) -> None:
    trace = plain.trace("Why?")
    assert_type(trace, bw.Trace)
    for step in trace.steps:
        print(step.branch, step.written_at)
    if trace.ended is not None:
        print(trace.ended.why)
    plan = plain.explain("Why?", backend=engine)
    assert_type(plan, bw.Plan)
    assert_type(plan.computed_tokens, int)
    assert_type(plan.table(), list[dict[str, Any]])
    assert_type(plain.explain_batch([{"question": "Why?"}], backend=engine), bw.Plan)


def testing_a_program() -> None:
    backend = bw.Scripted({"answer": ["So.", RuntimeError("no")]}, delay_s=0.01)
    try:
        assert plain.run("Why?", backend=backend).ret_value == "So."
    except bw.GenerationError as error:
        print(error.__cause__)
    except (bw.CallError, bw.OptionError, bw.ConstraintError, bw.UnknownVariable, bw.NoBackend, bw.Cancelled):
        raise
    print([call.prompt for call in backend.calls])


def tokens(engine: Engine) -> None:
    result = engine.generate("Why?", max_tokens=4)
    assert_type(result.text, str)
    several = engine.generate("Why?", n=2, temperature=1.0)
    print([one.tokens for one in several], engine.score("Why?", [" So", " No"]))
    with engine.hold("Why?"):
        print(engine.stats.hits, engine.stats.free_slots)

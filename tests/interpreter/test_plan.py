"""What a plan says a run will cost, beside what the run then counts; and that a run finds what was made for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from branchwise import Engine, GenerationError, State, assistant, function, gen, role, select, system, tools, user
from branchwise.lang import Plan, Program
from branchwise.lang.regex import most_characters
from branchwise.runtime import GenerateParams
from branchwise.runtime.stats import Stats

RIVER = "The river runs past the old mill and under the bridge; nobody knows how deep it is there. "


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    defaults = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "heal": False}
    with Engine(tiny_model, num_slots=4096, seed=0, defaults=defaults) as engine:
        yield engine
        engine.check()


def close(planned: int, counted: int) -> bool:
    return abs(planned - counted) <= 0.1 * counted


def check(plan: Plan, stats: Stats) -> None:
    """Within a tenth of what the run counted."""
    used = stats.num_slots - stats.free_slots
    facts = (
        ("prompt", plan.prompt_tokens, stats.prompt_tokens),
        ("computed", plan.computed_tokens, stats.computed_tokens),
        ("slots", plan.slots, used),
        ("generated", plan.most_tokens, stats.generated_tokens),
        ("hits", plan.hit_tokens, stats.hit_tokens),
        ("requests", sum(row.requests for row in plan.calls), stats.requests),
    )
    for what, planned, counted in facts:
        assert close(planned, counted), f"{what}: planned {planned}, counted {counted}\n{plan}\n{stats}"


@function
def shared(s: State, topic: str) -> None:
    s += RIVER * 3 + f"\n{topic}?"
    branches = s.fork(4)
    branches += lambda i: f" In {i} words: " + gen("x")
    branches.join()


@function
def turns(s: State) -> None:
    s += system("You are a helpful assistant. " * 6)
    s += user("How deep is the river?") + assistant(gen("a"))
    s += user("And how wide?") + assistant("It is " + gen("b"))
    s += user("Is it far?") + assistant(select("c", ["yes", "no, it is not"]))
    s += role("user", "Why?") + assistant(gen("d"))


@function
def samples(s: State) -> None:
    s += RIVER * 2 + gen("x", n=4, temperature=1.0, seed=1)
    s += " So: " + gen("y", n=3)
    s += " Or: " + gen("z")


@function
def forced(s: State) -> None:
    s += RIVER * 4 + gen("date", regex=r"on [xz]{4}\.", max_tokens=100)
    s += " It is " + gen("kind", choices=["deep", "wide"], temperature=1.0, seed=3)
    s += gen("more")


@function
def deep(s: State) -> None:
    s += RIVER
    with s.fork(2) as ideas:
        ideas += lambda i: f"Idea {i}: " + gen("idea")
        for idea in ideas:
            with idea.fork(3) as judges:
                judges += lambda j: f"\nJudge {j} says: " + gen("score", temperature=1.0)
    with s.fork(2) as later:
        later += lambda i: f"And later, {i}: " + gen("later")


@function
def quoting(s: State) -> None:
    s += RIVER * 4
    with s.fork(2) as branches:
        branches += lambda i: f"{i}: " + gen("x", max_tokens=12)
    s += "First: " + s["x"][0] + " Second: " + s["x"][1] + " So: " + gen("end")


PROGRAMS: list[tuple[Program[State], list[dict[str, Any]]]] = [
    (shared, [{"topic": "Why"}]),
    (shared, [{"topic": topic} for topic in ("Why", "How deep", "To be")]),
    (turns, [{}]),
    (turns, [{}, {}]),
    (samples, [{}]),
    (forced, [{}]),
    (deep, [{}]),
    (quoting, [{}]),
]


@pytest.mark.parametrize(("program", "batch"), PROGRAMS, ids=lambda value: getattr(value, "name", None) or len(value))
def test_a_plan_is_within_a_tenth_of_what_the_run_counts(
    engine: Engine, program: Program[State], batch: list[dict[str, Any]]
) -> None:
    plan = program.explain_batch(batch, backend=engine)
    assert plan.ended == ()
    assert engine.stats.requests == 0, "a plan asks the model nothing"
    program.run_batch(batch, backend=engine)
    check(plan, engine.stats)


def test_one_run_after_the_other_is_planned_as_it_is_run(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=4096, defaults={"temperature": 0, "ignore_eos": True}) as engine:
        plan = turns.explain(backend=engine, max_tokens=5)
        turns.run(backend=engine, max_tokens=5)
        check(plan, engine.stats)


@pytest.mark.slow
def test_a_plan_for_the_demo_model_is_within_a_tenth(demo_model: Path) -> None:
    with Engine(demo_model, num_slots=4096, defaults={"temperature": 0, "ignore_eos": True, "max_tokens": 6}) as engine:
        for program, batch in PROGRAMS:
            engine.reset_cache()
            before = engine.stats
            plan = program.explain_batch(batch, backend=engine)
            program.run_batch(batch, backend=engine)
            check(plan, engine.stats.since(before))


def test_a_plan_prints_calls_constants_and_totals(engine: Engine) -> None:
    plan = shared.explain_batch([{"topic": "Why"}, {"topic": "How"}], backend=engine)
    head, columns, *rows = str(plan).splitlines()
    assert head == "shared: 2 runs, 8 calls"
    expected = "run line branch says tokens prompt cached computed writes up to"
    assert columns.split() == expected.split()
    assert rows[-4:] == [
        f"shared by all runs: {plan.shared_tokens} tokens",
        f"prompt tokens: {plan.prompt_tokens}, of which {plan.hit_tokens} are in the cache by then, "
        f"{plan.hit_tokens / plan.prompt_tokens:.0%}",
        f"computed: {plan.computed_tokens} tokens, if all 48 that may be written are",
        f"slots: {plan.slots} of 4096",
    ]
    assert len(rows) == 4 + len(plan.rows) == 4 + 2 * 9
    prompts = [engine.prompt_tokens(RIVER * 3 + f"\n{topic}? In 0 words: ") for topic in ("Why", "How")]
    assert plan.shared_tokens == next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
    assert plan._repr_html_().count("<tr>") == 1 + len(plan.rows)
    assert plan.table()[0]["tokens"] == len(engine.tokenizer.encode(RIVER * 3 + "\nWhy?", at_start=False, control=True))


def test_what_a_constraint_forces_is_in_the_plan(engine: Engine) -> None:
    calls = forced.explain(backend=engine).calls
    assert calls[0].forced == "on "
    assert calls[0].most_tokens == len(engine.continuation_tokens("on ")) + len("xzxz.")

    @function
    def only(s: State) -> None:
        s += RIVER + gen("x", regex="the old mill")

    (call,) = only.explain(backend=engine).calls
    assert call.forced == "the old mill"
    assert call.most_tokens == len(engine.continuation_tokens("the old mill"))


def test_a_pool_that_is_too_small_is_said(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=128) as small:
        text = str(turns.explain(backend=small))
        assert "of 128: some prefixes will be evicted and computed again. Raise num_slots" in text


def test_a_trace_that_ended_is_in_the_plan_once(engine: Engine) -> None:
    @function
    def decides(s: State, word: str) -> None:
        s += word + select("x", ["yes", "no"])
        if s["x"] == "yes":
            s += gen("y")

    plan = decides.explain_batch([{"word": "a "}, {"word": "b "}], backend=engine)
    assert [run for run, _ in plan.ended] == [0, 1]
    assert str(plan).count("the trace ends") == 1
    assert "2 of 2 runs: the trace ends at " in str(plan)


def test_equal_greedy_calls_are_planned_once_and_draws_are_not(engine: Engine) -> None:
    @function
    def twins(s: State, temperature: float) -> None:
        s += RIVER
        with s.fork(3) as branches:
            branches += gen("x", max_tokens=20, temperature=temperature)

    greedy, drawn = (twins.explain(t, backend=engine).slots for t in (0.0, 1.0))
    assert drawn - greedy == 2 * 19


def test_a_constraint_that_this_model_cannot_have_is_found_by_the_plan(engine: Engine) -> None:
    @function
    def program(s: State) -> None:
        s += "a" + gen("first")
        s += gen("big", grammar="start: nothing_of_this_name")

    with pytest.raises(GenerationError, match=r'^gen\("big"\): ') as caught:
        program.explain(backend=engine)
    assert caught.value.__notes__[0].startswith(f"The call stands at {__file__}")
    assert engine.stats.requests == 0


@pytest.mark.parametrize(
    ("text", "said"), [("", "the prompt is empty"), ("a b " * 3000, "the prompt has [0-9]+ tokens, and the context")]
)
def test_a_prompt_that_cannot_be_computed_is_found_by_the_plan(engine: Engine, text: str, said: str) -> None:
    @function
    def program(s: State) -> None:
        s += text + gen("x")

    with pytest.raises(GenerationError, match=rf'^gen\("x"\): {said}'):
        program.explain(backend=engine)


def test_a_role_that_the_template_refuses_is_found_by_the_plan(engine: Engine) -> None:
    @function
    def program(s: State) -> None:
        s += tools([{"type": "function", "function": {"name": "depth"}}])
        s += user("How deep?") + assistant(gen("x"))

    with pytest.raises(GenerationError, match=r'^gen\("x"\): the model\'s chat template does not tell'):
        program.explain(backend=engine)


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("", 0),
        ("abc", 3),
        ("a|bcd|", 3),
        ("^[0-9]{2,4}$", 4),
        ("(ab?){3}c{0}", 6),
        (r"\d+", None),
        ("(a|b*)c", None),
        ("(^)*", 0),
        ("(?i)x{,2}", 2),
    ],
)
def test_the_longest_text_of_a_pattern(pattern: str, most: int | None) -> None:
    assert most_characters(pattern) == most


# --------------------------------------------------------------------------------------------- what a run finds


@dataclasses.dataclass
class Spy:
    """What an engine is asked to encode, to compile and to generate, in order."""

    events: list[tuple[str, str]]

    def of(self, kind: str) -> list[str]:
        return [what for event, what in self.events if event == kind]


@pytest.fixture
def spy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Spy:
    events: list[tuple[str, str]] = []
    encode, ask, begin, start = (
        engine.tokenizer.encode, engine._compiler.compile, engine._compiler._begin, engine.start
    )  # fmt: skip

    def encoded(text: str, **how: Any) -> list[int]:
        events.append(("encode", text))
        return encode(text, **how)

    def asked(spec: Any) -> Any:
        events.append(("ask", str(spec)))
        return ask(spec)

    def begun(spec: Any, future: Any) -> Any:
        events.append(("compile", str(spec)))
        return begin(spec, future)

    def started(prompt: Any, params: GenerateParams, **how: Any) -> Any:
        events.append(("start", params.regex or ""))
        return start(prompt, params, **how)

    monkeypatch.setattr(engine.tokenizer, "encode", encoded)
    monkeypatch.setattr(engine._compiler, "compile", asked)
    monkeypatch.setattr(engine._compiler, "_begin", begun)
    monkeypatch.setattr(engine, "start", started)
    return Spy(events)


@function
def steps(s: State) -> None:
    s += RIVER + gen("a", max_tokens=4)
    s += " And so: " + gen("b", regex="[a-f]{4}")
    s += user(RIVER) + assistant(gen("c"))


def test_what_a_plan_has_encoded_no_run_encodes_again(engine: Engine, spy: Spy) -> None:
    steps.explain(backend=engine)
    planned = spy.of("encode")
    assert any(RIVER in text for text in planned)
    steps.run(backend=engine)
    steps.run_batch([{}, {}], backend=engine)
    assert spy.of("encode") == planned


def test_what_a_run_has_encoded_the_next_does_not_encode_again(engine: Engine, spy: Spy) -> None:
    steps.run(backend=engine)
    once = spy.of("encode")
    assert sum(text.count(RIVER) for text in once) == 2
    steps.run(backend=engine)
    assert spy.of("encode") == once


def test_a_constraint_begins_to_compile_when_it_is_written_and_not_when_it_is_reached(
    engine: Engine, spy: Spy
) -> None:
    @function
    def program(s: State) -> None:
        s += "a" + gen("first", max_tokens=40) + gen("second", regex="[u-w]{2}")
        with s.fork(3) as branches:
            branches += "b" + gen("third", max_tokens=40)
            branches += gen("fourth", regex="[x-z]{2}")

    program.run(backend=engine)
    for pattern in ("[u-w]{2}", "[x-z]{2}"):
        assert spy.events.index(("ask", f"Regex(pattern={pattern!r})")) < spy.events.index(("start", pattern))
    assert spy.events.index(("ask", "Regex(pattern='[u-w]{2}')")) < spy.events.index(("start", ""))
    assert len(spy.of("compile")) == 2, "each once"


def test_a_plan_leaves_its_constraints_compiled(engine: Engine, spy: Spy) -> None:
    steps.explain(backend=engine)
    assert len(spy.of("compile")) == 1
    steps.run(backend=engine)
    assert len(spy.of("compile")) == 1

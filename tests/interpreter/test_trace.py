"""Programs that are run without a model: what they say, and where that is over."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from branchwise.interpreter import AsyncState, Scripted, State, UnknownVariable, function
from branchwise.lang import (
    CallError,
    ConstraintError,
    Forked,
    Gen,
    LangError,
    OptionError,
    RoleBegin,
    Select,
    Text,
    Trace,
    assistant,
    gen,
    select,
    user,
)
from branchwise.lang.ops import Var
from branchwise.lang.symbol import Unknown

LINE = "test_trace.py:"
GIVEN = (
    "the value of a call was given to what needs its text (TypeError: the JSON object must be str, bytes or bytearray, "
    "not Symbol)"
)
JOINED = GIVEN.partition("TypeError")[0] + "TypeError: sequence item 0: expected str instance, Symbol found)"
TEXT = 'the value of gen("x") was made into text; appended with +, it could be traced'


def lines(trace: Trace) -> list[str]:
    """What was said, and in which branch, one a line."""
    return [f"{row['branch']}|{row['says']}" for row in trace.table()]


@function(max_tokens=8)
def tips(s: State, topic: str, count: int = 2) -> Any:
    s += user(f"Tips on {topic}, please.")
    s.assistant_begin()
    s += "Here:"
    branches = s.fork(count)
    branches += lambda i: f" {i}." + gen("tip", stop="\n")
    branches.join()
    for tip in s["tip"]:
        s += " Then " + tip
    s.assistant_end()
    return s["tip"]


def test_a_trace_is_what_the_program_says_in_order() -> None:
    trace = tips.trace("sleep", temperature=0)
    assert trace.program == "tips"
    assert trace.ended is None
    assert lines(trace) == [
        "|user:",
        "|'Tips on sleep, please.'",
        "|assistant:",
        "|'Here:'",
        "|fork(2)",
        "0|' 0.'",
        "0|gen(\"tip\", max_tokens=8, stop=('\\n',), temperature=0.0)",
        "1|' 1.'",
        "1|gen(\"tip\", max_tokens=8, stop=('\\n',), temperature=0.0)",
        "|' Then '",
        '|the value of gen("tip")',
        "|' Then '",
        '|the value of gen("tip")',
    ]


def test_a_trace_needs_no_backend_and_asks_none() -> None:
    backend = Scripted({"tip": "rest"})
    tips.trace("sleep", backend=backend)
    tips.trace("sleep")
    assert backend.calls == []
    assert backend.opened == 0


def test_calls_have_all_their_options() -> None:
    first, second = tips.trace("sleep", temperature=0.5).calls
    assert isinstance(first, Gen)
    assert (first.options.temperature, first.options.max_tokens, first.options.stop) == (0.5, 8, ("\n",))
    assert first == second


def test_a_trace_prints_as_a_table() -> None:
    @function
    def small(s: State) -> None:
        s += "Is it <so>? " + select("x", ["yes", "no"])

    trace = small.trace()
    head, columns, text, call = str(trace).splitlines()
    assert head == "small: 1 call"
    assert columns.split() == ["line", "branch", "says"]
    assert text.endswith("'Is it <so>? '")
    assert call.endswith('select("x", 2 choices, token_length_normalized)')
    assert call.startswith(LINE)
    html = trace._repr_html_()
    assert html.count("<tr>") == 3
    assert "&lt;so&gt;" in html
    assert "<so>" not in html


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda s: s["x"] == "yes", 'the value of gen("x") was compared'),
        (lambda s: f"{s['x']}", 'the value of gen("x") was formatted into text; appended with +, it could be traced'),
        (lambda s: [*s["x"]], 'the value of gen("x") was iterated'),
        (lambda s: json.loads(s["x"]), GIVEN),
        (lambda s: "".join([s["x"]]), JOINED),
        (lambda s: dict[str, str]()["no"], "KeyError: 'no'"),
        (lambda s: s.text(), TEXT),
        (lambda s: s.messages(), TEXT),
        (lambda s: list(s.text_iter("x")), TEXT),
        (lambda s: list(s.text_iter()), TEXT),
        (lambda s: s.meta("x").usage, 'usage of what s.meta(...) tells of gen("x") was read'),
        (lambda s: tips.run("sleep"), "tips is run by the program that is traced"),
        (lambda s: tips.run_batch([{"topic": "sleep"}]), "tips is run by the program that is traced"),
        (lambda s: tips.stream("sleep"), "tips is run by the program that is traced"),
        (lambda s: tips.trace("sleep"), "tips is run by the program that is traced"),
    ],
)
def test_a_trace_ends_where_the_text_decides_and_says_where(use: Callable[[State], Any], why: str) -> None:
    @function
    def program(s: State) -> None:
        s += "Well: " + gen("x")
        use(s)
        s += gen("y")

    trace = program.trace()
    assert trace.ended is not None
    assert trace.ended.why == why
    assert trace.ended.written_at.startswith(__file__)
    assert [call.name for call in trace.calls] == ["x"]
    assert str(trace).endswith(f"{trace.ended.written_at}: {why}. What follows depends on what the model says.")


def test_the_end_is_where_the_program_stands_and_not_a_library() -> None:
    @function
    def program(s: State) -> None:
        s += gen("x", n=3)
        statistics.mode(s["x"])  # the line

    ended = program.trace().ended
    assert ended is not None
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert "# the line" in source[int(ended.written_at.rpartition(":")[2]) - 1]
    assert ended.why == 'the value of gen("x") was used as a key'


def test_samples_are_a_list_whose_length_is_known() -> None:
    @function
    def program(s: State) -> int:
        s += gen("x", n=3)
        for sample in s["x"]:
            s += "Or " + sample
        return len(s["x"])

    trace = program.trace()
    assert trace.ended is None
    said = [step.said for step in trace.steps if isinstance(step.said, Unknown)]
    assert [unknown.origin.sample for unknown in said] == [0, 1, 2]


def test_values_of_the_program_itself_are_known() -> None:
    @function
    def program(s: State) -> None:
        s["plan"] = {"steps": 2}
        for step in range(s["plan"]["steps"]):
            s += f"{step}: " + gen(f"step{step}")
        s += Var("plan")

    trace = program.trace()
    assert trace.ended is None
    assert [call.name for call in trace.calls] == ["step0", "step1"]
    assert trace.steps[-1].said == Text("{'steps': 2}", control=False)


def test_the_text_of_a_variable_is_traced_by_its_name_too() -> None:
    @function
    def program(s: State) -> None:
        s += gen("x") + " again: " + Var("x")

    last = program.trace().steps[-1].said
    assert isinstance(last, Unknown)
    assert last.origin.op.name == "x"


def test_text_that_was_said_again_in_another_branch_is_not_known_there() -> None:
    @function
    def program(s: State) -> None:
        branches = s.fork(1)
        branches += gen("x")
        s += "He said " + branches[0]["x"]
        s.text()

    ended = program.trace().ended
    assert ended is not None
    assert ended.why == 'the text with the value of gen("x") in it was read'


def test_forks_of_forks_and_later_forks_have_numbers_of_their_own() -> None:
    @function
    def program(s: State) -> None:
        with s.fork(2) as first:
            for branch in first[1].fork(1):
                branch += gen("deep")
        with s.fork(2) as second:
            second += gen("x")
        s.copy().user("copied")

    trace = program.trace()
    assert trace.ended is None
    assert [(step.branch, step.said.count) for step in trace.steps if isinstance(step.said, Forked)] == [
        ((), 2),
        ((1,), 1),
        ((), 2),
        ((), 1),
    ]
    assert [step.branch for step in trace.steps if isinstance(step.said, Gen)] == [(1, 0), (2,), (3,)]
    assert [step.branch for step in trace.steps if isinstance(step.said, RoleBegin)] == [(4,)]


def test_a_program_inside_a_program_goes_on_in_its_trace() -> None:
    @function(max_tokens=3)
    def inner(s: State) -> Any:
        s += gen("x")
        return s["x"]

    @function(max_tokens=5)
    def outer(s: State) -> None:
        s += "Again: " + inner(s) + gen("y")

    trace = outer.trace()
    assert trace.ended is None
    assert [call.options.max_tokens for call in trace.calls if isinstance(call, Gen)] == [3, 5]


def test_a_method_and_a_bound_program_are_traced() -> None:
    class Poet:
        name = "Ada"

        @function
        def sing(self, s: State, what: str) -> None:
            s += f"{self.name} sings of {what}: " + gen("song")

    says = lines(Poet().sing.bind(what="numbers").trace())
    assert says[0] == "|'Ada sings of numbers: '"


@pytest.mark.parametrize(
    ("write", "error", "said"),
    [
        (lambda s: s["z"], UnknownVariable, 'there is no variable "z". Known: "x".'),
        (lambda s: s.__iadd__(Var("z")), UnknownVariable, 'there is no variable "z". Known: "x".'),
        (lambda s: s.__iadd__(gen("y", regex="(")), ConstraintError, "the group opened at position 0 is never closed"),
        (lambda s: s.__iadd__(gen("y", max_tokens=0)), OptionError, "max_tokens must be at least 1"),
        (lambda s: s.user_end(), LangError, r"user_end\(\) without user_begin\(\)"),
    ],
)
def test_what_is_wrong_is_found_without_a_model(
    write: Callable[[State], Any], error: type[Exception], said: str
) -> None:
    @function
    def program(s: State) -> None:
        s += gen("x")
        write(s)

    with pytest.raises(error, match=said):
        program.trace()


def test_what_a_function_raises_before_it_asks_anything_is_raised() -> None:
    @function
    def program(s: State) -> None:
        raise FileNotFoundError("examples.txt")

    with pytest.raises(FileNotFoundError):
        program.trace()


def test_a_trace_takes_the_arguments_of_a_run() -> None:
    with pytest.raises(CallError, match=r"^tips\.trace\(\): missing a required argument: 'topic'"):
        tips.trace()
    with pytest.raises(CallError, match=r"^tips\.explain\(\): missing a required argument: 'topic'"):
        tips.explain()


def test_a_function_is_never_run_by_surprise() -> None:
    ran = 0

    @function
    def program(s: State) -> None:
        nonlocal ran
        ran += 1
        s += gen("x")

    backend = Scripted({"x": "so"})
    program.run(backend=backend)
    program.run_batch([{}, {}], backend=backend)
    assert ran == 3
    program.trace()
    assert ran == 4


def test_a_trace_on_one_thread_leaves_the_others_alone() -> None:
    backend = Scripted({"tip": "rest"})
    texts: list[str] = []

    @function
    def program(s: State) -> None:
        thread = Thread(target=lambda: texts.append(tips.run("sleep", count=1, backend=backend).text()))
        thread.start()
        thread.join()
        s += gen("x")

    assert program.trace().ended is None
    assert texts == ["Tips on sleep, please.Here: Then rest"]
    assert tips.run("sleep", backend=backend)["tip"] == ["rest", "rest"]


def test_a_backend_without_tokens_cannot_explain() -> None:
    said = r"^tips: explain\(\) counts tokens, which .*Scripted.* does not know\. Write \.trace"
    with pytest.raises(OptionError, match=said):
        tips.explain("sleep", backend=Scripted({}))


def test_an_empty_batch_has_no_plan() -> None:
    with pytest.raises(CallError, match=r"^tips\.explain_batch\(\): the batch is empty"):
        tips.explain_batch([])


def test_an_async_program_is_traced_without_an_event_loop() -> None:
    @function
    async def program(s: AsyncState) -> None:
        s += "Tell: " + gen("x")
        s += "Again: " + await s["x"]
        branches = s.fork(2)
        branches += gen("y")
        await branches.join()
        if await s["x"] == "yes":
            s += gen("z")

    trace = program.trace()
    assert [call.name for call in trace.calls] == ["x", "y", "y"]
    assert trace.ended is not None
    assert trace.ended.why == 'the value of gen("x") was compared'


def test_a_selection_is_a_symbol_too() -> None:
    @function
    def program(s: State) -> None:
        s += user("Tool?") + assistant(select("tool", ["search", "stop"]))
        if s["tool"] == "search":
            s += gen("query")

    trace = program.trace()
    assert [type(call) for call in trace.calls] == [Select]
    assert trace.ended is not None
    assert trace.ended.why == 'the value of select("tool") was compared'

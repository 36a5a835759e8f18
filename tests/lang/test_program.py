from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from branchwise.lang import Call, CallError, GenOptions, LangError, OptionError, Program, make_program


class Recorder:
    """A runner that runs nothing and writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run(self, program: Program[str], call: Call) -> str:
        self.calls.append(("run", call))
        return program.invoke("state", call)  # type: ignore[no-any-return]

    def stream(self, program: Program[str], call: Call) -> str:
        self.calls.append(("stream", call))
        return "streaming"

    def run_batch(
        self, program: Program[str], calls: Sequence[Call], *, threads: int | None, progress: bool, keep_errors: bool
    ) -> list[str | Exception]:
        self.calls.append(("run_batch", list(calls), threads, progress, keep_errors))
        return []

    async def arun(self, program: Program[str], call: Call) -> str:
        self.calls.append(("arun", call))
        return "awaited"

    def iter_batch(
        self, program: Program[str], calls: Sequence[Call], *, threads: int | None, progress: bool, keep_errors: bool
    ) -> Iterator[str | Exception]:
        self.calls.append(("iter_batch", list(calls), threads, progress, keep_errors))
        return iter(())

    def enter(self, program: Program[str], state: object, call: Call) -> Any:
        self.calls.append(("enter", state, call))
        return program.invoke(state, call)  # type: ignore[arg-type]


def program_of(fn: Callable[..., Any], **defaults: Any) -> tuple[Program[str], Recorder]:
    recorder = Recorder()
    return make_program(fn, recorder, defaults), recorder


def qa(s: str, question: str, tone: str = "plain") -> tuple[str, str, str]:
    """Answers."""
    return (s, question, tone)


def message_of(call: Callable[[], object], kind: type[Exception] = CallError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_arguments_reach_the_function_and_options_the_run() -> None:
    program, recorder = program_of(qa)
    assert program.run("why", tone="warm", temperature=0, backend="b") == ("state", "why", "warm")  # type: ignore[comparison-overlap]
    assert recorder.calls == [
        ("run", Call(args=("why",), kwargs={"tone": "warm"}, options=GenOptions(temperature=0.0), backend="b"))
    ]


def test_a_parameter_of_the_function_wins_over_an_option_of_that_name() -> None:
    def fn(s: str, temperature: str, stream: bool, backend: str) -> tuple[str, bool, str]:
        return (temperature, stream, backend)

    program, recorder = program_of(fn)
    assert program.run(temperature="hot", stream=True, backend="mine") == ("hot", True, "mine")  # type: ignore[comparison-overlap]
    assert recorder.calls[0][0] == "run"
    assert recorder.calls[0][1].options == GenOptions()


def test_stream_true_is_stream() -> None:
    program, recorder = program_of(qa)
    assert program.run("why", stream=True) == program.stream("why") == "streaming"
    assert [call[0] for call in recorder.calls] == ["stream", "stream"]


def test_bound_arguments_are_given_and_can_be_replaced() -> None:
    program, _ = program_of(qa)
    warm = program.bind(tone="warm", question="why")
    assert warm.run() == ("state", "why", "warm")  # type: ignore[comparison-overlap]
    assert warm.run("how", tone="cold") == ("state", "how", "cold")  # type: ignore[comparison-overlap]
    assert program.run("what") == ("state", "what", "plain")  # type: ignore[comparison-overlap]


def test_a_program_looks_like_its_function() -> None:
    program, _ = program_of(qa)
    assert (program.__name__, program.__doc__, program.__wrapped__) == ("qa", "Answers.", qa)  # type: ignore[attr-defined]
    assert repr(program) == "<program qa(s: 'str', question: 'str', tone: 'str' = 'plain') -> 'tuple[str, str, str]'>"


def test_called_with_a_state_it_goes_on_there_and_returns_the_value() -> None:
    program, recorder = program_of(qa)
    assert program("other", "why") == ("other", "why", "plain")
    assert recorder.calls[0][:2] == ("enter", "other")


def test_it_works_as_a_method() -> None:
    recorder = Recorder()

    class Agent:
        name = "ada"

        def _ask(self, s: str, question: str) -> tuple[str, str, str]:
            return (self.name, s, question)

        ask = make_program(_ask, recorder, {})

    assert Agent().ask.run(question="why") == ("ada", "state", "why")  # type: ignore[comparison-overlap]


def test_defaults_of_the_function_are_kept() -> None:
    program, _ = program_of(qa, max_tokens=64, temperature=0)
    assert program.defaults == GenOptions(max_tokens=64, temperature=0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.run(), "qa.run(): missing a required argument: 'question'."),
        (
            lambda p: p.run("why", tonne="x"),
            "qa.run(): got an unexpected keyword argument 'tonne'. Did you mean tone?",
        ),
        (
            lambda p: p.run("why", temprature=0),
            "qa.run(): got an unexpected keyword argument 'temprature'. Did you mean temperature?",
        ),
        (lambda p: p.bind(quest="x"), "qa.bind(): got an unexpected keyword argument 'quest'. Did you mean question?"),
        (lambda p: p.run("a", "b", "c"), "qa.run(): too many positional arguments."),
        (lambda p: p("state"), "qa(): missing a required argument: 'question'."),
        (
            lambda p: p.run_batch([{"question": "a"}, ["b"]]),
            "qa.run_batch(): item 1 must be a dict of keyword arguments, got ['b'] (list).",
        ),
        (
            lambda p: p.run_batch([{"question": "a"}, {}]),
            "qa.run_batch(): item 1: missing a required argument: 'question'.",
        ),
        (
            lambda p: p.run_batch([], n=2),
            "qa.run_batch(): there is no option n. Known: frequency_penalty, heal, ignore_eos, logit_bias, "
            "logprob_start_len, max_tokens, min_p, min_tokens, on_truncate, presence_penalty, repetition_penalty, "
            "return_logprob, seed, stop, stop_regex, stop_token_ids, temperature, top_k, top_logprobs, top_p.",
        ),
    ],
)
def test_a_call_that_does_not_fit_is_refused_before_anything_runs(
    call: Callable[[Program[str]], object], message: str
) -> None:
    program, recorder = program_of(qa)
    assert message_of(lambda: call(program)) == message
    assert recorder.calls == []


def test_a_wrong_option_of_a_run_names_the_run() -> None:
    program, _ = program_of(qa)
    assert message_of(lambda: program.run("why", max_tokens=0), OptionError) == (
        "qa.run(): max_tokens must be at least 1, got 0. To score given text, use select()."
    )
    assert message_of(lambda: program.run_batch([], num_threads=0), OptionError) == (
        "qa.run_batch(): num_threads must be at least 1, got 0."
    )


def test_a_batch_is_one_call_each() -> None:
    program, recorder = program_of(qa)
    program.run_batch([{"question": "a"}, {"question": "b"}], num_threads=3, return_exceptions=True, seed=1)
    (kind, calls, *rest) = recorder.calls[0]
    assert (kind, rest) == ("run_batch", [3, False, True])
    assert [call.kwargs for call in calls] == [{"question": "a"}, {"question": "b"}]
    assert all(call.options == GenOptions(seed=1) for call in calls)


def test_what_cannot_be_a_program_is_refused() -> None:
    def pieces(s: str) -> Any:
        yield s

    def nothing() -> None: ...

    async def later(s: str) -> Any:
        yield s

    for fn in (pieces, later):
        assert message_of(lambda fn=fn: program_of(fn), LangError) == (  # type: ignore[misc]
            f"@function {fn.__name__}: must be a function without yield. To give text while it grows, stream it."
        )
    assert message_of(lambda: program_of(nothing), LangError) == (
        "@function nothing: takes no parameters. The first one is the state: def nothing(s): ..."
    )
    assert message_of(lambda: program_of(qa, max_token=1)) == (
        "@function: there is no option max_token. Did you mean max_tokens?"
    )
    assert message_of(lambda: program_of(qa, temperature=-1), OptionError) == (
        "@function: temperature must be at least 0, got -1.0. 0 takes the likeliest token each time."
    )

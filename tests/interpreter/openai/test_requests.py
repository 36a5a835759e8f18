"""What programs become as requests, and what they read of the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from branchwise import (
    GenerationError,
    InvalidText,
    OpenAI,
    OptionError,
    State,
    Unsupported,
    assistant,
    function,
    gen,
    select,
    text,
    tools,
    user,
)

from .stub import Stub

Make = Callable[..., OpenAI]


def run(write: Callable[[State], object], backend: OpenAI, **options: Any) -> State:
    return function(lambda s: write(s)).run(backend=backend, **options)


def test_roles_are_a_chat_and_plain_text_is_a_completion(stub: Stub, remote: Make) -> None:
    state = run(lambda s: s.__iadd__(user("hi") + assistant(gen("x", max_tokens=9))), remote())
    assert state["x"] == "fine"
    run(lambda s: s.__iadd__("one " + gen("x", stop="\n", seed=3)), remote())
    chat, plain = stub.bodies
    assert (chat["path"], chat["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": "hi"}])
    assert (chat["model"], chat["max_tokens"], chat["stream"]) == ("m", 9, True)
    assert (plain["path"], plain["prompt"], plain["stop"], plain["seed"]) == ("/v1/completions", "one ", ["\n"], 3)


def test_what_was_written_is_sent_with_the_next_call_and_forks_go_their_own_ways(stub: Stub, remote: Make) -> None:
    def program(s: State) -> None:
        s += user("hi") + assistant(gen("x"))
        branches = s.fork(2)
        branches += lambda i: user(str(i)) + assistant(gen("y"))
        branches.join()

    state = run(program, remote())
    assert state["y"] == ["fine", "fine"]
    first = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine"}]
    told = sorted(body["messages"][-1]["content"] for body in stub.bodies[1:])
    assert told == ["0", "1"]
    assert all(body["messages"][:2] == first for body in stub.bodies[1:])


def test_text_comes_piece_by_piece_and_counts_its_tokens(stub: Stub, remote: Make) -> None:
    stub.text = lambda body: "a wide world"
    backend = remote()
    state = function(lambda s: s.__iadd__(user("hi") + assistant(gen("x")))).run(backend=backend, stream=True)
    assert list(state.text_iter("x")) == ["a", " wide", " world"]
    usage = state.meta("x").usage
    assert (usage.prompt_tokens, usage.hit_tokens, usage.completion_tokens) == (7, 5, 3)
    assert (backend.stats.requests, backend.stats.hit_tokens) == (1, 5)


def test_samples_are_a_list_and_a_limit_is_told(stub: Stub, remote: Make) -> None:
    stub.text = lambda body: "a wide world"
    state = run(lambda s: s.__iadd__(gen("x", n=3, max_tokens=2)), remote())
    assert state["x"] == ["a wide"] * 3
    assert (state.meta("x").finish_reason, state.meta("x").detail) == ("length", "max_tokens")


PLACES = [lambda s, g: s.__iadd__("1 " + g), lambda s, g: s.__iadd__(user("1") + assistant(g))]


@pytest.mark.parametrize("write", PLACES)
def test_logprobs_are_kept_where_they_come_and_missed_where_not(stub: Stub, remote: Make, write: Any) -> None:
    state = run(lambda s: write(s, gen("x", return_logprob=True, top_logprobs=1)), remote())
    (token,) = state.meta("x").logprobs
    assert (token.text, token.logprob, token.top) == ("fine", -0.5, (("fine", -0.5),))
    stub.always = "no logprobs"
    with pytest.raises(GenerationError, match="return_logprob was asked for, and the server sends no"):
        run(lambda s: write(s, gen("x", return_logprob=True)), remote())


def test_constraints_are_spelled_as_each_kind_of_server_does(stub: Stub, remote: Make) -> None:
    for kind in ("branchwise", "sglang", "vllm"):
        run(lambda s: s.__iadd__("1" + gen("x", regex="[a-z]+") + gen("y", choices=["a.", "b"], temperature=1)),
            remote(kind))  # fmt: skip
    kept = [{k: b[k] for k in ("regex", "choices", "structured_outputs") if k in b} for b in stub.bodies]
    assert kept == [
        {"regex": "[a-z]+"},
        {"choices": ["a.", "b"]},
        {"regex": "[a-z]+"},
        {"regex": r"(a\.|b)"},
        {"structured_outputs": {"regex": "[a-z]+"}},
        {"structured_outputs": {"choice": ["a.", "b"]}},
    ]


def test_a_schema_is_a_response_format_and_its_value_is_read(stub: Stub, remote: Make) -> None:
    stub.text = lambda body: '{"a":1}'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    state = run(lambda s: s.__iadd__(user("1") + assistant(gen("x", json_schema=schema))), remote("openai"))
    assert state["x"] == {"a": 1}
    assert stub.bodies[0]["response_format"]["json_schema"]["schema"] == schema
    stub.text = lambda body: "no json"
    with pytest.raises(InvalidText):
        run(lambda s: s.__iadd__(user("1") + assistant(gen("x", json_schema=schema))), remote("openai"))["x"]


def test_choices_are_scored_by_the_echo_of_completions(stub: Stub, remote: Make) -> None:
    state = run(lambda s: s.__iadd__("one" + select("c", [" cook", " banana"])), remote())
    assert state["c"] == " banana"
    assert state.meta("c").scores == (-1.0, -0.25)
    assert state.meta("c").warnings == ()
    assert stub.bodies[0]["prompt"] == ["one cook", "one banana"]
    stub.always = "no logprobs"
    with pytest.raises(GenerationError, match=r'^select\("c"\): the server sends no log-probabilities of the prompt'):
        run(lambda s: s.__iadd__("one" + select("c", ["x", "y"])), remote())


def test_choices_that_cannot_be_scored_are_a_constraint_and_say_so(stub: Stub, remote: Make) -> None:
    stub.text = lambda body: '{"choice": "no"}' if "response_format" in body else "no"
    for kind in ("openai", "vllm"):
        state = run(lambda s: s.__iadd__(user("1") + assistant(select("c", ["yes", "no"]))), remote(kind))
        assert (state["c"], state.messages()[-1]["content"]) == ("no", "no")
        (warning,) = state.meta("c").warnings
        assert warning.startswith("The server does not score choices here: it was held to them")
    stub.text = lambda body: "maybe"
    with pytest.raises(GenerationError, match="was held to the choices, and wrote 'maybe'"):
        run(lambda s: s.__iadd__(user("1") + assistant(select("c", ["yes", "no"]))), remote("vllm"))


def test_text_in_the_assistants_turn_is_continued_as_the_server_can(stub: Stub, remote: Make) -> None:
    def program(s: State) -> None:
        s += user("1") + assistant("It is " + gen("x"))

    run(program, remote("sglang"))
    run(program, remote("openai", prefill="prefix"))
    field, prefix = stub.bodies
    assert field["messages"][-1] == {"role": "assistant", "content": "It is "}
    assert (field["continue_final_message"], field["add_generation_prompt"]) == (True, False)
    assert prefix["messages"][-1] == {"role": "assistant", "content": "It is ", "prefix": True}


REFUSED = [
    (lambda s: s.user("1" + gen("x")), r'^gen\("x"\) stands in the turn of user'),
    (lambda s: s.__iadd__(user("1") + gen("x")), r'^gen\("x"\) stands outside of the turns'),
    (lambda s: s.__iadd__("1" + user("2") + assistant(gen("x"))), r'^gen\("x"\): the program has text outside'),
    (lambda s: s.__iadd__(user("2") + "1" + assistant(gen("x"))), r'^gen\("x"\): the program has text outside'),
    (lambda s: s.__iadd__(user("1") + assistant("a" + gen("x"))), r'^gen\("x"\) goes on with text in the assistant'),
    (lambda s: s.__iadd__(gen("x", regex="a")), r'^gen\("x"\): a server of kind openai takes no regex'),
    (lambda s: s.__iadd__(gen("x", top_k=3)), r'^gen\("x"\): a server of kind openai takes no top_k'),
    (lambda s: s.__iadd__(gen("x", stop_regex="a")), r'^gen\("x"\): stop_regex is not something'),
    (lambda s: s.__iadd__(gen("x", json_schema=True)), r'^gen\("x"\): json_schema is for chats'),
    (lambda s: s.__iadd__("1" + select("x", ["a"])), r'^select\("x"\): a server of kind openai neither scores'),
    (lambda s: s.__iadd__(text("1", raw=True) + gen("x")), r'^gen\("x"\): text\(raw=True\) names tokens'),
    (lambda s: s.__iadd__(tools([{"name": "f"}]) + user("1") + assistant(gen("x"))), r'^gen\("x"\): tools\(\) is for'),
]


@pytest.mark.parametrize(("write", "message"), REFUSED)
def test_what_a_server_cannot_do_is_refused_before_the_request(
    stub: Stub, remote: Make, write: Any, message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        run(write, remote("openai"))
    assert stub.bodies == []


@pytest.mark.parametrize(("write", "message"), REFUSED)
def test_a_trace_finds_what_a_server_cannot_do_in_any_branch(
    stub: Stub, remote: Make, write: Any, message: str
) -> None:
    @function
    def program(s: State) -> None:
        branches = s.fork(2)
        if message.startswith(r"^gen\("):
            branches[0] += gen("y", max_tokens=2)
        write(branches[1])

    with pytest.raises(Unsupported, match=message) as caught:
        program.trace(backend=remote("openai"))
    assert "test_requests.py" in caught.value.__notes__[0]
    assert stub.bodies == []


def test_a_trace_goes_on_behind_what_the_model_would_say(stub: Stub, remote: Make) -> None:
    @function
    def program(s: State) -> None:
        s += user("1") + assistant(gen("x"))
        s += user("you said " + s["x"]) + assistant(gen("y"))
        s.fork(1)[0].assistant("so " + gen("z", top_k=2))

    with pytest.raises(Unsupported, match=r'^gen\("z"\) goes on with text'):
        program.trace(backend=remote("openai"))
    assert len(program.trace(backend=remote("vllm")).calls) == 3
    assert stub.bodies == []


def test_a_call_is_refused_when_it_is_written_though_another_runs_before_it(stub: Stub, remote: Make) -> None:
    def program(s: State) -> None:
        s += gen("x", stop="never")
        s += gen("y", top_k=2)
        pytest.fail("the program went on")

    stub.text = lambda body: "a" * 3
    with pytest.raises(Unsupported, match=r'^gen\("y"\): a server of kind openai takes no top_k'):
        run(program, remote("openai"))


def test_arguments_are_checked_and_the_key_is_nowhere(stub: Stub, remote: Make) -> None:
    with pytest.raises(OptionError, match=r"^OpenAI\(server\): there is no kind of server 'vlm'. Did you mean vllm?"):
        remote("vlm")
    with pytest.raises(OptionError, match=r"^OpenAI\(concurrency\)"):
        remote(concurrency=0)
    backend = remote(api_key="sk-very-secret")
    assert "secret" not in repr(backend)
    stub.always, stub.message = 401, "the key sk-very-secret is wrong"
    with pytest.raises(GenerationError, match=r"answers 401: the key \*\*\* is wrong(?m:$)") as caught:
        run(lambda s: s.__iadd__(gen("x")), backend)
    assert stub.keys == ["Bearer sk-very-secret"]
    assert caught.value.__cause__.status == 401  # type: ignore[union-attr]  # a ServerError
    assert caught.value.__cause__.__cause__ is None  # type: ignore[union-attr]  # likewise

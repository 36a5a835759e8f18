from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from branchwise.interpreter import Completion, Scripted, Selection, State, UnknownVariable, Usage, function
from branchwise.lang import CallError, LangError, OptionError, Text, Var, assistant, gen, select, text, user

Make = Callable[..., Scripted]


def run(write: Callable[[State], Any], backend: Scripted, **options: Any) -> State:
    """Run a function as a program."""
    return function(lambda s: write(s)).run(backend=backend, **options)


def message_of(call: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_text_is_all_that_was_appended_and_generated(scripted: Make) -> None:
    def write(s: State) -> None:
        s += "Q: why?\n"
        s += "A: " + gen("a", stop="\n") + "\n"
        s += select("verdict", ["good", "bad"])

    state = run(write, scripted({"a": "because\nand so on", "verdict": "bad"}))
    assert state.text() == "Q: why?\nA: because\nbad"
    assert (state["a"], state["verdict"]) == ("because", "bad")


def test_meta_tells_what_the_backend_said(scripted: Make) -> None:
    def write(s: State) -> None:
        s += "12345" + gen("a") + select("b", ["x", "y"])
        s["c"] = 1

    state = run(write, scripted({"a": "text", "b": "y"}))
    assert state.meta("a") == Completion("text", "stop", Usage(prompt_tokens=2, completion_tokens=1), detail="eos")
    assert state.meta("b") == Selection("y", 1, (-1.0, 0.0), Usage(prompt_tokens=3))
    assert message_of(lambda: state.meta("c"), UnknownVariable) == (
        '"c" was set by the program, not generated: there is nothing more to tell.'
    )


def test_names_of_other_frontends_are_refused_with_the_way_to_write_it(scripted: Make) -> None:
    state = run(lambda s: s.__iadd__(gen("a")), scripted({"a": "x"}))
    assert message_of(lambda: state.get_var("a"), AttributeError) == (  # type: ignore[attr-defined]
        "a state has no attribute 'get_var'. Write s[\"x\"]."
    )
    assert message_of(lambda: state.get_meta_info("a"), AttributeError) == (  # type: ignore[attr-defined]
        "a state has no attribute 'get_meta_info'. Write s.meta(\"x\")."
    )
    assert message_of(lambda: state.gen("a"), AttributeError) == (  # type: ignore[attr-defined]
        "a state has no attribute 'gen'. Write s += gen(\"x\")."
    )
    assert message_of(lambda: state.nope, AttributeError) == "a state has no attribute 'nope'."  # type: ignore[attr-defined]
    for call in ("text_iter", "text_async_iter"):
        assert message_of(lambda call=call: getattr(state, call)(var_name="a"), CallError) == (  # type: ignore[misc]
            f'{call}(): there is no option var_name. Write s.{call}("x") for a variable.'
        )


def test_of_several_samples_the_state_goes_on_with_the_first(scripted: Make) -> None:
    backend = scripted({"a": ["one", "two", "three"], "b": "!"})
    state = run(lambda s: s.__iadd__(gen("a", n=3) + gen("b")), backend)
    assert state["a"] == ["one", "two", "three"]
    assert state.text() == "one!"
    result = state.meta("a")
    assert isinstance(result, Completion)
    assert [sample.text for sample in result.samples] == ["one", "two", "three"]
    assert backend.calls[1].prompt == "one"


def test_an_unknown_variable_is_refused_at_once_with_the_known_ones(scripted: Make) -> None:
    def write(s: State) -> None:
        s += gen("slow")
        began = time.monotonic()
        message = (
            'there is no variable "nope". Known: "slow". Write s += gen("nope") on a line before the one that reads it.'
        )
        assert message_of(lambda: s["nope"], UnknownVariable) == message
        assert message_of(lambda: s["nope"], KeyError) == message
        assert message_of(lambda: s.meta("nope"), UnknownVariable) == message
        assert message_of(lambda: s.text_iter("nope"), UnknownVariable) == message
        assert s.get("nope") is None
        assert s.get("nope", 3) == 3
        assert "nope" not in s
        assert "slow" in s
        assert time.monotonic() - began < 0.1

    run(write, scripted({"slow": "x"}, delay_s=0.3))


def test_the_first_unknown_variable_says_that_none_is_set(scripted: Make) -> None:
    assert message_of(lambda: run(lambda s: s["x"], scripted({})), UnknownVariable) == (
        'there is no variable "x". None is set so far. Write s += gen("x") on a line before the one that reads it.'
    )


def test_a_variable_is_read_as_it_was_set_last(scripted: Make) -> None:
    def write(s: State) -> None:
        s["a"] = 1
        assert s["a"] == 1
        s += gen("a")
        assert s["a"] == "one"
        s += gen("a")
        assert s["a"] == "two"
        s["a"] = None
        assert s["a"] is None
        assert s.get("a", 5) is None

    run(write, scripted({"a": ["one", "two"]}, delay_s=0.01))


def test_a_name_that_is_no_string_is_refused(scripted: Make) -> None:
    state = run(lambda s: None, scripted({}))
    message = "s[...]: the name of a variable must be a string, got 0 (int)."
    assert message_of(lambda: state[0], OptionError) == message  # type: ignore[index]
    assert message_of(lambda: list(state), OptionError) == message  # type: ignore[call-overload]


def test_an_operation_is_not_a_value(scripted: Make) -> None:
    state = run(lambda s: None, scripted({}))
    message = message_of(lambda: state.__setitem__("x", gen("x")), LangError)
    assert message.startswith('s["x"] = Gen(')
    assert message.endswith(" would run nothing. Write s += ... to append it.")


def test_plus_without_equals_is_refused(scripted: Make) -> None:
    state = run(lambda s: None, scripted({}))
    message = "a state is not a value to add to. Write s += ..., which appends to it."
    assert message_of(lambda: state + gen("x"), LangError) == message
    assert message_of(lambda: "x" + state, LangError) == message


def test_an_expression_that_cannot_be_appended_leaves_the_state_as_it_was(scripted: Make) -> None:
    def write(s: State) -> None:
        s += "kept"
        assert message_of(lambda: s.__iadd__(None), LangError).startswith("cannot append None (NoneType) to a state.")  # type: ignore[arg-type]
        assert message_of(lambda: s.__iadd__("lost" + gen("x") + Var("nope")), UnknownVariable)
        assert "x" not in s

    backend = scripted({"x": "never"})
    assert run(write, backend).text() == "kept"
    assert backend.calls == []


def test_a_variable_can_be_said_again(scripted: Make) -> None:
    backend = scripted({"a": "<|im_end|>", "b": "!"})
    state = run(lambda s: s.__iadd__(gen("a") + " and " + Var("a") + gen("b")), backend)
    assert state.text() == "<|im_end|> and <|im_end|>!"
    assert backend.calls[1].segments[-1] == Text("<|im_end|>", control=False)


def test_untrusted_text_reaches_the_backend_as_such(scripted: Make) -> None:
    backend = scripted({"a": "x"})
    run(lambda s: s.__iadd__(text("<|im_end|>") + gen("a")), backend)
    assert backend.calls[0].segments == (Text("<|im_end|>", control=False),)


def test_messages_are_the_turns(scripted: Make) -> None:
    def write(s: State) -> None:
        s.system("Be brief.")
        s += "loose "
        s += user("Hi " + gen("name"))
        s += assistant(gen("a") + ".")

    state = run(write, scripted({"name": "Ada", "a": "Hello"}))
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi Ada"},
        {"role": "assistant", "content": "Hello."},
    ]
    assert state.text() == "Be brief.loose Hi AdaHello."


def test_every_iterator_gives_everything_from_the_start(scripted: Make) -> None:
    def write(s: State) -> None:
        s += "Say: " + gen("a")
        assert list(s.text_iter("a")) == ["abcd", "efgh", "i"]

    state = run(write, scripted({"a": "abcdefghi"}, delay_s=0.001))
    assert list(state.text_iter()) == list(state.text_iter()) == ["Say: ", "abcd", "efgh", "i"]
    assert list(state.text_iter("a")) == ["abcd", "efgh", "i"]


def test_pieces_arrive_before_the_text_is_done(scripted: Make) -> None:
    def write(s: State) -> None:
        s += gen("a")
        pieces = s.text_iter("a")
        assert next(pieces) == "x"
        assert not s._transcript.find("a").done
        pieces.close()  # type: ignore[attr-defined]

    run(write, scripted({"a": "x" * 20}, delay_s=0.01, piece_len=1))


def test_leaving_an_iterator_early_changes_nothing(scripted: Make) -> None:
    def write(s: State) -> None:
        s += gen("a")
        for _ in s.text_iter():
            break
        with pytest.raises(ValueError, match="mine"):
            for _ in s.text_iter("a"):
                raise ValueError("mine")
        assert s["a"] == "abcdefgh"

    run(write, scripted({"a": "abcdefgh"}, delay_s=0.005, piece_len=1))


def test_two_threads_can_read_one_state(scripted: Make) -> None:
    got: list[str] = []

    def write(s: State) -> None:
        s += gen("a")
        threads = [threading.Thread(target=lambda: got.append("".join(s.text_iter()))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run(write, scripted({"a": "abcdefghijkl"}, delay_s=0.005, piece_len=1))
    assert got == ["abcdefghijkl"] * 4


def test_repr_is_one_line_and_does_not_wait(scripted: Make) -> None:
    def write(s: State) -> None:
        s += "x" * 50 + "\n" + gen("a")
        assert repr(s) == f"<State running, variables: a, text: '...{'x' * 36}\\n'>"

    state = run(write, scripted({"a": "end"}, delay_s=0.05))
    assert repr(state) == f"<State done, variables: a, text: '...{'x' * 33}\\nend'>"


def test_a_state_can_be_written_after_its_run(scripted: Make) -> None:
    state = run(lambda s: s.__iadd__("a"), scripted({"b": "B"}))
    state += gen("b")
    assert state["b"] == "B"
    assert state.text() == "aB"


def test_a_python_value_becomes_text_only_where_it_is_said(scripted: Make) -> None:
    class Table:
        said = 0

        def __str__(self) -> str:
            Table.said += 1
            return "<table>"

    def write(s: State) -> None:
        s["table"] = table = Table()
        assert s["table"] is table
        assert Table.said == 0
        s += Var("table") + " and " + Var("table")
        assert list(s.text_iter("table")) == ["<table>"]

    assert run(write, scripted({})).text() == "<table> and <table>"


def test_half_a_character_in_a_value_that_is_said_fails_there(scripted: Make) -> None:
    def write(s: State) -> None:
        s["name"] = "a\udcff"
        s += "Hello " + Var("name")

    assert message_of(lambda: run(write, scripted({})), OptionError).startswith(
        "appending text: the variable has half a character, '\\udcff', at position 1: "
    )

"""What the variable of a typed generation is, and what its reader is told when it is nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from branchwise import InvalidText, Scripted, State, TruncatedText, function, gen
from branchwise.interpreter import Completion
from branchwise.interpreter.values import value_of
from branchwise.lang import GenOptions
from branchwise.lang.schema import schema_of


@dataclass
class Point:
    x: int
    y: int = 0


POINT = GenOptions(json_schema=schema_of(Point, "here"), max_tokens=6)


def test_the_variable_is_the_value_and_the_text_stays(scripted: Callable[..., Scripted]) -> None:
    @function
    def program(s: State) -> int:
        s += "At " + gen("p", json_schema=Point) + ", again "
        s += s["p"].x * "." + gen("q", json_schema={"type": "array"}, n=2)
        return int(s["p"].y)

    state = program.run(backend=scripted({"p": '{"x": 2, "y": 5}', "q": ["[1]", "[2]"]}))
    assert state["p"] == Point(2, 5)
    assert state["q"] == [[1], [2]]
    assert state.ret_value == 5
    assert state.text() == 'At {"x": 2, "y": 5}, again ..[1]'
    assert "".join(state.text_iter("p")) == '{"x": 2, "y": 5}'
    assert state.meta("p").text == '{"x": 2, "y": 5}'  # type: ignore[union-attr]


def test_a_text_that_is_no_value_is_told_to_its_reader_alone(scripted: Callable[..., Scripted]) -> None:
    @function
    def program(s: State) -> None:
        s += gen("p", json_schema=Point) + " and " + gen("q")

    state = program.run(backend=scripted({"p": '{"x": "two"}', "q": "on"}))
    assert state.text() == '{"x": "two"} and on'
    assert state["q"] == "on"
    for _ in range(2):
        with pytest.raises(InvalidText) as raised:
            state["p"]
        assert raised.value.text == '{"x": "two"}'
        assert str(raised.value) == (
            "gen(\"p\"): the text is no value of the type: 'two' is not int. It is '{\"x\": \"two\"}' (str); "
            "s.meta(name).text has all of it."
        )
    assert state.meta("p").text == '{"x": "two"}'  # type: ignore[union-attr]
    assert "".join(state.text_iter("p")) == '{"x": "two"}'


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (
            Completion('{"x": 1', "length", complete=False, detail="max_tokens"),
            TruncatedText,
            "the text was cut off before it was a value (max_tokens=6): '{\"x\": 1' (str). "
            'Raise max_tokens, or give on_truncate="close"; s.meta(name).text has all of it.',
        ),
        (
            Completion('{"x": 1', "stop", complete=False, detail="'}'"),
            TruncatedText,
            "the text was cut off before it was a value ('}'): '{\"x\": 1' (str). "
            'Raise max_tokens, or give on_truncate="close"; s.meta(name).text has all of it.',
        ),
        (
            Completion('{"x": 1}', "stop", exact=False, violation="x is odd"),
            InvalidText,
            "the text does not fulfil its schema, which could not be held in full: x is odd. "
            "It is '{\"x\": 1}' (str); s.meta(name).text has all of it.",
        ),
    ],
)
def test_why_there_is_no_value(said: Completion, kind: type[InvalidText], message: str) -> None:
    with pytest.raises(InvalidText) as raised:
        value_of(said, POINT)
    assert type(raised.value) is kind
    assert str(raised.value) == message
    copied: Any = pickle.loads(pickle.dumps(raised.value))
    assert (type(copied), str(copied), copied.text) == (kind, message, said.text)

"""Theme 3: JSON Schema. Each test is a case, by its number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from branchwise import Engine, GenerationError, State, TruncatedText, function, gen

from .constraints import closed, constraint_of, ok, spaced
from .test_regexes import told

SAMPLES = 8


@pytest.fixture(scope="module")
def warm(tiny_model: Path) -> Iterator[Engine]:
    """An engine that draws wildly."""
    with Engine(tiny_model, num_slots=8192, seed=0, defaults={"temperature": 1.5, "max_tokens": 60}) as engine:
        yield engine
        engine.check()


def samples(engine: Engine, schema: object, **options: Any) -> State:
    @function
    def program(s: State) -> None:
        s += "JSON: " + gen("x", json_schema=schema, n=SAMPLES, on_truncate="close", **options)

    return program.run(backend=engine)


class Colour(Enum):
    red = "red"
    green = "green"


class Inner(BaseModel):
    c: Colour
    n: int


class Outer(BaseModel):
    x: Inner
    y: list[Inner]
    z: Colour = Colour.red


class Node(BaseModel):
    v: int
    kids: list[Node]


class Linked(BaseModel):
    next: Linked | None


def test_026_an_end_token_never_cuts_a_document(engine: Engine) -> None:
    state = constraint_of(json_schema=closed(n={"type": "string"})).start()
    for byte in b'{"n": "ab':
        assert not state.mask()[256]
        assert state.advance(byte)
    assert not state.mask()[256]


def test_035_a_constant_is_all_there_is(engine: Engine) -> None:
    @function
    def program(s: State) -> None:
        s += "It is " + gen("x", json_schema={"const": 7}, ignore_eos=True, max_tokens=20)

    state = program.run(backend=engine)
    assert (state["x"], told(state).text, told(state).finish_reason) == (7, "7", "stop")


@pytest.mark.parametrize("pattern", ["^(tea|milk)$", "tea|milk"])
def test_037_a_pattern_stays_between_its_quotes(pattern: str) -> None:
    constraint = constraint_of(json_schema=closed(v={"type": "string", "pattern": pattern}))
    assert ok(constraint, '{"v": "tea"}') and ok(constraint, '{"v": "milk"}')
    assert not ok(constraint, '{"v": "tea}') and not ok(constraint, '{"v": milk"}')


def test_038_a_pattern_is_of_the_text_and_not_of_its_json(warm: Engine) -> None:
    two = closed(v={"type": "string", "pattern": "^.{2}$"})
    assert not ok(constraint_of(json_schema=two), '{"v": "b"}"}')
    assert not ok(constraint_of(json_schema=two), '{"v": ""}"}')
    no_a = closed(v={"type": "string", "pattern": "^[^a]{2}$"})
    assert not ok(constraint_of(json_schema=no_a), '{"v": "b""}')
    assert ok(constraint_of(json_schema=two), '{"v": "\\"b"}')
    assert all(len(found["v"]) == 2 for found in samples(warm, two)["x"])


@pytest.mark.parametrize(
    ("schema", "bad", "good"),
    [
        ({"type": "integer", "multipleOf": 5}, "7", "15"),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2, "uniqueItems": True}, '["a","a"]', '["a"]'),
        ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}, "{}", '{"a":1}'),
        (
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
            '{"xa":"s"}', '{"xa":3}',
        ),
    ],
    ids=str,
)  # fmt: skip
def test_040_no_keyword_is_passed_over_in_silence(schema: dict[str, Any], bad: str, good: str) -> None:
    constraint = constraint_of(json_schema=schema)
    assert ok(constraint, spaced(good))
    assert not ok(constraint, spaced(bad)) or (constraint.warnings and constraint.violation(bad))


def test_041_what_is_required_is_required_also_if_nobody_describes_it() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city", "code"]}
    constraint = constraint_of(json_schema=schema)
    assert not ok(constraint, '{"city": "x"}')
    assert ok(constraint, '{"city": "x", "code": 1}')


def test_043_a_known_member_keeps_its_type_wherever_it_stands() -> None:
    schema = {"type": "object", "properties": {"p": {"const": "in"}, "q": {"const": "out"}}, "required": ["q"]}
    constraint = constraint_of(json_schema=schema)
    assert not ok(constraint, '{"q": "out", "p": "WRONG"}')
    assert ok(constraint, '{"p": "in", "q": "out"}')


def test_044_letters_of_a_schema_stay_letters(engine: Engine) -> None:
    schema = closed(天气={"enum": ["晴", "雨", "café"]})
    for given in (schema, json.dumps(schema), json.dumps(schema, ensure_ascii=False)):
        constraint = constraint_of(json_schema=given)
        assert ok(constraint, '{"天气": "café"}')

        @function
        def program(s: State, given: object) -> None:
            s += "JSON: " + gen("x", json_schema=given, max_tokens=40)

        state = program.run(given, backend=engine)
        assert state["x"]["天气"] in ("晴", "雨", "café")
        assert "\\u" not in told(state).text


def test_046_references_lead_where_they_say(warm: Engine) -> None:
    assert all(isinstance(found, Outer) for found in samples(warm, Outer)["x"])
    for given in (Outer, Outer.model_json_schema(), json.dumps(Outer.model_json_schema())):
        state = constraint_of(json_schema=given).start()
        assert all(state.advance(byte) for byte in b'{"x": {"c": "')
        assert not state.fork().advance(ord("b"))
        assert state.fork().advance(ord("g"))
    old = {"$ref": "#/definitions/c", "definitions": {"c": {"enum": ["red"]}}}
    assert ok(constraint_of(json_schema=old), '"red"') and not ok(constraint_of(json_schema=old), '"blue"')


def test_046_a_reference_that_leads_nowhere_is_named(engine: Engine) -> None:
    with pytest.raises(GenerationError, match=r"'/\$defs/gone' does not exist"):
        samples(engine, {"$ref": "#/$defs/gone"})["x"]


def test_047_types_may_hold_themselves_to_any_depth() -> None:
    node = constraint_of(json_schema=Node)
    assert not ok(node, '{"v": 1, "kids": [{"v": 2, "kids": [{"v": 3, "kids": [{"v": 4,}]}]}]}')
    assert ok(node, '{"v": 1, "kids": [{"v": 2, "kids": [{"v": 3, "kids": [{"v": 4, "kids": []}]}]}]}')
    linked = constraint_of(json_schema=Linked)
    assert not ok(linked, '{"next": {"next": {"next": {"next": {}}}}}')
    assert ok(linked, '{"next": {"next": {"next": {"next": null}}}}')


def test_049_a_tuple_may_be_shorter_unless_it_says_how_long_it_is() -> None:
    schema = {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "string"}]}
    constraint = constraint_of(json_schema=schema)
    written = ["[]", "[true]", '[true, "k"]', '[true, "k", 1]', '["k"]']
    assert [ok(constraint, text) for text in written] == [True, True, True, True, False]
    pair = constraint_of(json_schema=tuple[bool, str])
    assert [ok(pair, text) for text in written] == [False, False, True, False, False]


def test_050_arrays_keep_their_sizes(warm: Engine) -> None:
    class Sized(BaseModel):
        tags: Annotated[list[str], Field(min_length=3, max_length=3)]
        xs: Annotated[list[Inner], Field(max_length=3)]
        e: Annotated[list[int], Field(max_length=0)]

    for found in samples(warm, Sized)["x"]:
        assert len(found.tags) == 3 and len(found.xs) <= 3 and found.e == []
    with pytest.raises(GenerationError, match=r"minItems \(3\) is greater than maxItems \(1\)"):
        samples(warm, {"type": "array", "minItems": 3, "maxItems": 1})["x"]


def test_052_json_that_was_cut_off_is_no_value(engine: Engine) -> None:
    @function
    def program(s: State) -> None:
        s += "JSON: " + gen("x", json_schema=closed(qty={"type": "integer"}, note={"type": "string"}), max_tokens=6)

    state = program.run(backend=engine)
    assert (told(state).finish_reason, told(state).complete) == ("length", False)
    with pytest.raises(TruncatedText, match=r'^gen\("x"\): the text was cut off .* \(max_tokens=6\)') as raised:
        state["x"]
    assert raised.value.text == told(state).text
    assert state.text() == "JSON: " + told(state).text


def test_053_numbers_are_those_of_json() -> None:
    number, whole = constraint_of(json_schema={"type": "number"}), constraint_of(dtype=int)
    for bad in ["1.e2", "01", "+1", "1.", ".5", "-", "1e", "--1", "0x1", "NaN", "Infinity"]:
        assert not ok(number, bad), bad
    for good in ["0", "-0", "10", "1.5", "-0.25", "1e5", "1E+5", "2.5e-3"]:
        assert ok(number, good), good
    assert ok(whole, "-12")
    assert not ok(whole, "1.0") and not ok(whole, "1e3")


def test_055_digits_of_a_schema_are_those_of_json_schema() -> None:
    constraint = constraint_of(json_schema=closed(zip={"type": "string", "pattern": "^\\d{5}$"}))
    assert ok(constraint, '{"zip": "12345"}')
    assert not ok(constraint, '{"zip": "١٢٣٤٥"}')


def test_056_formats_are_strings_that_python_reads(warm: Engine) -> None:
    class Formats(BaseModel):
        d: date
        t: datetime
        u: UUID

    assert all(isinstance(found, Formats) for found in samples(warm, Formats, max_tokens=150)["x"])
    for bad in ("2022-02-31", "0000-01-01"):
        assert not ok(constraint_of(dtype=date), f'"{bad}"')
    assert ok(constraint_of(dtype=datetime), '"2024-02-29T23:59:59.5+02:00"')
    for bad in ("2023-02-29T00:00:00Z", "2024-02-29T24:00:00Z", "2024-02-29T23:59:60Z", "2024-02-29t00:00:00Z"):
        assert not ok(constraint_of(dtype=datetime), f'"{bad}"'), bad
    for name in ("date", "time", "date-time", "uuid", "email", "uri"):
        for found in samples(warm, closed(v={"type": "string", "format": name}))["x"]:
            assert isinstance(found["v"], str)


def test_058_the_empty_schema_is_any_json() -> None:
    for anything in ({}, True):
        assert ok(constraint_of(json_schema=anything), '{"a": [1, null, "x"]}')
    nothing = constraint_of(json_schema={"type": "object", "properties": {}, "additionalProperties": False})
    assert ok(nothing, "{}") and not ok(nothing, '{"a": 1}')


def test_059_members_that_nobody_named() -> None:
    assert not ok(constraint_of(json_schema=closed(a={"type": "integer"})), '{"a": 1, "zz": 2}')
    counts = constraint_of(json_schema=dict[str, int])
    assert [ok(counts, text) for text in ("{}", '{"k": 1}', '{"k": "s"}')] == [True, True, False]


def test_061_a_long_string_costs_nothing_before_it_is_written(engine: Engine) -> None:
    @function
    def program(s: State) -> None:
        s += "JSON: " + gen("x", json_schema=closed(bio={"type": "string", "maxLength": 1000}), max_tokens=20)

    assert told(program.run(backend=engine)).text.startswith('{"bio": "')


def test_062_members_come_in_the_order_of_the_class(warm: Engine) -> None:
    class Answer(BaseModel):
        reasoning: str
        answer: int
        zed: bool
        alpha: int

    given = {**Answer.model_json_schema(), "required": ["alpha", "zed", "answer", "reasoning"]}
    given["additionalProperties"] = False
    for schema in (Answer, json.dumps(given)):
        for said in samples(warm, schema).meta("x").samples:  # type: ignore[union-attr]
            assert list(json.loads(said.text)) == ["reasoning", "answer", "zed", "alpha"]

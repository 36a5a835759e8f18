from __future__ import annotations

import datetime
import enum
import itertools
import json
import re
import typing
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from branchwise.lang import OptionError, gen, gen_int, gen_json, gen_string
from branchwise.lang.schema import READABLE, schema_of


class Colour(enum.Enum):
    red = "r"
    green = "g"


@dataclass
class Tree:
    value: int
    colour: Colour = Colour.red
    kids: list[Tree] = field(default_factory=list)


class Address(TypedDict):
    street: str
    number: NotRequired[int]


class Inner(BaseModel):
    colour: Colour
    count: Annotated[int, Field(ge=0)]


class Outer(BaseModel):
    one: Inner
    many: list[Inner] = []


Metres = NewType("Metres", int)
INNER = '{"colour": "g", "count": 2}'


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "3", 3),
        (float, "3", 3.0),
        (bool, "true", True),
        (str, '"a\\"b"', 'a"b'),
        (None, "null", None),
        (Any, '{"a": [1]}', {"a": [1]}),
        (Metres, "4", 4),
        (Colour, '"g"', Colour.green),
        (Literal["a", 1], "1", 1),
        (list[int], "[1, 2]", [1, 2]),
        (list, "[1, null]", [1, None]),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        (tuple[int, ...], "[1, 2, 3]", (1, 2, 3)),
        (set[int], "[1, 1]", {1}),
        (dict[str, float], '{"a": 1}', {"a": 1.0}),
        (typing.Union[None, int], "null", None),  # noqa: UP007  # the old way to write it
        (int | str | None, '"x"', "x"),
        (Annotated[int, "how many"], "5", 5),
        (Annotated[int, Field(ge=3)], "5", 5),
        (datetime.date, '"2024-02-29"', datetime.date(2024, 2, 29)),
        (datetime.datetime, '"2024-02-29T10:11:12Z"', datetime.datetime(2024, 2, 29, 10, 11, 12, tzinfo=datetime.UTC)),
        (uuid.UUID, '"00000000-0000-0000-0000-000000000001"', uuid.UUID(int=1)),
        (Tree, '{"value": 1, "kids": [{"value": 2, "colour": "g"}]}', Tree(1, kids=[Tree(2, Colour.green)])),
        (Address, '{"street": "High"}', {"street": "High"}),
        (Inner, INNER, Inner(colour=Colour.green, count=2)),
        (list[Outer] | None, f'[{{"one": {INNER}}}]', [Outer(one=Inner(colour=Colour.green, count=2))]),
        (TypeAdapter(dict[str, Inner]), f'{{"x": {INNER}}}', {"x": Inner(colour=Colour.green, count=2)}),
        ({"type": "integer"}, "3", 3),
        ('{"type": "integer"}', "3", 3),
        (True, "[]", []),
    ],
    ids=str,
)
def test_a_type_reads_what_its_schema_describes(kind: object, text: str, value: object) -> None:
    schema = schema_of(kind, "here")
    read = schema.read(text)
    assert read == value and type(read) is type(value)
    assert isinstance(json.loads(schema.text), dict | bool)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "true"), (int, "1.5"), (float, '"1"'), (bool, "1"), (str, "1"), (Colour, '"blue"'), (Literal["a"], '"b"'),
        (list[int], "{}"), (tuple[int, str], "[1]"), (dict[str, int], "[]"), (int | None, '"x"'), (Tree, "[]"),
        (datetime.date, "3"), (datetime.date, '"x"'), (Inner, '{"colour": "g", "count": -1}'),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_value_of_the_type_is_refused(kind: object, text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        schema_of(kind, "here").read(text)


def test_a_type_that_holds_itself_is_defined_once() -> None:
    schema = json.loads(schema_of(Tree, "here").text)
    assert schema["$ref"] == "#/$defs/Tree"
    assert schema["$defs"] == {
        "Tree": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "colour": {"enum": ["r", "g"]},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    }


def test_types_of_one_name_are_told_apart() -> None:
    @dataclass
    class Inner:
        x: int

    kinds: Any = tuple[Inner, list[Outer]]
    schema = schema_of(kinds, "here")
    assert set(json.loads(schema.text)["$defs"]) == {"Inner", "Inner_2", "Colour"}
    assert schema.read(f'[{{"x": 1}}, [{{"one": {INNER}}}]]')[0] == Inner(1)


def test_objects_of_a_model_have_no_members_that_it_does_not_name() -> None:
    class Open(BaseModel, extra="allow"):
        x: int

    assert json.loads(schema_of(Outer, "here").text)["additionalProperties"] is False
    assert json.loads(schema_of(Open, "here").text)["additionalProperties"] is True
    assert "additionalProperties" not in schema_of({"type": "object", "properties": {}}, "here").text


def test_members_keep_their_order_and_their_letters() -> None:
    given = {"properties": {"天气": {"enum": ["晴", "café"]}, "a": {}}}
    text = schema_of(given, "here").text
    assert text == '{"properties": {"天气": {"enum": ["晴", "café"]}, "a": {}}}'
    assert schema_of(json.dumps(given), "here").text == text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("{", "here is text that is not JSON: "),
        ("[1]", "here must be a JSON object, true or false, got [1] (list)."),
        (complex, "here: <class 'complex'> is no type that JSON has here. Known: int, float, "),
        (dict[int, str], "here: the keys of dict[int, str] must be str, as JSON has no others."),
        (3, "here: 3 is no type that JSON has here. Known: "),
        ({"a": {1, 2}}, "here cannot be written as JSON: "),
        (list["Tree"], "here: the name 'Tree' stands for no type here. Give the type itself."),
    ],
    ids=str,
)
def test_what_has_no_schema_is_refused(kind: object, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        schema_of(kind, "here")
    assert str(raised.value).startswith(message)


def test_the_short_forms_are_gens() -> None:
    assert gen_int("n") == gen("n", dtype=int) == gen("n", json_schema=int)
    assert gen_string("n", max_tokens=3) == gen("n", dtype=str, max_tokens=3)
    assert gen_json("n", Tree) == gen("n", json_schema=Tree)
    assert gen_json("n") == gen("n", json_schema=True)
    assert gen("n", json_schema=None) == gen("n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": int, "json_schema": int}, 'gen("x"): dtype and json_schema are both given, and only one can say'),
        ({"regex": "a", "json_schema": int}, 'gen("x"): regex and json_schema are both given, and only one can say'),
        ({"grammar": "start: A", "choices": ["a"]}, 'gen("x"): choices and grammar are both given, and only one'),
        ({"dtype": "int"}, "gen(\"x\"): dtype must be a type, got 'int' (str). Write json_schema= for it."),
        ({"on_truncate": "cut"}, 'gen("x"): on_truncate must be "keep" or "close", got \'cut\' (str).'),
        ({"json_schema": complex}, 'gen("x"): json_schema: <class \'complex\'> is no type'),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        gen("x", **options)
    assert str(raised.value).startswith(message)


def test_the_pattern_of_dates_is_the_calendar() -> None:
    pattern = re.compile(READABLE["date"])
    for year in (0, 1, 4, 99, 100, 400, 1900, 1996, 2000, 2023, 2024, 2100, 9999):
        for month, day in itertools.product(range(14), range(33)):
            text = f"{year:04}-{month:02}-{day:02}"
            try:
                known = datetime.date.fromisoformat(text) is not None
            except ValueError:
                known = False
            assert (pattern.search(text) is not None) == known, text

"""Values of programs become JSON, whatever they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

import pytest
from pydantic import BaseModel

from branchwise.interpreter.commands.values import plain


class House(Enum):
    RED = "red"


class Wand(BaseModel):
    wood: str


@dataclass
class Person:
    name: str
    house: House
    wand: Wand


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Person("Ann", House.RED, Wand(wood="oak")), {"name": "Ann", "house": "red", "wand": {"wood": "oak"}}),
        ({1: (True, None)}, {"1": [True, None]}),
        ([House.RED, {2.5}], ["red", [2.5]]),
        (b"\x00", "b'\\x00'"),
        (Person, str(Person)),
    ],
)
def test_a_value_as_json(value: object, expected: object) -> None:
    assert plain(value) == expected
    json.dumps(plain(value))

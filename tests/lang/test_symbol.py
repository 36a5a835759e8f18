from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from branchwise.lang import Concat, Text, gen
from branchwise.lang.symbol import Origin, Symbol, TraceEnds, Unknown


@pytest.fixture
def symbol() -> Symbol:
    return Symbol(Origin(gen("x"), number=0))


def test_a_symbol_can_be_put_between_texts(symbol: Symbol) -> None:
    said = "So: " + symbol + "."
    assert type(said) is Concat
    before, unknown, after = said.ops
    assert (before, after) == (Text("So: "), Text("."))
    assert isinstance(unknown, Unknown)
    assert unknown.origin.op.name == "x"


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda x: x == "yes", "compared"),
        (lambda x: x != "yes", "compared"),
        (lambda x: x in ("yes", "no"), "compared"),
        (lambda x: sorted([x, x]), "compared"),
        (lambda x: bool(x), "tested for truth"),
        (lambda x: not x, "tested for truth"),
        (lambda x: {"yes": 1}[x], "used as a key"),
        (lambda x: {x}, "used as a key"),
        (lambda x: list(x), "iterated"),
        (lambda x: [*reversed(x)], "iterated"),
        (lambda x: len(x), "measured"),
        (lambda x: "a" in x, "searched"),
        (lambda x: x[0], "taken apart"),
        (lambda x: int(x), "made a number"),
        (lambda x: float(x), "made a number"),
        (lambda x: range(x), "made a number"),
        (lambda x: x + 1, "calculated with"),
        (lambda x: 1 + x, "calculated with"),
        (lambda x: x * 2, "calculated with"),
        (lambda x: str(x), "made into text; appended with +, it could be traced"),
        (lambda x: print([x]), "made into text; appended with +, it could be traced"),
        (lambda x: f"{x}", "formatted into text; appended with +, it could be traced"),
        (lambda x: f"{x!r}", "made into text; appended with +, it could be traced"),
        (lambda x: "%s" % x, "made into text; appended with +, it could be traced"),  # noqa: UP031
        (lambda x: x.strip(), "asked for its strip"),
        (lambda x: copy.deepcopy(x), "copied"),
    ],
)
def test_what_needs_the_text_ends_the_trace(symbol: Symbol, use: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(TraceEnds) as caught:
        use(symbol)
    assert str(caught.value) == f'the value of gen("x") was {said}'


@pytest.mark.parametrize("use", [lambda x: "".join([x]), json.loads, lambda x: re.match("a", x), "a".startswith])
def test_functions_of_python_take_no_symbol_for_text(symbol: Symbol, use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        use(symbol)


def test_a_program_that_catches_exceptions_does_not_catch_the_end(symbol: Symbol) -> None:
    def tolerant() -> int:
        try:
            return int(symbol)
        except Exception:
            return 0

    with pytest.raises(TraceEnds):
        tolerant()

"""Values that are not known yet: what a program that is only traced reads instead of generated text.

A symbol can be kept, returned and appended to a state. Whatever would need to know the text (to
compare, count, format or search it) raises `TraceEnds`: from there on what the program says depends
on what the model says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never

from .ops import Concat, Expr, Gen, Select, Text


class TraceEnds(BaseException):
    """A traced program did something that only generated text can decide.

    Not an `Exception`: a program that catches those must not go on with what it cannot know.
    """


@dataclass(frozen=True, slots=True)
class Origin:
    """The call whose text is not known. `number` tells calls of one trace apart, `sample` those of one call."""

    op: Gen | Select
    number: int
    sample: int = 0


class Unknown(Text):
    """Text in a state that is not known yet: a symbol that was appended."""

    __slots__ = ("origin",)

    origin: Origin

    def __init__(self, origin: Origin) -> None:
        object.__setattr__(self, "control", False)
        object.__setattr__(self, "origin", origin)

    @property
    def text(self) -> str:
        raise TraceEnds(f"the text with the value of {self.origin.op.call} in it was read")

    def __repr__(self) -> str:
        return f"Unknown({self.origin.op.call})"


class Symbol(Concat):
    """The value of a call in a traced program."""

    __slots__ = ("origin",)

    origin: Origin

    def __init__(self, origin: Origin) -> None:
        object.__setattr__(self, "ops", (Unknown(origin),))
        object.__setattr__(self, "origin", origin)

    def _end(self, what: str) -> Never:
        raise TraceEnds(f"the value of {self.origin.op.call} was {what}")

    def __add__(self, other: Expr | str) -> Concat:
        return Concat.__add__(self, other) if isinstance(other, Expr | str) else self._end("calculated with")

    def __radd__(self, other: Expr | str) -> Concat:
        return Concat.__radd__(self, other) if isinstance(other, Expr | str) else self._end("calculated with")

    def __str__(self) -> Never:
        self._end("made into text; appended with +, it could be traced")

    def __repr__(self) -> Never:
        self.__str__()

    def __format__(self, spec: str) -> Never:
        self._end("formatted into text; appended with +, it could be traced")

    def __getattr__(self, name: str) -> Never:
        if name.startswith("_"):  # Python and its libraries ask whether there is such a thing
            raise AttributeError(name)
        self._end(f"asked for its {name}")


def _ending(what: str) -> Callable[..., Never]:
    def method(self: Symbol, *_: Any) -> Never:
        self._end(what)

    return method


_DECIDES = {
    "compared": "eq ne lt le gt ge",
    "tested for truth": "bool",
    "used as a key": "hash",
    "iterated": "iter reversed",
    "measured": "len",
    "searched": "contains",
    "taken apart": "getitem",
    "made a number": "int float complex index round",
    "calculated with": "sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs and or xor",
    "called": "call",
    "copied": "copy deepcopy reduce_ex",
}
for _what, _names in _DECIDES.items():
    for _name in _names.split():
        setattr(Symbol, f"__{_name}__", _ending(_what))

"""The operations a program is made of, as data.

An operation says what should happen and nothing about how: it holds text, names and options, never
tokens. A program is a stream of them; whoever runs it dispatches with `match` and `assert_never`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .checks import characters, shown
from .errors import LangError
from .options import GenOptions

ChoicesMethod = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]
CHOICES_METHODS: tuple[ChoicesMethod, ...] = get_args(ChoicesMethod)


class Expr:
    """Anything that can be appended to a state: `a + b` is a, then b; strings count as text."""

    __slots__ = ()

    def __add__(self, other: Expr | str) -> Concat:
        return Concat((*flatten(self), *flatten(other)))

    def __radd__(self, other: Expr | str) -> Concat:
        return Concat((*flatten(other), *flatten(self)))

    def __str__(self) -> str:
        raise LangError(
            f"{_named(self)} stands inside an f-string, str() or %, which would turn it into text. "
            "Append it with + instead."
        )

    def __format__(self, spec: str) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Constant text.

    `control` says what the spelling of a control token (`<|im_end|>`) in it means: True, the token
    itself; False, plain characters; None, the place decides: plain inside a role, the token outside.
    """

    text: str
    control: bool | None = None


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """The turn of `role` ("system", "user", "assistant", ...) begins here.

    `fields` is what else its message says, as JSON; "" for nothing.
    """

    role: str
    fields: str = ""


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """The turn of `role` ends here."""

    role: str


@dataclass(frozen=True, slots=True)
class Tools(Expr):
    """What the model may call in the turns that follow: a JSON list of schemas."""

    schemas: str


@dataclass(frozen=True, slots=True)
class Var(Expr):
    """The text of a variable that is set earlier in the same state."""

    name: str


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Generate text and keep it under `name`, if there is one."""

    name: str | None
    options: GenOptions

    @property
    def call(self) -> str:
        """How an error names this operation."""
        return call_text("gen", self.name)


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """Append the likeliest of `choices` and keep it under `name`, if there is one."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod = "token_length_normalized"
    heal: bool | None = None  # None: as the defaults say

    @property
    def call(self) -> str:
        """How an error names this operation."""
        return call_text("select", self.name)


@dataclass(frozen=True, slots=True)
class Concat(Expr):
    """Operations one after the other; never nested."""

    ops: tuple[Op, ...]


Op: TypeAlias = Text | RoleBegin | RoleEnd | Tools | Var | Gen | Select


def call_text(verb: str, name: str | None) -> str:
    """A call as its user wrote it, without options: `gen("age")`, or `gen()` where it has no name."""
    return f"{verb}()" if name is None else f'{verb}("{name}")'


def flatten(expr: Expr | str) -> Iterator[Op]:
    """The operations of `expr` in order, with strings as `Text`.

    Raises:
        LangError: `expr` is neither an operation nor a string.
    """
    match expr:
        case str():
            yield Text(characters(expr, "the text"))
        case Concat(ops):
            yield from ops
        case Text() | RoleBegin() | RoleEnd() | Tools() | Var() | Gen() | Select():
            yield expr
        case _:
            if why := getattr(expr, "why_not_appended", None):
                raise LangError(why)
            raise LangError(f"cannot append {shown(expr)} to a state. Write text, gen(...), select(...) or a role.")


def _named(expr: Expr) -> str:
    return expr.call if isinstance(expr, (Gen, Select)) else f"{type(expr).__name__}(...)"

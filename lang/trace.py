"""What a program says when it is run once without a model: every operation in order, as far as it can be known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias, assert_never

from .ops import Gen, RoleBegin, RoleEnd, Select, Text, Tools
from .options import FALLBACK
from .symbol import Unknown
from .tables import as_html, as_text

TEXT_LEN = 48
"""So much of a text is shown: its beginning and its end."""


@dataclass(frozen=True, slots=True)
class Forked:
    """The branch goes on as so many more."""

    count: int


Said: TypeAlias = Text | RoleBegin | RoleEnd | Tools | Gen | Select | Forked


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was said: in which branch, and where that is written.

    `branch` is the way to it: () is the program itself, (2,) its third fork, (2, 0) the first fork of that.
    """

    branch: tuple[int, ...]
    said: Said
    written_at: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Where a trace had to end, and why."""

    why: str
    written_at: str

    def __str__(self) -> str:
        return f"the trace ends at {self.written_at}: {self.why}. What follows depends on what the model says."


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of a program without a model. `ended` is None if nothing in it depends on what the model says."""

    program: str
    steps: tuple[Step, ...]
    ended: Ended | None = None

    @property
    def calls(self) -> tuple[Gen | Select, ...]:
        """All calls of the model, in the order they are written. Every option is filled."""
        return tuple(step.said for step in self.steps if isinstance(step.said, Gen | Select))

    def table(self) -> list[dict[str, str]]:
        """A row for each step, as a dict; texts that stand together are one."""
        return [
            {"line": short(step.written_at), "branch": branch_text(step.branch), "says": described(step.said)}
            for _, step in merged(self.steps)
            if not isinstance(step.said, RoleEnd)
        ]

    def __str__(self) -> str:
        return "\n".join(filter(None, [self._headline(), as_text(self.table()), str(self.ended or "")]))

    def _repr_html_(self) -> str:
        return as_html(self.table(), above=self._headline(), below=str(self.ended or ""))

    def _headline(self) -> str:
        branches = {step.branch for step in self.steps} - {()}
        return f"{self.program}: {counted(len(self.calls), 'call')}" + (
            f" in {counted(len(branches), 'branch', 'branches')}" if branches else ""
        )


def merged(steps: Sequence[Step]) -> Iterator[tuple[int, Step]]:
    """The steps by their number, with constant texts that stand together in a branch as one, by the first's."""
    first, last = 0, None
    for number, step in enumerate(steps):
        if last is not None and type(last.said) is type(step.said) is Text and last.branch == step.branch:
            control = step.said.control
            if last.said.control == control:
                last = Step(last.branch, Text(last.said.text + step.said.text, control), last.written_at)
                continue
        if last is not None:
            yield first, last
        first, last = number, step
    if last is not None:
        yield first, last


def described(said: Said) -> str:
    """What was said, on one line."""
    match said:
        case Unknown(origin=origin):
            return f"the value of {origin.op.call}"
        case Text(text):
            return shortened(text)
        case RoleBegin(role):
            return f"{role}:"
        case RoleEnd(role):
            return f"{role} ends"
        case Tools():
            return "tools(...)"
        case Gen():
            given = [f"{name}={value!r}" for name, value in _unusual(said)]
            return _with_arguments(said.call, given)
        case Select(_, choices, method):
            return _with_arguments(said.call, [f"{len(choices)} choices", method])
        case Forked(count):
            return f"fork({count})"
        case _:
            assert_never(said)


def summarized(call: Gen | Select) -> str:
    """A call and what it must be, on one line; how it is drawn is left out."""
    if isinstance(call, Select):
        return _with_arguments(call.call, [f"{len(call.choices)} choices"])
    options = call.options
    said = [f"regex={shortened(options.regex)}"] if options.regex is not None else []
    said += [f"{len(options.choices)} choices"] if options.choices is not None else []
    return _with_arguments(call.call, said)


def shortened(text: str) -> str:
    """The beginning and the end of a text, as Python would write it."""
    whole = repr(text)
    half = TEXT_LEN // 2
    return whole if len(whole) <= TEXT_LEN + 3 else f"{whole[:half]}...{whole[-half:]}"


def branch_text(branch: tuple[int, ...]) -> str:
    return ".".join(map(str, branch))


def short(written_at: str) -> str:
    """A line without the folders of its file."""
    return written_at.replace("\\", "/").rpartition("/")[2]


def counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _unusual(gen: Gen) -> Iterator[tuple[str, object]]:
    """The options that say something else than nobody."""
    for field in fields(gen.options):
        value = getattr(gen.options, field.name)
        if value is not None and value != getattr(FALLBACK, field.name):
            yield field.name, value


def _with_arguments(call: str, arguments: Sequence[str]) -> str:
    inner = ", ".join([*filter(None, [call.partition("(")[2][:-1]]), *arguments])
    return f"{call.partition('(')[0]}({inner})"

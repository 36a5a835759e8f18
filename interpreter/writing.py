"""Writing into a state: what `State` and `AsyncState` have in common, for writing waits for nothing.

It joins what is said (`Transcript`) to what does it (`Executor`), and fills the options of each call
from the defaults that hold where it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Generic, Never, Self, TypeVar, overload

from branchwise.lang import (
    CallError,
    Expr,
    Gen,
    GenOptions,
    LangError,
    Op,
    OptionError,
    RoleBegin,
    RoleEnd,
    Select,
    flatten,
)
from branchwise.lang.api import role
from branchwise.lang.checks import shown, whole_number

from .changes import Wait
from .errors import Cancelled
from .executor import Executor
from .outcome import Outcome
from .reaper import REAPER
from .show import as_html
from .transcript import Transcript


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a call's options are filled from: the run, then the function, then the backend."""

    run: GenOptions
    function: GenOptions
    backend: GenOptions

    def within(self, function: GenOptions) -> Defaults:
        """The defaults inside a function that was called from this one."""
        return replace(self, function=function.over(self.function))

    def fill(self, op: Op) -> Op:
        defaults = self.run.over(self.function.over(self.backend))
        match op:
            case Gen():
                return replace(op, options=op.options.over(defaults).filled())
            case Select(heal=None):
                return replace(op, heal=defaults.filled().heal)
            case _:
                return op


class Writer:
    """One conversation, written with `+=`. One thread or task writes it."""

    why_not_appended = "a state is not a value to add to. Write s += ..., which appends to it."

    def __init__(
        self,
        executor: Executor,
        transcript: Transcript,
        defaults: Defaults,
        *,
        on_drop: Callable[[], None] | None = None,
        view_of: Writer | None = None,
    ) -> None:
        """For runners.

        Args:
            on_drop: what to do when this object has gone; must not hold it.
            view_of: the state that this one only writes into; lives as long as this one.
        """
        self._executor = executor
        self._transcript = transcript
        self._defaults = defaults
        self._view_of = view_of
        if on_drop is not None:
            REAPER.watch(self, on_drop)

    def __iadd__(self, expr: Expr | str) -> Self:
        self._write(expr)
        return self

    def __add__(self, other: Expr | str) -> Never:
        raise LangError(self.why_not_appended)

    __radd__ = __add__

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable of this state alone; any Python value."""
        check_name(name)
        if isinstance(value, Expr):
            raise LangError(f's["{name}"] = {shown(value)} would run nothing. Write s += ... to append it.')
        self._transcript.set(name, Outcome.of(value))

    @overload
    def system(self, expr: Expr | str) -> None: ...
    @overload
    def system(self) -> Turn[Self]: ...
    def system(self, expr: Expr | str | None = None) -> Turn[Self] | None:
        """Append the system's turn; without `expr`, `with s.system():` makes one of what is appended inside."""
        return self._turn("system", expr)

    @overload
    def user(self, expr: Expr | str) -> None: ...
    @overload
    def user(self) -> Turn[Self]: ...
    def user(self, expr: Expr | str | None = None) -> Turn[Self] | None:
        """Append the user's turn; without `expr`, `with s.user():` makes one of what is appended inside."""
        return self._turn("user", expr)

    @overload
    def assistant(self, expr: Expr | str) -> None: ...
    @overload
    def assistant(self) -> Turn[Self]: ...
    def assistant(self, expr: Expr | str | None = None) -> Turn[Self] | None:
        """Append the assistant's turn; without `expr`, `with s.assistant():` makes one of what is appended inside."""
        return self._turn("assistant", expr)

    def system_begin(self) -> None:
        self._write(RoleBegin("system"))

    def system_end(self) -> None:
        self._write(RoleEnd("system"))

    def user_begin(self) -> None:
        self._write(RoleBegin("user"))

    def user_end(self) -> None:
        self._write(RoleEnd("user"))

    def assistant_begin(self) -> None:
        self._write(RoleBegin("assistant"))

    def assistant_end(self) -> None:
        self._write(RoleEnd("assistant"))

    def __contains__(self, name: object) -> bool:
        """Whether something sets this variable, done or not."""
        return name in self._transcript.names()

    @property
    def error(self) -> BaseException | None:
        """What the program raised or else what went wrong first, if something has by now; does not wait.

        A property: `s.error`, where SGLang has `s.error()`.
        """
        failure = self._transcript.ended.failure or self._executor.failure
        return failure.exception() if failure else None

    def cancel(self) -> None:
        """Stop what is queued or running here and in the branches. Who waits for it gets `Cancelled`.

        Does nothing where nothing is running. Does not wait.
        """
        self._executor.cancel("cancel() was called")

    def __repr__(self) -> str:
        text = self._transcript.text_so_far()
        names = ", ".join(self._transcript.names()) or "none"
        shown_text = text if len(text) <= 40 else "..." + text[-37:]
        return f"<{type(self).__name__} {_phase(self)}, variables: {names}, text: {shown_text!r}>"

    def _repr_html_(self) -> str:
        return as_html(self._transcript)

    def _write(self, expr: Expr | str) -> None:
        ops = [self._defaults.fill(op) for op in flatten(expr)]
        self._executor.add(self._transcript.write(ops, line_of_the_program()))

    def _turn(self, name: str, expr: Expr | str | None) -> Turn[Self] | None:
        if expr is not None:
            self._write(role(name, expr))
            return None
        self._transcript.promise(name)
        return Turn(self, name)

    def _forked(self, count: object, unknown: Iterable[str]) -> list[Self]:
        for name in unknown:
            raise CallError(f"fork(): there is no option {name}. Write s.fork(3) for three branches.")
        number = whole_number(count, f"fork({count}): the number of branches", least=1)
        executors = self._executor.fork(number, keep_alive=self._view_of or self)
        children = [self._child(executor) for executor in executors]
        self._transcript.branched([child._transcript for child in children])
        return children

    def _child(self, executor: Executor) -> Self:
        return type(self)(executor, Transcript(self._transcript), self._defaults, on_drop=executor.drop)

    def _explained(self, steps: Iterator[str | Wait]) -> Iterator[str | Wait]:
        try:
            yield from steps
        except Cancelled as error:
            self._explain(error)
            raise

    def _explain(self, error: Cancelled) -> None:
        """Give `error` the program's own as its cause, if that is why it was stopped."""
        ended = self._transcript.ended.failure
        if ended is not None and not isinstance(ended.error, Cancelled):
            error.__cause__ = ended.exception()


W = TypeVar("W", bound=Writer)


class Turn(Generic[W]):
    """`with s.user():`: what is appended inside is the turn of a role."""

    def __init__(self, state: W, role: str) -> None:
        self._state = state
        self._role = role

    def __enter__(self) -> W:
        self._state._transcript.keep_promise()
        self._state._write(RoleBegin(self._role))
        return self._state

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or self._state._transcript.role == self._role:
            self._state._write(RoleEnd(self._role))


def check_name(name: object) -> None:
    if not isinstance(name, str):
        raise OptionError(f"s[...]: the name of a variable must be a string, got {shown(name)}.")


def _phase(state: Writer) -> str:
    if state._executor.failure is not None:
        return "failed"
    return "done" if state._executor.idle else "running"


def line_of_the_program() -> str:
    """Where the user's own code stands that is being carried out: the nearest frame that is not ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("branchwise."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

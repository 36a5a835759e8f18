"""`State`: what the user's function holds, writes into and reads from.

It joins what is said (`Transcript`) to what does it (`Executor`), and fills the options of each call
from the defaults that hold where it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, overload

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

from .branches import Branches
from .errors import Cancelled, UnknownVariable
from .executor import Executor
from .graphemes import whole_graphemes
from .outcome import Outcome
from .reaper import REAPER
from .session import Completion, Selection
from .show import as_html, live
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


class State:
    """One conversation, written with `+=` and read by name. Reading waits for what is read, writing never waits.

    One thread writes a state; any thread may read it. When nobody holds it any more, what it has not
    done is cancelled.
    """

    def __init__(
        self,
        executor: Executor,
        transcript: Transcript,
        defaults: Defaults,
        *,
        on_drop: Callable[[], None] | None = None,
        view_of: State | None = None,
        outside: bool = False,
    ) -> None:
        """For runners.

        Args:
            on_drop: what to do when this object has gone; must not hold it.
            view_of: the state that this one only writes into; lives as long as this one.
            outside: for who reads while the program writes on another thread: waits for what is not written yet.
        """
        self._executor = executor
        self._transcript = transcript
        self._defaults = defaults
        self._view_of = view_of
        self._outside = outside
        if on_drop is not None:
            REAPER.watch(self, on_drop)

    # Writing

    def __iadd__(self, expr: Expr | str) -> State:
        self._write(expr)
        return self

    def __add__(self, other: Expr | str) -> State:
        raise LangError("a state is not a value to add to. Write s += ..., which appends to it.")

    __radd__ = __add__

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable of this state alone; any Python value."""
        _check_name(name)
        if isinstance(value, Expr):
            raise LangError(f's["{name}"] = {shown(value)} would run nothing. Write s += ... to append it.')
        self._transcript.set(name, Outcome.of(value))

    @overload
    def system(self, expr: Expr | str) -> None: ...
    @overload
    def system(self) -> Turn: ...
    def system(self, expr: Expr | str | None = None) -> Turn | None:
        """Append the system's turn; without `expr`, `with s.system():` makes one of what is appended inside."""
        return self._turn("system", expr)

    @overload
    def user(self, expr: Expr | str) -> None: ...
    @overload
    def user(self) -> Turn: ...
    def user(self, expr: Expr | str | None = None) -> Turn | None:
        """Append the user's turn; without `expr`, `with s.user():` makes one of what is appended inside."""
        return self._turn("user", expr)

    @overload
    def assistant(self, expr: Expr | str) -> None: ...
    @overload
    def assistant(self) -> Turn: ...
    def assistant(self, expr: Expr | str | None = None) -> Turn | None:
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

    # Branching

    def fork(self, count: int = 1, **unknown: Never) -> Branches[State]:
        """`count` states that go on from here, each on its own; they have this state's text and variables."""
        for name in unknown:
            raise CallError(f"fork(): there is no option {name}. Write s.fork(3) for three branches.")
        number = whole_number(count, f"fork({count}): the number of branches", least=1)
        executors = self._executor.fork(number, keep_alive=self._view_of or self)
        states = [self._child(executor) for executor in executors]
        self._transcript.branched([state._transcript for state in states])
        return Branches(self, states)

    def copy(self) -> State:
        """Another state that goes on from here."""
        return self.fork(1)[0]

    # Reading

    def __getitem__(self, name: str) -> Any:
        """Wait for the variable `name`. Of a `gen` with n > 1, the list of its samples.

        Raises:
            UnknownVariable: nothing sets it, or will; a `KeyError`.
            GenerationError: the call that sets it, or one before it, failed.
        """
        with self._cancelled_by_interrupt():
            return self._find(name).value()

    def get(self, name: str, default: Any = None) -> Any:
        """Like `s[name]`, and `default` where nothing sets it."""
        try:
            return self[name]
        except UnknownVariable:
            return default

    def __contains__(self, name: object) -> bool:
        """Whether something sets this variable, done or not."""
        return name in self._transcript.names()

    def meta(self, name: str) -> Completion | Selection:
        """Wait for the variable `name`, and give all that the backend said: finish reason, samples, scores, tokens."""
        with self._cancelled_by_interrupt():
            result = self._find(name).result()
        if result is None:
            raise UnknownVariable(f'"{name}" was set by the program, not generated: there is nothing more to tell.')
        return result

    def text(self) -> str:
        """Wait for everything, and give all that was appended and generated, without marks of the template."""
        with self._cancelled_by_interrupt():
            self._await_program()
            return self._transcript.text()

    def messages(self) -> list[dict[str, Any]]:
        """Wait for everything, and give the turns as dicts of `role`, `content` and the fields given to `role(...)`.

        Text outside of any role is in `text()` and in no turn.
        """
        with self._cancelled_by_interrupt():
            self._await_program()
            return self._transcript.messages()

    def text_iter(self, name: str | None = None, *, graphemes: bool = False, **unknown: Never) -> Iterator[str]:
        """The text in pieces as it grows: all of it, or that of the variable `name`.

        Each iterator gives everything from the start. Leaving one early changes nothing: the program goes on. No piece
        ends inside a character of Python; with `graphemes`, none ends inside what a reader sees as one, like a flag.
        """
        for option in unknown:
            raise CallError(f'text_iter(): there is no option {option}. Write s.text_iter("x") for a variable.')
        if name is None:
            pieces = self._transcript.pieces(until_ended=self._outside)
        else:
            pieces = self._pieces_of(name) if self._outside else self._find(name).pieces()
        return self._interruptible(whole_graphemes(pieces) if graphemes else pieces)

    def sync(self) -> None:
        """Wait for everything, and raise what went wrong first."""
        with self._cancelled_by_interrupt():
            self._await_program()
            if not self._outside:
                self._transcript.check_blocks()
            self._executor.wait()

    @property
    def ret_value(self) -> Any:
        """What the program's function returned; None before it has, and in branches."""
        if self._outside:
            self._await_program()
        ended = self._transcript.ended
        return ended.value() if ended.done else None

    @property
    def error(self) -> BaseException | None:
        """What the program raised or else what went wrong first, if something has by now; does not wait.

        A property: `s.error`, where SGLang has `s.error()`.
        """
        failure = self._transcript.ended.failure or self._executor.failure
        return failure.exception() if failure else None

    if not TYPE_CHECKING:  # a checker shall see no attribute that is not there

        def __getattr__(self, name: str) -> Never:
            twin = {"get_var": 's["x"]', "get_meta_info": 's.meta("x")'}.get(name)
            hint = f" Write {twin}." if twin else ""
            raise AttributeError(f"a state has no attribute {name!r}.{hint}", name=name, obj=self)

    # Ending

    def cancel(self) -> None:
        """Stop what is queued or running here and in the branches. Who waits for it gets `Cancelled`.

        Does nothing where nothing is running. Does not wait.
        """
        if self._outside and not self._transcript.ended.done:
            self._executor.stop("cancel() was called")
        else:
            self._executor.cancel("cancel() was called")

    def show(self) -> None:
        """Show this state: in a notebook in the cell, as it grows until all that is written is done; else as text."""
        with self._cancelled_by_interrupt():
            live(self._transcript, lambda: not self._outside or self._transcript.ended.done)

    def _repr_html_(self) -> str:
        return as_html(self._transcript)

    def __repr__(self) -> str:
        text = self._transcript.text_so_far()
        names = ", ".join(self._transcript.names()) or "none"
        return f"<State {_phase(self)}, variables: {names}, text: {text if len(text) <= 40 else '...' + text[-37:]!r}>"

    def _write(self, expr: Expr | str) -> None:
        ops = [self._defaults.fill(op) for op in flatten(expr)]
        self._executor.add(self._transcript.write(ops, _line_of_the_program()))

    def _turn(self, name: str, expr: Expr | str | None) -> Turn | None:
        if expr is not None:
            self._write(role(name, expr))
            return None
        self._transcript.promise(name)
        return Turn(self, name)

    def _child(self, executor: Executor) -> State:
        return State(executor, Transcript(self._transcript), self._defaults, on_drop=executor.drop)

    def _within(self, function: GenOptions) -> State:
        """This state as a function sees it that has defaults of its own."""
        defaults = self._defaults.within(function)
        return State(self._executor, self._transcript, defaults, view_of=self._view_of or self)

    def _find(self, name: str) -> Outcome:
        _check_name(name)
        return self._transcript.await_variable(name) if self._outside else self._transcript.find(name)

    def _pieces_of(self, name: str) -> Iterator[str]:
        yield from self._find(name).pieces()

    def _await_program(self) -> None:
        if self._outside:
            self._transcript.ended.value()

    def _interruptible(self, pieces: Iterator[str]) -> Iterator[str]:
        with self._cancelled_by_interrupt():
            yield from pieces

    @contextmanager
    def _cancelled_by_interrupt(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.cancel()
            raise
        except Cancelled as error:  # a fresh one for each reader
            self._explain(error)
            raise

    def _explain(self, error: Cancelled) -> None:
        """Give `error` the program's own as its cause, if that is why it was stopped."""
        ended = self._transcript.ended.failure
        if ended is not None and not isinstance(ended.error, Cancelled):
            error.__cause__ = ended.exception()


class Turn:
    """`with s.user():`: what is appended inside is the turn of a role."""

    def __init__(self, state: State, role: str) -> None:
        self._state = state
        self._role = role

    def __enter__(self) -> State:
        self._state._transcript.keep_promise()
        self._state._write(RoleBegin(self._role))
        return self._state

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or self._state._transcript.role == self._role:
            self._state._write(RoleEnd(self._role))


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise OptionError(f"s[...]: the name of a variable must be a string, got {shown(name)}.")


def _phase(state: State) -> str:
    if state._executor.failure is not None:
        return "failed"
    return "done" if state._executor.idle else "running"


def _line_of_the_program() -> str:
    """Where the user's own code stands that is being carried out: the nearest frame that is not ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("branchwise."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

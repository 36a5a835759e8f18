"""`State`: what the user's function holds, writes into and reads from. Reading waits on the thread that reads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread, current_thread
from typing import TYPE_CHECKING, Any, Never, TypeVar

from branchwise.lang import CallError, GenOptions

from .branches import Branches
from .changes import Awaiting, Wait, blocking
from .errors import Cancelled, UnknownVariable
from .executor import Executor
from .graphemes import whole_graphemes
from .mapping import map_on_threads
from .outcome import Outcome
from .session import Completion, Selection
from .show import live
from .transcript import Transcript
from .writing import Defaults, Writer, check_name

T = TypeVar("T")
R = TypeVar("R")


class State(Writer):
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
        view_of: Writer | None = None,
        outside: bool = False,
        written_on: Thread | None = None,
    ) -> None:
        """For runners.

        Args:
            on_drop, view_of: see `Writer`.
            outside: for who reads while the program writes elsewhere: waits for what is not written yet.
            written_on: where the program runs; that thread must not wait for it.
        """
        super().__init__(executor, transcript, defaults, on_drop=on_drop, view_of=view_of)
        self._outside = outside
        self._written_on = written_on

    # Branching

    def fork(self, count: int = 1, **unknown: Never) -> Branches[State]:
        """`count` states that go on from here, each on its own; they have this state's text and variables."""
        return Branches(self, self._forked(count, unknown))

    def copy(self) -> State:
        """Another state that goes on from here."""
        return self.fork(1)[0]

    def map(self, items: Iterable[T], body: Callable[[State, T], R]) -> list[R]:
        """A branch for each item, in which `body(branch, item)` is run, side by side; what it returns, in order.

        The bodies run on this thread and helping ones, so each may read what it has written.

        Raises:
            What the first body (by index) raised that failed, when the others have finished.
        """
        listed = list(items)
        return map_on_threads(self.fork(len(listed)), listed, body) if listed else []

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
        steps = self._steps("text_iter", name, graphemes, unknown)
        self._check_thread()
        return self._interruptible(blocking(steps))

    def text_async_iter(
        self, name: str | None = None, *, graphemes: bool = False, **unknown: Never
    ) -> AsyncIterator[str]:
        """`text_iter` for an event loop: `async for piece in s.text_async_iter(): ...`, which holds up nothing else."""
        return Awaiting(self._steps("text_async_iter", name, graphemes, unknown))

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

    if not TYPE_CHECKING:  # a checker shall see no attribute that is not there

        def __await__(self) -> Never:
            raise CallError("a state is not awaited: run(...) has waited already. Write await program.arun(...).")

        def __getattr__(self, name: str) -> Never:
            twin = {
                "get_var": 's["x"]',
                "set_var": 's["x"] = value',
                "get_meta_info": 's.meta("x")',
                "gen": 's += gen("x")',
                "var_scope": 's["x"] = ... of the parts, which are gens with names',
            }.get(name)
            hint = f" Write {twin}." if twin else ""
            raise AttributeError(f"a state has no attribute {name!r}.{hint}", name=name, obj=self)

    def cancel(self) -> None:
        """Stop what is queued or running here and in the branches. Who waits for it gets `Cancelled`.

        Does nothing where nothing is running. Does not wait.
        """
        if self._outside and not self._transcript.ended.done:
            self._executor.stop("cancel() was called")
        else:
            super().cancel()

    def show(self) -> None:
        """Show this state: in a notebook in the cell, as it grows until all that is written is done; else as text."""
        with self._cancelled_by_interrupt():
            live(self._transcript, lambda: not self._outside or self._transcript.ended.done)

    def _within(self, function: GenOptions) -> State:
        """This state as a function sees it that has defaults of its own."""
        defaults = self._defaults.within(function)
        return State(self._executor, self._transcript, defaults, view_of=self._view_of or self)

    def _find(self, name: str) -> Outcome:
        check_name(name)
        if not self._outside:
            return self._transcript.find(name)
        self._check_thread()
        return self._transcript.await_variable(name)

    def _steps(self, call: str, name: str | None, graphemes: bool, unknown: Iterable[str]) -> Iterator[str | Wait]:
        for option in unknown:
            raise CallError(f'{call}(): there is no option {option}. Write s.{call}("x") for a variable.')
        if name is None:
            steps = self._transcript.steps(until_ended=self._outside)
        else:
            check_name(name)
            steps = self._transcript.steps_of(name) if self._outside else self._transcript.find(name).steps()
        return self._explained(whole_graphemes(steps) if graphemes else steps)

    def _await_program(self) -> None:
        if self._outside:
            self._check_thread()
            self._transcript.ended.value()

    def _check_thread(self) -> None:
        """Refuse to wait on the thread that writes what is waited for."""
        if self._written_on is current_thread() and not self._transcript.ended.done:
            raise CallError(
                "the program that writes this state runs on this very thread, which would wait for it for ever. "
                "Read it by async for piece in state.text_async_iter(...), or run it by await program.arun(...)."
            )

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

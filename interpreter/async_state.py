"""`AsyncState`: what an `async def` program holds. Writing is as in `State`; what has to wait is awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Never, TypeVar

from branchwise.lang import GenOptions, LangError

from .async_branches import AsyncBranches
from .changes import Awaiting
from .errors import UnknownVariable
from .executor import Executor
from .mapping import map_as_tasks
from .outcome import Outcome
from .pending import Forgotten, Pending
from .session import Completion, Selection
from .state import State
from .transcript import Transcript
from .writing import Defaults, Writer, check_name

T = TypeVar("T")
R = TypeVar("R")


class AsyncState(Writer):
    """One conversation, written with `+=` and read with `await s[name]`. Writing never waits, and takes no `await`.

    One task writes it; any task may read it. No thread belongs to it: answers wake the event loop of who reads.
    """

    def __init__(
        self,
        executor: Executor,
        transcript: Transcript,
        defaults: Defaults,
        *,
        on_drop: Callable[[], None] | None = None,
        view_of: Writer | None = None,
        forgotten: Forgotten | None = None,
    ) -> None:
        """For runners.

        Args:
            on_drop, view_of: see `Writer`.
            forgotten: that of the run; None begins a new one.
        """
        super().__init__(executor, transcript, defaults, on_drop=on_drop, view_of=view_of)
        self._forgotten = forgotten or Forgotten()

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable of this state alone; any Python value."""
        if isinstance(value, Pending):
            raise LangError(value.why_not_appended)
        super().__setitem__(name, value)

    # Branching

    def fork(self, count: int = 1, **unknown: Never) -> AsyncBranches[AsyncState]:
        """`count` states that go on from here, each on its own; they have this state's text and variables."""
        return AsyncBranches(self, self._forked(count, unknown))

    def copy(self) -> AsyncState:
        """Another state that goes on from here."""
        return self.fork(1)[0]

    def map(self, items: Iterable[T], body: Callable[[AsyncState, T], Coroutine[Any, Any, R]]) -> Pending[list[R]]:
        """`await` what `body(branch, item)`, an `async def`, returns in a branch for each item; see `State.map`."""
        listed = list(items)

        async def mapped() -> list[R]:
            return await map_as_tasks(self.fork(len(listed)), listed, body) if listed else []

        return self._pending("s.map(...)", mapped)

    # Reading

    def __getitem__(self, name: str) -> Pending[Any]:
        """`await` the variable `name`. Of a `gen` with n > 1, the list of its samples.

        Raises:
            UnknownVariable: nothing that is written sets it; raised here, before the `await`.
            GenerationError: the call that sets it, or one before it, failed.
        """
        outcome = self._find(name)

        async def value() -> Any:
            return (await outcome.settled()).value()

        return self._pending(f's["{name}"]', value)

    def get(self, name: str, default: Any = None) -> Pending[Any]:
        """Like `s[name]`, and `default` where nothing sets it."""

        async def value() -> Any:
            try:
                return await self[name]
            except UnknownVariable:
                return default

        return self._pending(f's.get("{name}")', value)

    def meta(self, name: str) -> Pending[Completion | Selection]:
        """`await` all that the backend said of the variable `name`: finish reason, samples, scores, tokens."""
        outcome = self._find(name)

        async def result() -> Completion | Selection:
            await outcome.settled()
            return self.blocking().meta(name)

        return self._pending(f's.meta("{name}")', result)

    def text(self) -> Pending[str]:
        """`await` everything, and get all that was appended and generated, without marks of the template."""

        async def text() -> str:
            await self._executor.reach().settled()
            return self.blocking().text()

        return self._pending("s.text()", text)

    def messages(self) -> Pending[list[dict[str, Any]]]:
        """`await` everything, and get the turns as dicts; see `State.messages`."""

        async def messages() -> list[dict[str, Any]]:
            await self._executor.reach().settled()
            return self.blocking().messages()

        return self._pending("s.messages()", messages)

    def sync(self) -> Pending[None]:
        """`await` everything; raises what went wrong first."""

        async def sync() -> None:
            await self._executor.reach().settled()
            self.blocking().sync()

        return self._pending("s.sync()", sync)

    def text_async_iter(
        self, name: str | None = None, *, graphemes: bool = False, **unknown: Never
    ) -> AsyncIterator[str]:
        """The text in pieces as it grows: `async for piece in s.text_async_iter("x")`; see `State.text_iter`."""
        return Awaiting(self.blocking()._steps("text_async_iter", name, graphemes, unknown))

    if not TYPE_CHECKING:  # a checker shall see no attribute that is not there

        def __getattr__(self, name: str) -> Never:
            hint = " Write async for piece in s.text_async_iter(...)." if name == "text_iter" else ""
            raise AttributeError(f"the state of an async program has no attribute {name!r}.{hint}", name=name, obj=self)

    # Inside

    def blocking(self) -> State:
        """This conversation as a program that is not async writes and reads it, on a thread that may wait."""
        return State(self._executor, self._transcript, self._defaults, view_of=self._view_of or self)

    def check_awaited(self) -> None:
        """Raise CallError where something that this run asked for was not awaited."""
        self._forgotten.check()

    def called(
        self, name: str, run: Callable[[AsyncState], Coroutine[Any, Any, Any]], function: GenOptions
    ) -> Pending[Any]:
        """A program called with this state, to be awaited; `function` is what it has of defaults."""
        return Pending(f"{name}(...)", lambda: run(self._within(function)), self._forgotten)

    def _pending(self, call: str, wait: Callable[[], Any]) -> Pending[Any]:
        return Pending(call, wait, self._forgotten)

    def _find(self, name: str) -> Outcome:
        check_name(name)
        return self._transcript.find(name)

    def _child(self, executor: Executor) -> AsyncState:
        transcript = Transcript(self._transcript)
        return AsyncState(executor, transcript, self._defaults, on_drop=executor.drop, forgotten=self._forgotten)

    def _within(self, function: GenOptions) -> AsyncState:
        """This state as a function sees it that has defaults of its own."""
        defaults = self._defaults.within(function)
        root = self._view_of or self
        return AsyncState(self._executor, self._transcript, defaults, view_of=root, forgotten=self._forgotten)

"""What `s.fork(n)` gives in an `async def` program: `Branches` whose waits are awaited."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Protocol, TypeVar, overload

from branchwise.lang import CallError

from .changes import Awaiting
from .group import Branching, Group, JoinMode, checked_mode, first_failure
from .outcome import Outcome, in_order_of_settling
from .pending import Forgotten, Pending


class AsyncReadable(Branching, Protocol):
    """A state whose reads are awaited."""

    _forgotten: Forgotten

    def _find(self, name: str) -> Outcome: ...


S = TypeVar("S", bound=AsyncReadable)


class AsyncBranches(Group[S]):
    """`Branches` of an `async def` program; `async with` joins and closes them at the end of the block."""

    @overload
    def __getitem__(self, key: int) -> S: ...
    @overload
    def __getitem__(self, key: slice) -> list[S]: ...
    @overload
    def __getitem__(self, key: str) -> Pending[list[Any]]: ...
    def __getitem__(self, key: int | slice | str) -> S | list[S] | Pending[list[Any]]:
        """A branch by its index; or `await` the values of a variable in all of them, in order."""
        if not isinstance(key, str):
            return self._states[key]
        outcomes = [state._find(key) for state in self._states]

        async def listed() -> list[Any]:
            return [(await outcome.settled()).value() for outcome in outcomes]

        return Pending(f'branches["{key}"]', listed, self._parent._forgotten)

    def join(self, mode: JoinMode = "gather_variable") -> Pending[None]:
        """`await` the branches, and bring what they found into the state they came from; see `Branches.join`."""
        checked = checked_mode(mode)

        async def join() -> None:
            if checked == "first":
                self._go_on_as(await self._first())
                return
            reached = self._reach()
            for outcome in reached:
                await outcome.settled()
            if (error := first_failure(reached)) is not None:
                raise error
            self._bring_together(checked)

        return Pending("branches.join()", join, self._parent._forgotten)

    def first(self) -> Pending[S]:
        """`await` the first branch that finishes without a failure; the others are stopped. See `Branches.first`."""
        return Pending("branches.first()", self._first, self._parent._forgotten)

    async def __aenter__(self) -> AsyncBranches[S]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None and self._left_to_join:
                await self.join()
        finally:
            self.close()

    if not TYPE_CHECKING:  # a checker shall see that it is not there

        def __enter__(self) -> Never:
            raise CallError("the end of this block waits for the branches. Write async with s.fork(...) as branches:")

        def __exit__(self, *_: object) -> None: ...

    async def _first(self) -> S:
        reached = self._reach()
        async for index in Awaiting(in_order_of_settling(reached)):
            if reached[index].failure is None:
                return self._won_by(index)
        error = first_failure(reached)
        assert error is not None, "no branch has finished, and none has failed"
        raise error

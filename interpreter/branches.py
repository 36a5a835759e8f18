"""What `s.fork(n)` gives: several states that went on from one, in order, whatever becomes of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar, overload

from .changes import blocking
from .group import Branching, Group, JoinMode, checked_mode, first_failure
from .outcome import in_order_of_settling


class Readable(Branching, Protocol):
    """A state whose reads wait."""

    def __getitem__(self, name: str) -> Any: ...


S = TypeVar("S", bound=Readable)


class Branches(Group[S]):
    """A fixed number of branches; index and order never change, also when some fail.

    As a context manager it is joined at the end of the block, unless it was already joined or
    cancelled, and closed.
    """

    @overload
    def __getitem__(self, key: int) -> S: ...
    @overload
    def __getitem__(self, key: slice) -> list[S]: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> S | list[S] | list[Any]:
        """A branch by its index, or the values of a variable in all of them, in order."""
        if isinstance(key, str):
            return [state[key] for state in self._states]
        return self._states[key]

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Wait for the branches, and bring what they found into the state they came from. They stay readable.

        Each variable that a branch has set and that the state does not have is set there. The mode says to what:

        - `gather_variable`: a list of one value a branch, in order, None for a branch that has not set it.
        - `append`: the same, and all that the branches said since the fork is appended, in order.
          SGLang's name for it, `concate_and_append`, means the same.
        - `first`: what the first branch to finish has, whose text is appended as well; the others are stopped.
        - `vote`: the value that most branches have; of equally many, that of the first branch.

        Raises:
            The failure of the first branch (by index) that failed, after waiting for the others; with `first`,
            only if all failed.
        """
        checked = checked_mode(mode)
        if checked == "first":
            self._go_on_as(self.first())
            return
        reached = self._reach()
        with self._cancelled_by_interrupt():
            for _ in blocking(in_order_of_settling(reached)):
                pass
        if (error := first_failure(reached)) is not None:
            raise error
        self._bring_together(checked)

    def first(self) -> S:
        """Wait for the first branch that finishes without a failure, stop the others, and give it back.

        Raises:
            The failure of the first branch (by index), if all have failed.
        """
        reached = self._reach()
        with self._cancelled_by_interrupt():
            for index in blocking(in_order_of_settling(reached)):
                if reached[index].failure is None:
                    return self._won_by(index)
        error = first_failure(reached)
        assert error is not None, "no branch has finished, and none has failed"
        raise error

    def __enter__(self) -> Branches[S]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None and self._left_to_join:
                self.join()
        finally:
            self.close()

    @contextmanager
    def _cancelled_by_interrupt(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.cancel()
            raise

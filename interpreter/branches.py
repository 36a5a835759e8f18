"""What `s.fork(n)` gives: several states that went on from one, in order, whatever becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, overload

from branchwise.lang import Expr, LangError, OptionError
from branchwise.lang.checks import shown

from .executor import Executor
from .outcome import Outcome
from .transcript import Transcript


class Branching(Protocol):
    """What a group needs of a state."""

    _executor: Executor
    _transcript: Transcript

    def __getitem__(self, name: str) -> Any: ...
    def _write(self, expr: Expr | str) -> None: ...
    def sync(self) -> None: ...


S = TypeVar("S", bound=Branching)


class Branches(Generic[S]):
    """A fixed number of branches; index and order never change, also when some fail.

    As a context manager it is joined at the end of the block, unless it was already joined or
    cancelled, and closed.
    """

    def __init__(self, parent: S, states: Sequence[S]) -> None:
        self._parent = parent
        self._states = list(states)
        self._left_to_join = True

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[S]:
        return iter(self._states)

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

    def __setitem__(self, index: int, state: S) -> None:
        """What Python does at the end of `branches[0] += ...`; a branch cannot be replaced by another."""
        if state is not self._states[index]:
            raise LangError("a branch cannot be replaced. Write branches[0] += ..., which appends to it.")

    def __iadd__(self, expr: Expr | str | Callable[[int], Expr | str]) -> Branches[S]:
        """Append to every branch the same, or what a function of its index gives."""
        for index, state in enumerate(self._states):
            state._write(expr if isinstance(expr, (str, Expr)) or not callable(expr) else expr(index))
        return self

    def __add__(self, other: Expr | str | Callable[[int], Expr | str]) -> Branches[S]:
        raise LangError("branches are not a value to add to. Write branches += ..., which appends to each of them.")

    __radd__ = __add__

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all branches, and gather what they found into the state they came from.

        Each variable that a branch has set and that the state does not have becomes a list there: one
        value a branch, in order, None for a branch that has not set it. The branches stay readable.
        That is all that `mode` can say; SGLang's programs may say it.

        Raises:
            The failure of the first branch (by index) that failed, after waiting for the others.
        """
        if mode != "gather_variable":
            raise OptionError(
                f'join(): the mode must be "gather_variable", got {shown(mode)}. To append what the branches wrote, '
                's += "".join(branches["x"]).'
            )
        self._left_to_join = False
        errors = [self._wait(state) for state in self._states]
        for index, error in enumerate(errors):
            if error is not None:
                error.add_note(f"It was raised by branch {index} of {len(self)}.")
                raise error
        self._gather()

    def cancel(self) -> None:
        """Stop what is queued or running in all branches. Does not wait."""
        self._left_to_join = False
        for state in self._states:
            state._executor.cancel("cancel() was called")

    def close(self) -> None:
        """Stop all branches and give back what they hold; what is done stays readable. Does not wait."""
        self._left_to_join = False
        for state in self._states:
            state._executor.stop("the branches were closed")

    def __enter__(self) -> Branches[S]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None and self._left_to_join:
                self.join()
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"<{len(self)} branches of {self._parent!r}>"

    def _wait(self, state: S) -> Exception | None:
        try:
            state.sync()
        except KeyboardInterrupt:
            self.cancel()
            raise
        except Exception as error:
            return error
        return None

    def _gather(self) -> None:
        has = set(self._parent._transcript.names())
        branches = [state._transcript for state in self._states]
        new = dict.fromkeys(name for branch in branches for name in branch.names() if name not in has)
        for name in new:
            values = [branch.find(name).value() if name in branch.names() else None for branch in branches]
            self._parent._transcript.set(name, Outcome.of(values))

"""Several states that went on from one: what `Branches` and `AsyncBranches` have in common, for none of it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Literal, Never, Protocol, Self, TypeVar, get_args

from branchwise.lang import Expr, LangError, OptionError
from branchwise.lang.checks import nearest, shown

from .executor import Executor
from .outcome import Outcome
from .transcript import Transcript
from .voting import vote

JoinMode = Literal["gather_variable", "append", "concate_and_append", "first", "vote"]
MODES: tuple[JoinMode, ...] = get_args(JoinMode)


class Branching(Protocol):
    """What a group needs of a state."""

    _executor: Executor
    _transcript: Transcript

    def _write(self, expr: Expr | str) -> None: ...


S = TypeVar("S", bound=Branching)


class Group(Generic[S]):
    """A fixed number of branches; index and order never change, also when some fail."""

    def __init__(self, parent: S, states: Sequence[S]) -> None:
        self._parent = parent
        self._states = list(states)
        self._left_to_join = True

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[S]:
        return iter(self._states)

    def __setitem__(self, index: int, state: S) -> None:
        """What Python does at the end of `branches[0] += ...`; a branch cannot be replaced by another."""
        if state is not self._states[index]:
            raise LangError("a branch cannot be replaced. Write branches[0] += ..., which appends to it.")

    def __iadd__(self, expr: Expr | str | Callable[[int], Expr | str]) -> Self:
        """Append to every branch the same, or what a function of its index gives."""
        for index, state in enumerate(self._states):
            state._write(expr if isinstance(expr, (str, Expr)) or not callable(expr) else expr(index))
        return self

    def __add__(self, other: Expr | str | Callable[[int], Expr | str]) -> Never:
        raise LangError("branches are not a value to add to. Write branches += ..., which appends to each of them.")

    __radd__ = __add__

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

    def __repr__(self) -> str:
        return f"<{len(self)} branches of {self._parent!r}>"

    def _reach(self) -> list[Outcome]:
        """For each branch, what is settled once all that it was told is done."""
        self._left_to_join = False
        for state in self._states:
            state._transcript.check_blocks()
        return [state._executor.reach() for state in self._states]

    def _won_by(self, winner: int) -> S:
        """Give back what the others hold."""
        for index, state in enumerate(self._states):
            if index != winner:
                state._executor.stop(f"branch {winner} was the first to finish")
        return self._states[winner]

    def _bring_together(self, mode: JoinMode) -> None:
        """What `join` does once all branches are done."""
        new = self._new_variables()
        for name, values in new.items():
            found = vote(value for value, is_set in values if is_set) if mode == "vote" else [v for v, _ in values]
            self._parent._transcript.set(name, Outcome.of(found))
        if mode in ("append", "concate_and_append"):
            for state in self._states:
                self._append(state)

    def _go_on_as(self, winner: S) -> None:
        """The parent gets what one branch said and found."""
        self._append(winner)
        for name in self._new_names():
            if name in winner._transcript.names():
                self._parent._transcript.set(name, winner._transcript.find(name))

    def _append(self, state: S) -> None:
        self._parent._executor.add(self._parent._transcript.say_again(state._transcript))

    def _new_names(self) -> list[str]:
        has = set(self._parent._transcript.names())
        every = (name for state in self._states for name in state._transcript.names())
        return [name for name in dict.fromkeys(every) if name not in has]

    def _new_variables(self) -> dict[str, list[tuple[Any, bool]]]:
        """For each variable that the parent does not have, its value in each branch and whether it is set there."""
        branches = [state._transcript for state in self._states]
        return {
            name: [(b.find(name).value(), True) if name in b.names() else (None, False) for b in branches]
            for name in self._new_names()
        }


def first_failure(outcomes: Sequence[Outcome]) -> BaseException | None:
    """The failure of the first branch, by index, that has one; all are settled."""
    for index, outcome in enumerate(outcomes):
        if outcome.failure is not None:
            error = outcome.failure.exception()
            error.add_note(f"It was raised by branch {index} of {len(outcomes)}.")
            return error
    return None


def checked_mode(mode: object) -> JoinMode:
    """One of the modes of `join`."""
    for known in MODES:
        if mode == known:
            return known
    hint = nearest(mode, MODES) if isinstance(mode, str) else f"Known: {', '.join(MODES)}."
    raise OptionError(f"join(): there is no mode {shown(mode)}. {hint}")

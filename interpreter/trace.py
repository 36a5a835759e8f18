"""Running a program without a model: its calls are written down, and their values are symbols."""

from __future__ import annotations

import traceback
from collections.abc import Coroutine, Sequence
from typing import Any, Never, assert_never, cast

from branchwise.lang import Call, Gen, LangError, Program, RoleBegin, RoleEnd, Select, Text, Tools
from branchwise.lang.symbol import Origin, Symbol, TraceEnds, Unknown
from branchwise.lang.trace import Ended, Forked, Said, Step, Trace

from .async_state import AsyncState
from .errors import UnknownVariable
from .executor import Executor, Fork, Reached, Task
from .session import Completion
from .state import State
from .transcript import Ask, Quote, Transcript
from .writing import Defaults, line_of_the_program


def trace(program: Program[State], call: Call, defaults: Defaults) -> Trace:
    """What the program says, up to its end or to where only the model's text can decide.

    Raises:
        LangError, UnknownVariable: the program is wrong, whatever the model says.
        Whatever else the function raises before its first call of the model.
    """
    tape: list[Step] = []
    ended = None
    try:
        if program.is_async:
            _drive(program.invoke(AsyncState(Recorder(tape), Transcript(), defaults), call))
        else:
            state = State(Recorder(tape), Transcript(), defaults)
            program.invoke(state, call)
            state.sync()
    except TraceEnds as end:
        ended = Ended(str(end), _line(end, program))
    except (LangError, UnknownVariable):
        raise
    except Exception as error:
        if not any(isinstance(step.said, Gen | Select) for step in tape):
            raise
        ended = Ended(_why(error), _line(error, program))
    return Trace(program.name, tuple(tape), ended)


def _drive(program: Coroutine[Any, Any, Any]) -> None:
    """Run an async program to its end, without an event loop: all that it awaits of its state is there at once."""
    try:
        program.send(None)
    except StopIteration:
        return
    program.close()
    raise TraceEnds("the program awaited something else than its state")


class Recorder(Executor):
    """Does nothing at once: what is asked is on the tape, and answered by a symbol."""

    def __init__(self, tape: list[Step], branch: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._tape = tape
        self._branch = branch
        self._num_forks = 0

    def add(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._record(task)

    def fork(self, count: int, keep_alive: object) -> list[Executor]:
        first = self._num_forks
        self._num_forks += count
        self._say(Forked(count), line_of_the_program())
        return [Recorder(self._tape, (*self._branch, number)) for number in range(first, first + count)]

    def _record(self, task: Task) -> None:
        match task:
            case Text() | RoleBegin() | RoleEnd() | Tools():
                self._say(task, line_of_the_program())
            case Ask(op, outcome, written_at):
                origins = self._origins(op)
                self._say(op, written_at)
                symbols = [Symbol(origin) for origin in origins]
                outcome.become(symbols if len(symbols) > 1 else symbols[0], cast(Completion, _Untold(op)))
            case Quote(source, outcome):
                value = source.value()
                first = value[0] if isinstance(value, list) and value else value
                said = Unknown(first.origin) if type(first) is Symbol else Text(source.text(), control=False)
                self._say(said, line_of_the_program())
                outcome.become(value)
            case Reached(outcome):
                outcome.succeed(None, "")
            case Fork():
                raise AssertionError("a recorder forks by itself")
            case _:
                assert_never(task)

    def _origins(self, op: Gen | Select) -> list[Origin]:
        count = (op.options.n or 1) if isinstance(op, Gen) else 1
        return [Origin(op, len(self._tape), sample) for sample in range(count)]

    def _say(self, said: Said, written_at: str) -> None:
        self._tape.append(Step(self._branch, said, written_at))


class _Untold:
    """What the backend would say about a call."""

    def __init__(self, op: Gen | Select) -> None:
        self._op = op

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceEnds(f"{name} of what s.meta(...) tells of {self._op.call} was read")


def _why(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, TypeError) and Symbol.__name__ in str(error):  # Python's own functions take text alone
        return f"the value of a call was given to what needs its text ({said})"
    return said


def _line(error: BaseException, program: Program[Any]) -> str:
    """The innermost line of the program's own file that led to `error`; else the innermost that is not ours."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    theirs = [frame for frame in frames if not frame.f_globals.get("__name__", "").startswith("branchwise.")]
    own = [frame for frame in theirs if frame.f_globals.get("__name__") == program.__module__]
    last = next(reversed(own or theirs or frames))
    lines = {id(frame): line for frame, line in traceback.walk_tb(error.__traceback__)}
    return f"{last.f_code.co_filename}:{lines[id(last)]}"

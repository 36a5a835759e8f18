"""Running programs: one, many, or one on a thread of its own. Only the users' own functions need threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, cast, overload

from branchwise.lang import Call, CallError, GenOptions, LangError, OptionError, Program, make_program
from branchwise.lang.checks import shown

from .batch import Batch, Helpers
from .errors import NoBackend
from .executor import Executor
from .outcome import Failure
from .progress import Progress
from .running import Running
from .session import Backend
from .state import Defaults, State
from .transcript import Transcript

DROPPED = "its state was dropped"


class Interpreter:
    """Runs programs on the backend that the call names, else on the default one."""

    def __init__(self) -> None:
        self.default_backend: Backend | None = None
        self._running = Running()
        self._helpers = Helpers()

    def run(self, program: Program[State], call: Call) -> State:
        """On this thread. What the function raises goes through unchanged, after its work is cancelled."""
        backend = self._backend(program, call)
        executor, transcript = Executor(backend.open_session()), Transcript()
        state = State(executor, transcript, _defaults(program, call, backend), on_drop=executor.drop)
        with self._running.here(lambda: executor.stop("the batch was interrupted")):
            try:
                returned = program.invoke(state, call)
                state.sync()
            except BaseException as error:
                executor.stop(_raised(program, error))
                raise
        transcript.end(returned)
        return state

    def stream(self, program: Program[State], call: Call) -> State:
        """On a thread of its own, which ends early when nobody holds the state that is given back."""
        backend = self._backend(program, call)
        streamed = _Streamed(program, call, _defaults(program, call, backend), Executor(backend.open_session()))
        state = streamed.state()
        Thread(target=streamed.run, name=f"branchwise-{program.name}", daemon=True).start()
        return state

    def run_batch(
        self, program: Program[State], calls: Sequence[Call], *, threads: int | None, progress: bool, keep_errors: bool
    ) -> list[State | Exception]:
        """On this thread and helping ones; the first failure, by index, is raised when all have finished."""
        if not calls:
            return []
        jobs = [_job(self, program, call) for call in calls]
        helpers = self._helpers.take(len(jobs), threads)
        try:
            results = Batch(jobs, self._running, Progress(len(jobs), shown=progress)).run(helpers)
        finally:
            self._helpers.give_back(helpers, threads)
        if not keep_errors:
            _raise_first(results)
        return results

    def enter(self, program: Program[State], state: object, call: Call) -> Any:
        """Go on in the state of the program that calls this one."""
        if not isinstance(state, State):
            raise CallError(
                f"{program.name}(): the first argument must be the state of the program that calls it, "
                f"got {shown(state)}. To run it on its own, write {program.name}.run(...)."
            )
        return program.invoke(state._within(program.defaults), call)

    def _backend(self, program: Program[State], call: Call) -> Backend:
        backend = self.default_backend if call.backend is None else call.backend
        if backend is None:
            raise NoBackend(
                f"{program.name}: there is no backend to run on. "
                'Call set_default_backend(Engine("smollm2-135m")) once, or run it with backend=...'
            )
        return checked_backend(backend, program.name)


class _Streamed:
    """A program on a thread of its own. Holds nothing that its reader drops to end it."""

    def __init__(self, program: Program[State], call: Call, defaults: Defaults, executor: Executor) -> None:
        self._program = program
        self._call = call
        self._defaults = defaults
        self._executor = executor
        self._transcript: Transcript | None = Transcript()

    def state(self) -> State:
        """The state of the reader."""
        assert self._transcript is not None, "the program has ended"
        return State(self._executor, self._transcript, self._defaults, on_drop=self._abandon, outside=True)

    def run(self) -> None:
        transcript = self._transcript
        assert transcript is not None, "a program runs once"
        try:
            state = State(self._executor, transcript, self._defaults)
            returned = self._program.invoke(state, self._call)
            state.sync()
        except BaseException as error:  # the reader raises it
            transcript.end_with(Failure(error))  # first: who is woken by the stop finds the reason there
            self._executor.stop(_raised(self._program, error))
        else:
            transcript.end(returned)
        # The error's frames may hold the reader's state, and finalisers hold this: it must not hold the error.
        self._transcript = None

    def _abandon(self) -> None:
        if self._transcript is None:
            self._executor.drop()
        else:
            self._executor.stop(DROPPED)


def _raised(program: Program[State], error: BaseException) -> str:
    """Why the work of a program that raised is stopped; a text, for the error would keep the state alive."""
    return f"{program.name} raised {type(error).__name__}" + (f": {error}" if str(error) else "")


def _raise_first(results: Sequence[State | Exception]) -> None:
    for index, result in enumerate(results):
        if isinstance(result, Exception):
            result.add_note(f"It was raised by item {index} of the batch.")
            raise result


def _job(interpreter: Interpreter, program: Program[State], call: Call) -> Callable[[], State]:
    return lambda: interpreter.run(program, call)


def _defaults(program: Program[State], call: Call, backend: Backend) -> Defaults:
    return Defaults(run=call.options, function=program.defaults, backend=backend.defaults)


def checked_backend(backend: object, where: str) -> Backend:
    """`backend`, if it looks like one."""
    if not callable(getattr(backend, "open_session", None)) or not isinstance(
        getattr(backend, "defaults", None), GenOptions
    ):
        raise OptionError(f"{where}: the backend must be an Engine or another Backend, got {shown(backend)}.")
    return cast(Backend, backend)


_INTERPRETER = Interpreter()


def set_default_backend(backend: Backend | None) -> None:
    """Where programs run that are not told where; None: nowhere."""
    _INTERPRETER.default_backend = None if backend is None else checked_backend(backend, "set_default_backend()")


@overload
def function(fn: Callable[..., Any]) -> Program[State]: ...
@overload
def function(**defaults: Any) -> Callable[[Callable[..., Any]], Program[State]]: ...
def function(
    fn: Callable[..., Any] | None = None, *positional: Any, **defaults: Any
) -> Program[State] | Callable[[Callable[..., Any]], Program[State]]:
    """Make a program of a function that takes a state first.

    `@function`, or `@function(max_tokens=64, temperature=0)` with defaults for all its calls.
    """
    if positional:
        raise LangError("@function takes one function. Its options are given by name.")
    if fn is None:
        return lambda decorated: make_program(decorated, _INTERPRETER, defaults)
    return make_program(fn, _INTERPRETER, defaults)

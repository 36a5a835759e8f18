"""One run of a program: on this thread, on the event loop that awaits it, or apart from who reads its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from branchwise.lang import Call, Program

from .async_state import AsyncState
from .executor import Executor
from .outcome import Failure
from .running import Running
from .session import Backend
from .state import State
from .transcript import Transcript
from .writing import Defaults

DROPPED = "its state was dropped"


def run_here(program: Program[State], call: Call, backend: Backend, running: Running) -> State:
    """On this thread. What the function raises goes through unchanged, after its work is cancelled."""
    executor, transcript = Executor(backend.open_session()), Transcript()
    state = State(executor, transcript, defaults_of(program, call, backend), on_drop=executor.drop)
    with running.here(lambda: executor.stop("the batch was interrupted")):
        try:
            returned = program.invoke(state, call)
            state.sync()
        except BaseException as error:
            executor.stop(_raised(program, error))
            raise
    transcript.end(returned)
    return state


async def run_on_loop(program: Program[State], call: Call, backend: Backend) -> State:
    """An async program, on the running event loop. To cancel the task that awaits it is to cancel its work."""
    executor, transcript = Executor(backend.open_session()), Transcript()
    state = State(executor, transcript, defaults_of(program, call, backend), on_drop=executor.drop)
    try:
        transcript.end(await _invoked(program, call, AsyncState(executor, transcript, state._defaults, view_of=state)))
    except BaseException as error:
        executor.stop(_raised(program, error))
        raise
    return state


class Streamed:
    """A run whose state is read elsewhere. Holds nothing that its reader drops to end it."""

    def __init__(self, program: Program[State], call: Call, backend: Backend) -> None:
        self.executor = Executor(backend.open_session())
        self._program = program
        self._call = call
        self._defaults = defaults_of(program, call, backend)
        self._transcript: Transcript | None = Transcript()

    def state(self, written_on: Thread | None = None) -> State:
        """The state of the reader; `written_on` is the thread that must not wait for it."""
        assert self._transcript is not None, "the program has ended"
        return State(
            self.executor, self._transcript, self._defaults, on_drop=self._abandon, outside=True, written_on=written_on
        )

    def run(self) -> None:
        """On this thread."""
        with self._told() as transcript:
            state = State(self.executor, transcript, self._defaults)
            returned = self._program.invoke(state, self._call)
            state.sync()
            transcript.end(returned)

    async def run_on_loop(self) -> None:
        """An async program, on the running event loop."""
        with self._told() as transcript:
            state = AsyncState(self.executor, transcript, self._defaults)
            transcript.end(await _invoked(self._program, self._call, state))

    @contextmanager
    def _told(self) -> Iterator[Transcript]:
        """What is raised inside is raised where the state is read."""
        transcript = self._transcript
        assert transcript is not None, "a program runs once"
        try:
            yield transcript
        except BaseException as error:
            transcript.end_with(Failure(error))  # first: who is woken by the stop finds the reason there
            self.executor.stop(_raised(self._program, error))
        # The error's frames may hold the reader's state, and finalisers hold this: it must not hold the error.
        self._transcript = None

    def _abandon(self) -> None:
        if self._transcript is None:
            self.executor.drop()
        else:
            self.executor.stop(DROPPED)


async def _invoked(program: Program[State], call: Call, state: AsyncState) -> object:
    """What the function returns, once everything that it said is done."""
    try:
        returned: object = await program.invoke(state, call)
    except TypeError as error:
        if "'await' expression" in str(error):
            error.add_note(
                "In an async program s[...], s.text(), s.sync(), branches.join() and programs it calls are awaited; "
                "what is read from a state that has been run, as arun(...) gives it, is there without."
            )
        raise
    state.check_awaited()
    await state.sync()
    return returned


def _raised(program: Program[State], error: BaseException) -> str:
    """Why the work of a program that raised is stopped; a text, for the error would keep the state alive."""
    return f"{program.name} raised {type(error).__name__}" + (f": {error}" if str(error) else "")


def defaults_of(program: Program[State], call: Call, backend: Backend) -> Defaults:
    """What the calls of this run are filled from."""
    return Defaults(run=call.options, function=program.defaults, backend=backend.defaults)

"""Running programs: one, many, or one that is read while it runs. Only users' functions that wait need threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Thread, get_ident
from typing import Any, cast, overload

from branchwise.lang import Call, CallError, GenOptions, LangError, OptionError, Plan, Program, Trace, make_program
from branchwise.lang.checks import shown
from branchwise.lang.symbol import TraceEnds

from .async_state import AsyncState
from .batch import HELPERS, Batch, Crew, InOrder, all_results
from .errors import NoBackend
from .progress import progress_of
from .running import RUNNING
from .session import Backend, Checking, Planner
from .shared_prefix import SharedPrefix
from .single import Streamed, run_here, run_on_loop
from .state import State
from .trace import trace
from .writing import Defaults


class Interpreter:
    """Runs programs on the backend that the call names, else on the default one."""

    def __init__(self) -> None:
        self.default_backend: Backend | None = None
        self._tracing: set[int] = set()  # threads on which a program is traced: nothing can run there

    def run(self, program: Program[State], call: Call) -> State:
        """On this thread; an async program on an event loop of its own."""
        backend = self._backend(program, call)
        if not program.is_async:
            return run_here(program, call, backend, RUNNING)
        from .loops import run_to_end

        return run_to_end(lambda: run_on_loop(program, call, backend), RUNNING)

    async def arun(self, program: Program[State], call: Call) -> State:
        """On the running event loop; a program that is not async on a thread."""
        backend = self._backend(program, call)
        if program.is_async:
            return await run_on_loop(program, call, backend)
        from .loops import on_thread

        streamed = Streamed(program, call, backend)
        state = streamed.state()
        try:
            await on_thread(streamed.run)
        except BaseException:  # the task that awaits this was cancelled
            streamed.executor.stop("arun() was cancelled")
            raise
        state._await_program()
        return state

    def stream(self, program: Program[State], call: Call) -> State:
        """On a thread of its own, an async program on the event loop of all that are streamed.

        It ends early when nobody holds the state that is given back.
        """
        streamed = Streamed(program, call, self._backend(program, call))
        if program.is_async:
            from .loops import STREAMS

            return STREAMS.start(streamed)
        thread = Thread(target=streamed.run, name=f"branchwise-{program.name}", daemon=True)
        state = streamed.state(thread)
        thread.start()
        return state

    def run_batch(
        self, program: Program[State], calls: Sequence[Call], *, threads: int | None, progress: bool, keep_errors: bool
    ) -> list[State | Exception]:
        """On this thread and helping ones; the first failure, by index, is raised when all have finished."""
        if not calls:
            return []
        prefix = SharedPrefix(self._backend(program, calls[0]), len(calls))
        if program.is_async:
            crew = self._tasks(program, calls, prefix, threads)
        else:
            crew = HELPERS.for_list(self._jobs(program, calls, prefix), threads)
        results = all_results(self._batch(calls, progress), crew.then(prefix.release))
        if not keep_errors:
            for index, result in enumerate(results):
                _raise_error(result, index)
        return results

    def iter_batch(
        self, program: Program[State], calls: Sequence[Call], *, threads: int | None, progress: bool, keep_errors: bool
    ) -> Iterator[State | Exception]:
        """Each result as soon as it and all before it are there; a failure is raised in its place."""
        if not calls:
            return iter(())
        prefix = SharedPrefix(self._backend(program, calls[0]), len(calls))
        if program.is_async:
            crew = self._tasks(program, calls, prefix, threads)
        else:
            crew = HELPERS.for_iterator(self._jobs(program, calls, prefix), threads)
        results = InOrder(self._batch(calls, progress), crew.then(prefix.release))
        return results if keep_errors else _raising(results)

    def enter(self, program: Program[State], state: object, call: Call) -> Any:
        """Go on in the state of the program that calls this one; in an async program that has to be awaited."""
        match state:
            case State() if not program.is_async:
                return program.invoke(state._within(program.defaults), call)
            case State():
                raise CallError(
                    f"{program.name}(): is async, and the program that calls it is not. Make that one async def and "
                    f"write await {program.name}(s, ...); on its own it runs by {program.name}.run(...)."
                )
            case AsyncState():
                return state.called(program.name, lambda inner: _invoked_within(program, inner, call), program.defaults)
            case _:
                raise CallError(
                    f"{program.name}(): the first argument must be the state of the program that calls it, "
                    f"got {shown(state)}. To run it on its own, write {program.name}.run(...)."
                )

    def __reduce__(self) -> str:
        return "_INTERPRETER"  # there is one in each process: programs can be pickled

    def _jobs(self, program: Program[State], calls: Sequence[Call], prefix: SharedPrefix) -> list[Callable[[], State]]:
        def job(call: Call) -> State:
            prefix.began()
            return prefix.ended(self.run(program, call))

        return [partial(job, call) for call in calls]

    def _tasks(
        self, program: Program[State], calls: Sequence[Call], prefix: SharedPrefix, tasks: int | None
    ) -> Crew[State]:
        from .loops import as_tasks

        async def job(call: Call) -> State:
            prefix.began()
            return prefix.ended(await self.arun(program, call))

        return as_tasks([partial(job, call) for call in calls], tasks)

    def _batch(self, calls: Sequence[Call], shown: bool) -> Batch[State]:
        return Batch(len(calls), RUNNING, progress_of(len(calls), shown=shown))

    def trace(self, program: Program[State], call: Call) -> Trace:
        """On this thread. The defaults and the limits of the backend count where there is one."""
        backend = self.default_backend if call.backend is None else call.backend
        known = GenOptions() if backend is None else checked_backend(backend, program.name).defaults
        self._check_not_tracing(program)
        self._tracing.add(get_ident())
        try:
            traced = trace(program, call, Defaults(run=call.options, function=program.defaults, backend=known))
        finally:
            self._tracing.discard(get_ident())
        if isinstance(backend, Checking):
            backend.check_trace(traced)
        return traced

    def explain(self, program: Program[State], calls: Sequence[Call]) -> Plan:
        """On this thread. All calls are on the backend of the first."""
        backend = self._backend(program, calls[0])
        if not isinstance(backend, Planner):
            raise OptionError(
                f"{program.name}: explain() counts tokens, which {shown(backend)} does not know. Write .trace(), which "
                "needs no backend, or name an Engine: backend=..."
            )
        return backend.plan([self.trace(program, call) for call in calls])

    def _check_not_tracing(self, program: Program[State]) -> None:
        if get_ident() in self._tracing:
            raise TraceEnds(f"{program.name} is run by the program that is traced")

    def _backend(self, program: Program[State], call: Call) -> Backend:
        self._check_not_tracing(program)
        backend = self.default_backend if call.backend is None else call.backend
        if backend is None:
            raise NoBackend(
                f"{program.name}: there is no backend to run on. "
                'Call set_default_backend(Engine("smollm2-135m")) once, or run it with backend=...'
            )
        return checked_backend(backend, program.name)


async def _invoked_within(program: Program[State], state: AsyncState, call: Call) -> Any:
    """What the function returns; one that is not async may wait, so it runs on a thread."""
    if program.is_async:
        return await program.invoke(state, call)
    from .loops import on_thread

    return await on_thread(program.invoke, state.blocking(), call)


def _raise_error(result: State | Exception, index: int) -> None:
    if isinstance(result, Exception):
        result.add_note(f"It was raised by item {index} of the batch.")
        raise result


def _raising(results: Iterator[State | Exception]) -> Iterator[State | Exception]:
    for index, result in enumerate(results):
        _raise_error(result, index)
        yield result


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

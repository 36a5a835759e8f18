"""`@function`: a Python function that writes into a state becomes a program that can be run.

A program knows its signature, its bound arguments and its defaults. It does not know how it is
run: a `Runner`, given when it is made, does that.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, Literal, Protocol, TypeVar, overload

from .checks import nearest, shown, whole_number
from .errors import CallError, LangError
from .options import DEFAULT_NAMES, GenOptions, checked_options
from .plan import Plan
from .trace import Trace

S = TypeVar("S")  # the state a runner hands to functions and gives back


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One run of a program, checked: arguments for its function, defaults of the run, and where to run it."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]
    options: GenOptions
    backend: object = None  # None: the default one


class Runner(Protocol[S]):
    """Whatever runs programs."""

    def run(self, program: Program[S], call: Call) -> S:
        """Run to the end, and raise what went wrong."""

    def arun(self, program: Program[S], call: Call) -> Coroutine[Any, Any, S]:
        """Run to the end on the event loop that awaits it; a function that is not async on a thread."""

    def stream(self, program: Program[S], call: Call) -> S:
        """Start elsewhere and return at once."""

    def run_batch(
        self, program: Program[S], calls: Sequence[Call], *, threads: int | None, progress: bool, keep_errors: bool
    ) -> list[S | Exception]:
        """Run all, several at a time; results in the order of `calls`."""

    def iter_batch(
        self, program: Program[S], calls: Sequence[Call], *, threads: int | None, progress: bool, keep_errors: bool
    ) -> Iterator[S | Exception]:
        """Likewise, each result as soon as it and all before it are there."""

    def enter(self, program: Program[S], state: object, call: Call) -> Any:
        """Run the function on `state`, which another program holds, and return what it returns."""

    def trace(self, program: Program[S], call: Call) -> Trace:
        """Run it without a model, as far as that goes."""

    def explain(self, program: Program[S], calls: Sequence[Call]) -> Plan:
        """Trace each, and have the backend count what they would ask of it together."""


class Program(Generic[S]):
    """A function that takes a state first. Its other parameters are the program's.

    Names of options given to a run (`temperature`, `max_tokens`, ..., `backend`, `stream`) are defaults
    of that run, unless the function has a parameter of that name, which then gets them.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        runner: Runner[S],
        defaults: GenOptions,
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self.defaults = defaults
        self._fn = fn
        self._runner = runner
        self._bound = dict(bound or {})
        self._signature = inspect.signature(fn)

    @property
    def is_async(self) -> bool:
        """Whether the function is `async def`; its state is then an `AsyncState`."""
        return inspect.iscoroutinefunction(self._fn)

    def run(self, *args: Any, **kwargs: Any) -> S:
        """Run it here and now. The state comes back when everything in it is done.

        Args:
            args, kwargs: the function's own arguments, and among `kwargs` defaults of the run:
                `max_tokens`, `stop`, `temperature`, `seed` and the other options of `gen` that say how;
                `backend`: where to run instead of the default backend;
                `stream`: True starts the function and returns the state at once, to be read while it grows.

        Raises:
            Whatever the function raises, unchanged, and the first failure of an operation.
        """
        stream = self._take("stream", kwargs, False)
        call = self._call(f"{self.name}.run()", args, kwargs)
        return self._runner.stream(self, call) if stream else self._runner.run(self, call)

    async def arun(self, *args: Any, **kwargs: Any) -> S:
        """`await` a run: what else is on the event loop goes on. A function that is not async runs on a thread.

        Cancelling who awaits it cancels the program.

        Args:
            args, kwargs: as in `run`, without `stream`.
        """
        return await self._runner.arun(self, self._call(f"{self.name}.arun()", args, kwargs))

    def stream(self, *args: Any, **kwargs: Any) -> S:
        """Like `run` with `stream=True`."""
        return self._runner.stream(self, self._call(f"{self.name}.stream()", args, kwargs))

    @overload
    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        return_exceptions: bool = False,
        generator_style: Literal[False] = False,
        backend: object = None,
        **defaults: Any,
    ) -> list[Any]: ...
    @overload
    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        return_exceptions: bool = False,
        generator_style: bool,
        backend: object = None,
        **defaults: Any,
    ) -> Iterator[Any]: ...
    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        return_exceptions: bool = False,
        generator_style: bool = False,
        backend: object = None,
        **defaults: Any,
    ) -> list[Any] | Iterator[Any]:
        """Run it once for each set of keyword arguments; the states come back in that order.

        Args:
            num_threads: how many functions run at a time.
            progress_bar: draw one, by tqdm.
            return_exceptions: put an exception in the place of its state; without it the first one is
                raised when all the others have finished.
            generator_style: give an iterator, which gives each state as soon as it and those before it are done. It
                begins when it is first asked, raises an exception in the place of its state, and stops what is left
                when it is left.
            defaults: options for all of them, as in `run`.
        """
        where = f"{self.name}.run_batch()"
        options = self._defaults_of_run(where, defaults)
        calls = [self._batched(f"{where}: item {i}", item, options, backend) for i, item in enumerate(batch)]
        threads = None if num_threads == "auto" else whole_number(num_threads, f"{where}: num_threads", least=1)
        run = self._runner.iter_batch if generator_style else self._runner.run_batch
        return run(self, calls, threads=threads, progress=progress_bar, keep_errors=return_exceptions)

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """Run the function here without a model, and give back what it says: `print` shows it, no backend is needed.

        Generated values are symbols: they can be kept, returned, and appended with `+`. Where the function needs to
        know one (compares, formats, counts it, ...) the trace ends, and says where. What else the function does, it
        does: what it prints is printed, a tool that it calls is called. Nothing is traced unless it is asked for.

        Args:
            args, kwargs: as in `run`.

        Raises:
            What the program gets wrong before its first token: an unknown variable, a bad option or constraint.
        """
        return self._runner.trace(self, self._call(f"{self.name}.trace()", args, kwargs))

    def explain(self, *args: Any, **kwargs: Any) -> Plan:
        """Trace it, and count on its backend what the run will cost: `print` shows calls, constants and totals.

        No model is called. Constants are encoded and constraints compiled, which a run on the same backend then finds.

        Args:
            args, kwargs: as in `run`.

        Raises:
            As `trace`; and ConstraintError for what the model's vocabulary cannot do, or what is too large.
        """
        return self._runner.explain(self, [self._call(f"{self.name}.explain()", args, kwargs)])

    def explain_batch(
        self, batch: Sequence[Mapping[str, Any]], *, backend: object = None, **defaults: Any
    ) -> Plan:
        """Like `explain`, for all runs of a batch together: what they share is counted once."""
        where = f"{self.name}.explain_batch()"
        options = self._defaults_of_run(where, defaults)
        calls = [self._batched(f"{where}: item {i}", item, options, backend) for i, item in enumerate(batch)]
        if not calls:
            raise CallError(f"{where}: the batch is empty. Give it at least one dict of arguments.")
        return self._runner.explain(self, calls)

    def bind(self, **kwargs: Any) -> Program[S]:
        """The same program with some of its arguments given; a run may still replace them."""
        where = f"{self.name}.bind()"
        self._check(where, self._signature.bind_partial, (None,), kwargs)
        return Program(self._fn, self._runner, self.defaults, {**self._bound, **kwargs})

    def invoke(self, state: object, call: Call) -> Any:
        """Run the function itself, or make its coroutine; for runners."""
        return self._fn(state, *call.args, **call.kwargs)

    def __call__(self, state: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        """Inside another program: go on in its `state`, and return what the function returns.

        In an `async def` program it is awaited: `await ask(s, ...)`.
        """
        call = Call(args=args, kwargs=self._arguments(f"{self.name}()", args, kwargs), options=GenOptions())
        return self._runner.enter(self, state, call)

    def __get__(self, instance: object, owner: type | None = None) -> Program[S]:
        """As a method: the function's first parameter is then the instance, its second the state."""
        if instance is None:
            return self
        return Program(self._fn.__get__(instance, owner), self._runner, self.defaults, self._bound)

    def __reduce__(self) -> tuple[Any, ...]:
        """By name where that is this program's, as Python does with functions; else whatever its function can do."""
        module, path = getattr(self._fn, "__module__", None), getattr(self._fn, "__qualname__", "")
        if isinstance(named := _named(module, path), Program) and named._fn is self._fn:
            return (_bound, (module, path, self._bound))
        owner = getattr(self._fn, "__self__", None)
        if isinstance(_named(type(owner).__module__, path), Program):  # a method, bound to its instance
            return (_method, (owner, self._fn.__name__, self._bound))
        return (Program, (self._fn, self._runner, self.defaults, self._bound))

    def __repr__(self) -> str:
        return f"<program {self.name}{self._signature}>"

    def _batched(self, where: str, item: object, options: GenOptions, backend: object) -> Call:
        if not isinstance(item, Mapping):
            raise CallError(f"{where} must be a dict of keyword arguments, got {shown(item)}.")
        return Call(kwargs=self._arguments(where, (), dict(item)), options=options, backend=backend)

    def _call(self, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        backend = self._take("backend", kwargs, None)
        given = {name: kwargs.pop(name) for name in DEFAULT_NAMES if name in kwargs and not self._has(name)}
        options = checked_options(where, given)
        return Call(args=args, kwargs=self._arguments(where, args, kwargs), options=options, backend=backend)

    def _defaults_of_run(self, where: str, given: dict[str, Any]) -> GenOptions:
        for name in given:
            if name not in DEFAULT_NAMES:
                raise CallError(f"{where}: there is no option {name}. {nearest(name, DEFAULT_NAMES)}")
        return checked_options(where, given)

    def _arguments(self, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """`kwargs` with the bound ones, checked against the signature together with `args`."""
        taken = list(self._signature.parameters)[1 : 1 + len(args)]
        bound = {name: value for name, value in self._bound.items() if name not in taken}
        merged = {**bound, **kwargs}
        self._check(where, self._signature.bind, (None, *args), merged)
        return merged

    def _check(self, where: str, bind: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            bind(*args, **kwargs)
        except TypeError as error:
            unknown = [str(name) for name in kwargs if not self._has(name)]
            known = [*list(self._signature.parameters)[1:], *DEFAULT_NAMES, "backend", "stream"]
            hint = f" {nearest(unknown[0], known)}" if unknown else ""
            raise CallError(f"{where}: {error}.{hint}") from None

    def _take(self, name: str, kwargs: dict[str, Any], default: Any) -> Any:
        return default if self._has(name) else kwargs.pop(name, default)

    def _has(self, name: str) -> bool:
        return name in self._signature.parameters


def _named(module: str | None, path: str) -> object:
    """What has this name, None where nothing has."""
    try:
        return attrgetter(path)(sys.modules[module or ""])
    except (KeyError, AttributeError):
        return None


def _bound(module: str, path: str, bound: Mapping[str, Any]) -> Program[Any]:
    importlib.import_module(module)
    program: Program[Any] = attrgetter(path)(sys.modules[module])
    return program.bind(**bound) if bound else program


def _method(owner: object, name: str, bound: Mapping[str, Any]) -> Program[Any]:
    program: Program[Any] = getattr(owner, name)
    return program.bind(**bound) if bound else program


def make_program(fn: Callable[..., Any], runner: Runner[S], defaults: Mapping[str, Any]) -> Program[S]:
    """The program of a plain function; for a runner's `function` decorator.

    Raises:
        LangError: `fn` is none, is a generator, or takes no state.
        OptionError: a default has a value it cannot have.
    """
    for name in defaults:
        if name not in DEFAULT_NAMES:
            raise CallError(f"@function: there is no option {name}. {nearest(name, DEFAULT_NAMES)}")
    options = checked_options("@function", defaults)
    if not callable(fn):
        raise LangError(f"@function needs a function, got {shown(fn)}. Options are given by name.")
    _check_function(fn)
    return Program(fn, runner, options)


def _check_function(fn: Callable[..., Any]) -> None:
    name = getattr(fn, "__name__", repr(fn))
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise LangError(f"@function {name}: must be a function without yield. To give text while it grows, stream it.")
    if not inspect.signature(fn).parameters:
        raise LangError(f"@function {name}: takes no parameters. The first one is the state: def {name}(s): ...")

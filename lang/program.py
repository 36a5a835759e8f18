"""`@function`: a Python function that writes into a state becomes a program that can be run.

A program knows its signature, its bound arguments and its defaults. It does not know how it is
run: a `Runner`, given when it is made, does that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from .checks import nearest, shown, whole_number
from .errors import CallError, LangError
from .options import DEFAULT_NAMES, GenOptions, checked_options

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

    def stream(self, program: Program[S], call: Call) -> S:
        """Start on a thread of its own and return at once."""

    def run_batch(
        self, program: Program[S], calls: Sequence[Call], *, threads: int | None, progress: bool, keep_errors: bool
    ) -> list[S | Exception]:
        """Run all, several at a time; results in the order of `calls`."""

    def enter(self, program: Program[S], state: object, call: Call) -> Any:
        """Run the function on `state`, which another program holds, and return what it returns."""


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

    def run(self, *args: Any, **kwargs: Any) -> S:
        """Run it here and now. The state comes back when everything in it is done.

        Args:
            args, kwargs: the function's own arguments, and among `kwargs` defaults of the run:
                `max_tokens`, `stop`, `temperature`, `seed` and the other options of `gen` that say how;
                `backend`: where to run instead of the default backend;
                `stream`: True runs the function on a thread of its own and returns the state at once.

        Raises:
            Whatever the function raises, unchanged, and the first failure of an operation.
        """
        stream = self._take("stream", kwargs, False)
        call = self._call(f"{self.name}.run()", args, kwargs)
        return self._runner.stream(self, call) if stream else self._runner.run(self, call)

    def stream(self, *args: Any, **kwargs: Any) -> S:
        """Like `run` with `stream=True`."""
        return self._runner.stream(self, self._call(f"{self.name}.stream()", args, kwargs))

    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        return_exceptions: bool = False,
        backend: object = None,
        **defaults: Any,
    ) -> list[Any]:
        """Run it once for each set of keyword arguments; the states come back in that order.

        Args:
            num_threads: how many functions run at a time.
            progress_bar: draw one on the terminal.
            return_exceptions: put an exception in the place of its state; without it the first one is
                raised when all the others have finished.
            defaults: options for all of them, as in `run`.
        """
        where = f"{self.name}.run_batch()"
        options = self._defaults_of_run(where, defaults)
        calls = [self._batched(f"{where}: item {i}", item, options, backend) for i, item in enumerate(batch)]
        threads = None if num_threads == "auto" else whole_number(num_threads, f"{where}: num_threads", least=1)
        return self._runner.run_batch(
            self, calls, threads=threads, progress=progress_bar, keep_errors=return_exceptions
        )

    def bind(self, **kwargs: Any) -> Program[S]:
        """The same program with some of its arguments given; a run may still replace them."""
        where = f"{self.name}.bind()"
        self._check(where, self._signature.bind_partial, (None,), kwargs)
        return Program(self._fn, self._runner, self.defaults, {**self._bound, **kwargs})

    def invoke(self, state: S, call: Call) -> Any:
        """Run the function itself; for runners."""
        return self._fn(state, *call.args, **call.kwargs)

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Inside another program: go on in its `state`, and return what the function returns."""
        call = Call(args=args, kwargs=self._arguments(f"{self.name}()", args, kwargs), options=GenOptions())
        return self._runner.enter(self, state, call)

    def __get__(self, instance: object, owner: type | None = None) -> Program[S]:
        """As a method: the function's first parameter is then the instance, its second the state."""
        if instance is None:
            return self
        return Program(self._fn.__get__(instance, owner), self._runner, self.defaults, self._bound)

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


def make_program(fn: Callable[..., Any], runner: Runner[S], defaults: Mapping[str, Any]) -> Program[S]:
    """The program of a plain function; for a runner's `function` decorator.

    Raises:
        LangError: `fn` is none, is `async` or a generator, or takes no state.
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
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise LangError(f"@function {name}: must be a plain function, not async and without yield.")
    if not inspect.signature(fn).parameters:
        raise LangError(f"@function {name}: takes no parameters. The first one is the state: def {name}(s): ...")

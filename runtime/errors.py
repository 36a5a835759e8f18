"""What can go wrong in the runtime, by name.

Each message says where, what happened with its numbers, and what to do next. An error here is the
user's to mend; a broken invariant of ours is an `AssertionError`.
"""

from __future__ import annotations


class EngineError(Exception):
    """The runtime cannot do what it was asked; the base of its errors."""


def as_error(error: BaseException) -> Exception:
    """`error`, as an `Exception`: a panic of compiled code is none by itself, nor is a `SystemExit` in a callback."""
    if isinstance(error, Exception):
        return error
    wrapped = EngineError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


class ModelNotFound(EngineError):
    """A name or path leads to no model that can be loaded."""


class WeightsError(EngineError):
    """The weights of a model are missing, of the wrong shape, or of a kind that cannot be run."""


class EngineClosed(EngineError):
    """The engine was closed; it takes no more requests and fails those it had."""


class OutOfSlots(EngineError):
    """A request needs more slots than there can ever be for it; nothing was allocated."""

    def __init__(
        self,
        *,
        wanted: int,
        free: int,
        evictable: int = 0,
        total: int | None = None,
        who: str = "",
        prompt_alone: bool = False,
    ) -> None:
        """`who` is the request that asks, `total` the size of the pool, as far as they are known.

        `prompt_alone`: no answer, however short, would make the prompt fit.
        """
        remedy = "shorten the prompt" if prompt_alone else "lower max_tokens"
        have = f"{free} are free" + (f" and {evictable} evictable" if evictable else "")
        pool = f" ({total})" if total is not None else ""
        super().__init__(
            f"{who or 'the request'} needs {wanted} slots, {have}. Raise num_slots{pool} or {remedy}."
        )
        self.wanted = wanted
        self.free = free
        self.evictable = evictable


class RequestError(EngineError, ValueError):
    """An argument of a request has a value it cannot have."""


class RequestTooLong(RequestError):
    """A prompt is longer than the model's context or than the pool."""


class ConstraintError(EngineError, ValueError):
    """A constraint cannot be compiled, or this vocabulary cannot spell it."""


class CacheError(EngineError):
    """A saved cache cannot be written or read, or it is another model's; the engine's cache is as it was."""

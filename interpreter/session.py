"""The seam between programs and whatever computes their text.

A backend opens sessions; a session is one append-only conversation. It takes operations of the
language in order, computes nothing until it must, and can be forked at any point for nothing. No
call of a session blocks: what takes time comes back through a `Stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from branchwise.lang import Gen, GenOptions, Plan, RoleBegin, RoleEnd, Select, Text, Tools, Trace

from .origins import Origins

Segment: TypeAlias = Text | RoleBegin | RoleEnd | Tools
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of text that will not be taken back, of sample `sample` of its generation."""

    text: str
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one operation: its prompt, how many of those were found in the cache, what it generated, and how many
    of those were not sampled because a constraint forced them."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since an operation reached its backend: until it began, until its first token, and until its end.

    None where the backend does not say, or there was no token.
    """

    waiting_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token given all before it, as the model says it: before temperature, penalties and
    constraints. `top` are the texts and log-probabilities of the likeliest tokens in its place, likeliest first."""

    token: int | None  # None where the backend does not say
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a `Gen`. With `n > 1` this is the first sample, with which the session goes on.

    `detail` says what ended it: "eos", the stop (text or pattern) in quotes, "constraint" (nothing can follow),
    "max_tokens", "context" (the model can read no more), "slots" (no memory is left), "timeout" or "cancelled"; ""
    where the backend does not say.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage = Usage()
    complete: bool = True  # False: cut off before its constraint was fulfilled
    exact: bool = True  # False: the constraint could not be held in full while it was written; `warnings` say why
    warnings: tuple[str, ...] = ()
    violation: str = ""  # what is wrong with a complete text whose constraint was not exact
    detail: str = ""
    times: Times = Times()
    tokens: tuple[int, ...] = ()  # that were generated; what the text does not show is among them, like a cut off stop
    logprobs: tuple[TokenLogprob, ...] | None = None  # of each of `tokens`, if `return_logprob` asked for them
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # of the prompt's, from `logprob_start_len` on
    samples: tuple[Completion, ...] = ()  # all n of them, this one first; empty when n is 1
    origins: Origins | None = field(default=None, repr=False, compare=False)  # where its tokens came from


@dataclass(frozen=True, slots=True)
class Selection:
    """The result of a `Select`: `choices[index]`, and a score for each choice, the higher the better.

    `warnings` say so where it was not chosen by the rule that was asked for.
    """

    choice: str
    index: int
    scores: tuple[float, ...]
    usage: Usage = Usage()
    warnings: tuple[str, ...] = ()


R_contra = TypeVar("R_contra", contravariant=True)


class Listener(Protocol[R_contra]):
    """Who hears of one operation: deltas in order, then exactly one `on_done` or one `on_failed`.

    Called on a thread of the backend that no computation waits for. Must not block.
    """

    def on_delta(self, delta: Delta) -> None: ...
    def on_done(self, result: R_contra) -> None: ...
    def on_failed(self, error: Exception) -> None: ...


Cancel: TypeAlias = Callable[[], None]
"""Stop an operation soon. Its listener then gets a completion with finish reason "cancelled" (a `Select` fails). Any
thread, any number of times."""


class Session(Protocol):
    """One append-only conversation. Used by one thread at a time, one operation at a time."""

    def append(self, segment: Segment) -> None:
        """Add text, a role boundary or tools; lazy, never blocks."""

    def generate(self, gen: Gen, listener: Listener[Completion]) -> Cancel:
        """Start generating and return at once. Every option of `gen` that has a default is filled."""

    def select(self, select: Select, listener: Listener[Selection]) -> Cancel:
        """Start scoring the choices and return at once; the winner's text becomes part of the session."""

    def prepare(self, gen: Gen) -> None:
        """`gen` will come, here or in a fork: begin what needs no prompt. Any thread, any number of times.

        Raises:
            LangError: the backend cannot do that, whatever the prompt will be.
        """

    def fork(self, count: int) -> Sequence[Session]:
        """`count` sessions that go on from here: O(1) each, nothing sent or computed again."""

    def close(self) -> None:
        """Give back what the session holds. Its parent and its forks stay usable.

        An operation may still be running if the thread that started it was interrupted while it did; it is
        then cancelled.
        """


@runtime_checkable
class Holding(Protocol):
    """A session whose backend can keep its prefix cached."""

    def append(self, segment: Segment) -> None: ...

    def hold(self) -> Callable[[], None]:
        """Keep what was appended in the cache, until what is given back is called, also after `close`. Does not block,
        and is no promise: where there is too little room, nothing is kept."""


class Backend(Protocol):
    """Whatever computes text."""

    @property
    def defaults(self) -> GenOptions:
        """What holds for a generation where neither its call nor the run nor the function says anything."""

    def open_session(self) -> Session:
        """A new, empty conversation."""


@runtime_checkable
class Planner(Protocol):
    """A backend that knows tokens, and so what programs will cost."""

    def plan(self, traces: Sequence[Trace]) -> Plan:
        """What these runs would ask of it, one after the other; no text is computed."""


@runtime_checkable
class Checking(Protocol):
    """A backend that cannot do all that a program can say."""

    def check_trace(self, trace: Trace) -> None:
        """Raise what a run would raise because of that, without asking for anything."""

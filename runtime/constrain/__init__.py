"""Constraints: which tokens may come next, so that a text is one that its specification describes.

A specification is compiled for one vocabulary, off the caller's thread and once, into a constraint
that all sequences share; each holds a small state of its own. Logits and sampling are not known here.

Which engine: choices are a tree of their own (`choices.py`); a regex with a small automaton is compiled whole
(`outlines.py`), so that its masks are looked up; everything else is followed as the text grows (`guidance.py`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias, assert_never

import torch
from llguidance import LLMatcher, LLTokenizer

from ..errors import ConstraintError, EngineClosed, as_error
from .automaton import Forced
from .choices import compile_choices
from .estimate import Budget, OverBudget
from .guidance import GuidanceConstraint, tokenizer_of
from .outlines import build, plan
from .schema import prepare
from .vocab import Vocab

__all__ = [
    "Budget", "Choices", "Compiler", "Constraint", "Forced", "Grammar", "JsonSchema", "Regex", "Spec", "State", "Vocab",
]  # fmt: skip

log = logging.getLogger("branchwise")

MAX_ENTRIES = 4096
LOWEST_PRIORITY = 19

ROUTE = Budget(max_seconds=0.1, max_bytes=32 << 20, max_work=150_000, max_places=2_000)
"""A regex whose automaton costs more than this to make, or to estimate, is followed instead."""

LARGE_CHARACTERS = 50_000
"""A specification with more waits in a line of its own, so that nothing small waits behind it."""

MAX_GRAMMAR_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Regex:
    """Texts that match `pattern` as a whole, in Rust's syntax without anchors."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choices:
    """One of `texts`; their order makes no difference."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that fulfils the schema `text`, members in its order, with `", "` and `": "` between them."""

    text: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """Texts of a context-free grammar in Lark's syntax, as llguidance reads it."""

    lark: str


Spec: TypeAlias = Regex | Choices | JsonSchema | Grammar


class State(Protocol):
    """One sequence's place in a constraint; for one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """The text so far is one of the language: an end token is allowed."""
        ...

    @property
    def is_finished(self) -> bool:
        """Nothing but an end token is allowed: stop without a pass."""
        ...

    def mask(self) -> torch.Tensor:
        """[vocab_size] bool, the ids that `advance` would take; shared between sequences, never to be written to."""
        ...

    def advance(self, token: int) -> bool:
        """Append `token`; False if it is not allowed, and then nothing has changed. An end token ends the text."""
        ...

    def forced_tokens(self) -> Forced:
        """What must follow here; changes nothing."""
        ...

    def closing(self, most: int) -> tuple[int, ...] | None:
        """At most `most` tokens after which the text is complete, few rather than many; None if none were found."""
        ...

    def fork(self) -> State:
        """A second sequence at the same place."""
        ...


class Constraint(Protocol):
    """A compiled specification; immutable as far as anyone can tell, and shared."""

    @property
    def exact(self) -> bool:
        """Every text it lets through is of the specification's language."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the specification is not held, in words."""
        ...

    @property
    def nbytes(self) -> int:
        """About how much memory it holds."""
        ...

    def start(self) -> State: ...

    def violation(self, text: str) -> str:
        """Why a finished text is none of the language after all, where this is not exact; "" if it is."""
        ...


class Compiler:
    """Compiles on two threads of its own; every specification once, as long as its constraint is kept.

    One thread looks at what comes and compiles what is small; the other compiles what is large, in order.
    What was refused is kept, too. Constraints are dropped, least recently asked for first, when together they
    hold more than `max_bytes`; those in use live on, and the newest is always kept.
    """

    def __init__(self, vocab: Vocab, *, budget: Budget | None = None, max_bytes: int = 256 << 20) -> None:
        self.vocab = vocab
        self._budget = budget or ROUTE
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._compiled: OrderedDict[Spec, Future[Constraint]] = OrderedDict()
        self._small = ThreadPoolExecutor(1, "branchwise-compile", _give_way)
        self._large = ThreadPoolExecutor(1, "branchwise-compile-large", _give_way)

    def compile(self, spec: Spec) -> Future[Constraint]:
        """The constraint for `spec`, soon; it cannot be cancelled, as others may wait for it.

        The future raises `ConstraintError` if `spec` cannot be compiled, `EngineClosed` if it no longer will be.
        """
        with self._lock:
            if self._closed:
                raise EngineClosed("the compiler is closed; it takes no more constraints.")
            if spec not in self._compiled:
                future: Future[Constraint] = Future()
                future.set_running_or_notify_cancel()
                self._compiled[spec] = future
                self._small.submit(self._answer, future, lambda: self._begin(spec, future))
            self._compiled.move_to_end(spec)
            return self._compiled[spec]

    def close(self) -> None:
        """Give up what is waiting; a compilation that has begun ends by itself."""
        with self._lock:
            self._closed = True
            self._small.shutdown(wait=False, cancel_futures=True)
            self._large.shutdown(wait=False, cancel_futures=True)
            futures = list(self._compiled.values())
            self._compiled.clear()
        for future in futures:
            _settle(future, EngineClosed("the compiler was closed before the constraint was compiled."))

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return tokenizer_of(self.vocab)

    def _begin(self, spec: Spec, future: Future[Constraint]) -> Constraint | None:
        """Compile `spec` if that is quick; otherwise leave it to the other thread and return None."""
        if not isinstance(spec, JsonSchema | Grammar) or _length(spec) <= LARGE_CHARACTERS:
            return self._compile(spec)
        with self._lock:
            if not self._closed:
                self._large.submit(self._answer, future, lambda: self._compile(spec))
        return None

    def _compile(self, spec: Spec) -> Constraint:
        match spec:
            case Choices(texts):
                return compile_choices(texts, self.vocab)
            case Regex(pattern):
                try:
                    planned = plan(pattern, self.vocab, self._budget)
                except OverBudget:
                    return self._follow(LLMatcher.grammar_from_regex(pattern))
                return build(planned, self.vocab)
            case JsonSchema(text):
                prepared = prepare(text, self._tokenizer)
                for warning in prepared.checked.warnings:
                    log.warning("a JSON Schema: %s", warning)
                return GuidanceConstraint(prepared.matcher, len(text), self.vocab, prepared.checked)
            case Grammar(lark):
                if len(lark) > MAX_GRAMMAR_CHARACTERS:
                    raise ConstraintError(
                        f"the grammar is too large: {len(lark)} characters, at most {MAX_GRAMMAR_CHARACTERS} are read."
                    )
                return self._follow(LLMatcher.grammar_from_lark(lark))
            case _:
                assert_never(spec)

    def _follow(self, grammar: str) -> GuidanceConstraint:
        return GuidanceConstraint(LLMatcher(self._tokenizer, grammar, log_level=0), len(grammar), self.vocab)

    def _answer(self, future: Future[Constraint], compile_it: Callable[[], Constraint | None]) -> None:
        result: Constraint | Exception | None
        try:
            result = compile_it()
        except BaseException as error:  # whatever it is, it belongs to those who wait for this constraint
            result = as_error(error)
        if result is None:  # another thread will answer
            return
        with self._lock:
            if isinstance(result, Exception) and not isinstance(result, ConstraintError):  # next time it may go well
                self._compiled = OrderedDict((spec, f) for spec, f in self._compiled.items() if f is not future)
        _settle(future, result)
        with self._lock:
            self._evict()

    def _evict(self) -> None:
        held = {spec: _held(future) for spec, future in self._compiled.items() if future.done()}
        total = sum(held.values())
        for spec in list(held)[:-1]:
            if total <= self._max_bytes and len(self._compiled) <= MAX_ENTRIES:
                return
            del self._compiled[spec]
            total -= held[spec]


def _give_way() -> None:
    """Let this thread compute when nobody else wants to, where the system can say so of a thread: steps go first."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


def _settle(future: Future[Constraint], result: Constraint | Exception) -> None:
    """Answer those who wait, unless they were answered before; what they do then runs here, so hold no lock."""
    with suppress(InvalidStateError):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _length(spec: JsonSchema | Grammar) -> int:
    return len(spec.text if isinstance(spec, JsonSchema) else spec.lark)


def _held(future: Future[Constraint]) -> int:
    return 0 if future.exception() else future.result().nbytes

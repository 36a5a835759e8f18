"""A backend that answers from a table: for tests and documents, and for users' tests of their programs."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition, Lock, Thread
from typing import Any, TypeAlias, TypeVar

from branchwise.lang import Gen, GenOptions, Select, Text

from .session import Backend, Cancel, Completion, Delta, Listener, Segment, Selection, Session, Usage

Said: TypeAlias = str | Exception
Answer: TypeAlias = Said | Sequence[Said]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Asked:
    """One call as the backend got it: the operation, and what the session held."""

    op: Gen | Select
    _log: Sequence[Segment] = field(repr=False)  # the session's own, which only grows
    _end: int = field(repr=False)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All that the session held."""
        return tuple(self._log[: self._end])

    @property
    def prompt(self) -> str:
        """The text of the session, without its roles."""
        return "".join(segment.text for segment in self.segments if isinstance(segment, Text))


class Scripted(Backend):
    """Answers each call by its variable's name, and keeps what it was asked in `calls`.

    Args:
        answers: for each name a text, an exception to fail with, or a list of them: one a call, and one a
            sample of a call with n > 1, the last again and again. Or a function that gives one for an `Asked`.
            The answer to a `Select` is one of its choices.
        delay_s: None answers at once, inside the call. Otherwise a thread of this backend waits so long
            before each piece.
        piece_len: characters of a piece of streamed text, and of a token where tokens are counted.

    Texts end before the first of the call's stops. What else its options say is recorded, and no more.
    """

    def __init__(
        self,
        answers: Mapping[Any, Answer] | Callable[[Asked], Answer],  # Any: a name or None, which no literal can say
        *,
        delay_s: float | None = None,
        piece_len: int = 4,
        defaults: GenOptions | None = None,
    ) -> None:
        self.calls: list[Asked] = []
        self.opened: int = 0
        self.closed: int = 0
        self.held: list[str] = []  # the texts that are kept for batches now
        self.piece_len = piece_len
        self.delay_s = delay_s
        self._defaults = defaults or GenOptions()
        self._answers: Callable[[Asked], Answer] = answers if callable(answers) else _Table(answers)
        self._lock = Lock()
        self._clock = _Clock()

    @property
    def defaults(self) -> GenOptions:
        return self._defaults

    @property
    def open_sessions(self) -> int:
        """Sessions and forks not closed yet."""
        return self.opened - self.closed

    def open_session(self) -> Session:
        return _ScriptedSession(self, ())

    def answer(self, asked: Asked, samples: int) -> list[Said]:
        """Write down what is asked, and look up one answer for each sample."""
        with self._lock:
            self.calls.append(asked)
            answer = self._answers(asked)
        said = [answer] if isinstance(answer, (str, Exception)) else list(answer)
        return [*said, *[said[-1]] * samples][:samples]

    def count(self, *, opened: int = 0, closed: int = 0) -> None:
        with self._lock:
            self.opened += opened
            self.closed += closed

    def tell(self, steps: Iterator[Callable[[], None]]) -> None:
        """Do these steps, now or each after a delay."""
        if self.delay_s is None:
            for step in steps:
                step()
        else:
            self._clock.each_after(self.delay_s, steps)


class _Table:
    """Answers by name; a list gives one a call, the last again and again."""

    def __init__(self, answers: Mapping[Any, Answer]) -> None:
        self._left: dict[str | None, list[Said]] = {
            name: [answer] if isinstance(answer, (str, Exception)) else list(answer) for name, answer in answers.items()
        }

    def __call__(self, asked: Asked) -> Answer:
        left = self._left.get(asked.op.name)
        if not left:
            return LookupError("the script has no answer to this call")
        count = (asked.op.options.n or 1) if isinstance(asked.op, Gen) else 1
        answer, rest = left[:count], left[count:]
        self._left[asked.op.name] = rest or left[-1:]
        return answer


class _ScriptedSession:
    """One conversation. Asserts what the seam promises: one operation at a time, options filled, none after close."""

    def __init__(self, backend: Scripted, segments: Sequence[Segment]) -> None:
        self._backend = backend
        self._segments: list[Segment] = []
        self._text_len = 0
        for segment in segments:
            self._say(segment)
        self._running: _Telling | None = None
        self._closed = False
        backend.count(opened=1)

    def append(self, segment: Segment) -> None:
        self._check()
        self._say(segment)

    def generate(self, gen: Gen, listener: Listener[Completion]) -> Cancel:
        self._check()
        options = gen.options
        assert None not in (options.max_tokens, options.stop, options.temperature, options.top_p, options.n), options
        said = self._backend.answer(Asked(gen, self._segments, len(self._segments)), options.n or 1)
        error = next((answer for answer in said if isinstance(answer, Exception)), None)
        texts = [_cut(text, options.stop or ()) for text in said if isinstance(text, str)]
        result = None if error is not None else self._completion(texts)

        def finish(telling: _Telling) -> None:
            if telling.cancelled:
                self._end(telling.told)
                listener.on_done(Completion(telling.told, "cancelled", detail="cancelled"))
            elif result is None:
                self._fail(listener, error)
            else:
                self._end(result.text)
                listener.on_done(result)

        return self._tell("" if result is None else result.text, listener.on_delta, finish)

    def prepare(self, gen: Gen) -> None:
        """There is nothing to prepare."""

    def select(self, select: Select, listener: Listener[Selection]) -> Cancel:
        self._check()
        (said,) = self._backend.answer(Asked(select, self._segments, len(self._segments)), 1)

        def finish(telling: _Telling) -> None:
            if telling.cancelled:
                self._fail(listener, RuntimeError("cancelled"))
            elif isinstance(said, Exception):
                self._fail(listener, said)
            elif said not in select.choices:
                self._fail(listener, LookupError(f"the script answers {said!r}, which is not one of the choices"))
            else:
                self._end(said)
                scores = tuple(0.0 if choice == said else -1.0 for choice in select.choices)
                listener.on_done(Selection(said, select.choices.index(said), scores, self._usage("")))

        return self._tell("", listener.on_delta, finish)

    def fork(self, count: int) -> list[Session]:
        self._check()
        return [_ScriptedSession(self._backend, self._segments) for _ in range(count)]

    def hold(self) -> Callable[[], None]:
        text = "".join(segment.text for segment in self._segments if isinstance(segment, Text))
        self._backend.held.append(text)
        return lambda: self._backend.held.remove(text)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._backend.count(closed=1)
            if self._running is not None:
                self._running.cancel()

    def _completion(self, texts: Sequence[tuple[str, str]]) -> Completion:
        samples = [Completion(text, "stop", self._usage(text), detail=detail) for text, detail in texts]
        return samples[0] if len(samples) == 1 else replace(samples[0], samples=tuple(samples))

    def _usage(self, text: str) -> Usage:
        size = self._backend.piece_len
        return Usage(prompt_tokens=-(-self._text_len // size), completion_tokens=-(-len(text) // size))

    def _tell(self, text: str, on_delta: Callable[[Delta], None], finish: Callable[[_Telling], None]) -> Cancel:
        telling = _Telling(text, self._backend.piece_len, on_delta, finish)
        self._running = telling
        self._backend.tell(telling.steps())
        return telling.cancel

    def _fail(self, listener: Listener[R], error: Exception | None) -> None:
        assert error is not None, "nothing failed"
        self._end("")
        listener.on_failed(error)

    def _end(self, text: str) -> None:
        self._running = None
        self._say(Text(text))

    def _say(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._text_len += len(segment.text) if isinstance(segment, Text) else 0

    def _check(self) -> None:
        assert not self._closed, "the session is closed"
        assert self._running is None, "an operation of this session is still running"


class _Telling:
    """One text on its way to its listener, piece by piece; `finish` comes last, cancelled or not."""

    def __init__(
        self, text: str, piece_len: int, on_delta: Callable[[Delta], None], finish: Callable[[_Telling], None]
    ) -> None:
        self.cancelled = False
        self.told = ""
        self._pieces = [text[start : start + piece_len] for start in range(0, len(text), piece_len)]
        self._on_delta = on_delta
        self._finish = finish

    def cancel(self) -> None:
        self.cancelled = True

    def steps(self) -> Iterator[Callable[[], None]]:
        for piece in self._pieces:
            if self.cancelled:
                break
            yield partial(self._tell, piece)
        yield partial(self._finish, self)

    def _tell(self, piece: str) -> None:
        if not self.cancelled:
            self.told += piece
            self._on_delta(Delta(piece))


class _Clock:
    """Does steps at their time, on one thread, which is there while there is something to do."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._due: list[tuple[float, int, float, Iterator[Callable[[], None]]]] = []
        self._count = itertools.count()  # orders what is due at the same time
        self._thread: Thread | None = None

    def each_after(self, delay_s: float, steps: Iterator[Callable[[], None]]) -> None:
        """Do each of `steps` so long after the one before it."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._count), delay_s, steps))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = Thread(target=self._run, name="scripted", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (due := self._next()) is not None:
            delay_s, steps = due
            step = next(steps, None)
            if step is not None:
                step()
                self.each_after(delay_s, steps)

    def _next(self) -> tuple[float, Iterator[Callable[[], None]]] | None:
        with self._changed:
            while self._due and (wait_s := self._due[0][0] - time.monotonic()) > 0:
                self._changed.wait(wait_s)
            if not self._due:
                self._thread = None
                return None
            _, _, delay_s, steps = heapq.heappop(self._due)
            return delay_s, steps


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """`text` up to the first place where one of `stops` begins, and what ends it: that stop in quotes, or "eos"."""
    found = [(at, repr(stop)) for stop in stops if (at := text.find(stop)) >= 0]
    end, detail = min(found, default=(len(text), "eos"))
    return text[:end], detail

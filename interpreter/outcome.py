"""What becomes of one operation: its text while it grows, then a value or a failure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from branchwise.lang import LangError

from .changes import Changes, Wait, blocking
from .errors import Cancelled, GenerationError, InvalidText
from .session import Completion, Selection


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something has no value: an error, and the call and the line of the program it belongs to."""

    error: BaseException
    call: str | None = None  # None: not a call's failure but the program's own; it is raised as it is
    written_at: str | None = None

    def exception(self) -> BaseException:
        """An exception to raise: a fresh one for each reader, that names the call and is caused by the error."""
        if isinstance(self.error, Cancelled):
            return Cancelled(*self.error.args)
        if self.call is None:
            return self.error
        fresh = self._named(f"{self.call}: {self.error}")
        fresh.__cause__ = self.error
        if self.written_at:
            fresh.add_note(f"The call stands at {self.written_at}.")
        return fresh

    def _named(self, message: str) -> Exception:
        if not isinstance(self.error, LangError | InvalidText):
            return GenerationError(message)
        fresh = copy.copy(self.error)
        fresh.args = (str(self.error) if str(self.error).startswith(self.call or "") else message,)
        return fresh


def cancelled(why: str) -> Failure:
    """The failure of what was stopped before it was done."""
    return Failure(Cancelled(why))


class Outcome:
    """Set once, read by many: pieces of text, then a value or a failure. Any thread may read or set it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._settled = Changes(self._lock)
        self._grown = Changes(self._lock)  # apart, so that who waits for the value is not woken by every piece
        self._pieces: list[str] = []
        self._done = False
        self._failure: Failure | None = None
        self._value: Any = None
        self._result: Completion | Selection | None = None
        self._unreadable: Failure | None = None  # why there is a text and no value
        self._untold = False  # the text is that of the value, and not made yet

    @classmethod
    def of(cls, value: Any) -> Outcome:
        """An outcome that is there already: any Python value, whose text is made when it is asked for."""
        outcome = cls()
        outcome.become(value)
        return outcome

    @property
    def done(self) -> bool:
        return self._done

    @property
    def failure(self) -> Failure | None:
        return self._failure

    def grow(self, piece: str) -> None:
        """Add a piece of text; ignored once the outcome is settled."""
        with self._lock:
            if piece and not self._done:
                self._pieces.append(piece)
                self._grown.happen()

    def succeed(
        self,
        value: Any,
        text: str,
        result: Completion | Selection | None = None,
        *,
        unreadable: Failure | None = None,
    ) -> None:
        """Settle on `value`. `text` is all of the text; what was not told in pieces is added. The first call counts.

        unreadable: there is no value, for this reason: who reads it is told, and all else goes on.
        """
        with self._lock:
            if self._done:
                return
            told = "".join(self._pieces)
            assert text.startswith(told), f"pieces {told!r} are not the beginning of the text {text!r}"
            if text != told:
                self._pieces.append(text[len(told) :])
            self._value, self._result, self._unreadable = value, result, unreadable
            self._settle()

    def become(self, value: Any, result: Completion | Selection | None = None) -> None:
        """Settle on any Python value, whose text is made when it is asked for. The first call counts."""
        with self._lock:
            if not self._done:
                self._value, self._result, self._untold = value, result, True
                self._settle()

    def fail(self, failure: Failure) -> None:
        """Settle on a failure; the pieces stay readable. The first call counts."""
        with self._lock:
            if not self._done:
                self._failure = failure
                self._settle()

    def value(self) -> Any:
        """Wait for the value, or raise the failure, or why the text is none."""
        self._wait()
        if self._unreadable is not None:
            raise self._unreadable.exception()
        return self._value

    async def settled(self) -> Outcome:
        """Wait on an event loop until there is a value or a failure, and raise neither."""
        while (wait := self._unsettled()) is not None:
            await wait
        return self

    def copy_to(self, other: Outcome) -> None:
        """Wait, and settle another outcome on the same."""
        text = self.text()
        other.succeed(self._value, text, unreadable=self._unreadable)

    def result(self) -> Completion | Selection | None:
        """Wait, and give what the backend said; None for a value that was set in Python."""
        self._wait()
        return self._result

    def when_settled(self, wake: Callable[[], None]) -> None:
        """Call `wake`, which must not block, once this is settled: now, or on the thread that settles it."""
        with self._lock:
            if not self._done:
                self._settled.watch(wake)
                return
        wake()

    def text(self) -> str:
        """Wait for the end of the text, and give all of it."""
        self._wait()
        return "".join(blocking(self.steps()))

    def text_so_far(self) -> str:
        """The pieces that are there by now."""
        return "".join(self._pieces)

    def steps(self) -> Iterator[str | Wait]:
        """All pieces from the first, each as soon as it is there; a failure is raised after the last."""
        index = 0
        while (step := self._step(index)) is not None:
            yield step
            index += isinstance(step, str)
        self._raise_failure()

    def _wait(self) -> None:
        while (wait := self._unsettled()) is not None:
            wait.block()
        self._raise_failure()

    def _step(self, index: int) -> str | Wait | None:
        with self._lock:
            if self._untold:
                self._pieces, self._untold = [str(self._value)], False
            if index < len(self._pieces):
                return self._pieces[index]
            return None if self._done else self._grown.next()

    def _unsettled(self) -> Wait | None:
        with self._lock:
            return None if self._done else self._settled.next()

    def _settle(self) -> None:
        self._done = True
        self._settled.happen()
        self._grown.happen()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.exception()


def in_order_of_settling(outcomes: Sequence[Outcome]) -> Iterator[int | Wait]:
    """The indexes of `outcomes`, each as soon as that one is settled."""
    lock = Lock()
    changes = Changes(lock)
    settled: list[int] = []

    def arrived(index: int) -> None:
        with lock:
            settled.append(index)
            changes.happen()

    for index, outcome in enumerate(outcomes):
        outcome.when_settled(partial(arrived, index))
    told = 0
    while told < len(outcomes):
        with lock:
            step = settled[told] if told < len(settled) else changes.next()
        yield step
        told += isinstance(step, int)

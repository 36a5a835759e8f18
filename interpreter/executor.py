"""Doing what a state says: one session's tasks in order, moved on by the answers of the backend.

No thread belongs to an executor. Whoever adds a task, and whichever thread of the backend brings an
answer, works the queue until the next question is out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias, assert_never
from weakref import WeakSet

from branchwise.lang import Gen, RoleBegin, RoleEnd, Select, Text, Tools
from branchwise.lang.checks import characters

from .errors import InvalidText
from .outcome import Failure, Outcome, cancelled
from .session import Cancel, Completion, Delta, Selection, Session
from .transcript import Ask, Quote
from .transcript import Task as WrittenTask
from .values import value_of


@dataclass(frozen=True, slots=True)
class Fork:
    """The session is forked here, and each of these executors goes on with one of the forks."""

    children: tuple[Executor, ...]


@dataclass(frozen=True, slots=True)
class Reached:
    """All tasks before this one are done once `outcome` is settled."""

    outcome: Outcome


Task: TypeAlias = WrittenTask | Fork | Reached


class Executor:
    """One session, used by one thread at a time, one task at a time, in the order they were added.

    Its first failure settles everything queued and everything added later, and gives the session back.
    It holds no state: a state that nobody holds any more can be seen to go.
    """

    def __init__(
        self,
        session: Session | None = None,
        keep_alive: object = None,
        prepare: Callable[[Gen], None] | None = None,
    ) -> None:
        self._lock = Lock()  # guards all fields; never held while a session, an outcome or another executor is called
        self._session = session  # None: not forked yet, or given back
        self._keep_alive = keep_alive  # what must live until this executor has its session: the parent's state
        self._prepare = prepare if session is None else session.prepare
        self._queue: deque[Task] = deque()
        self._working = False  # a thread is in `_work`
        self._asked: Ask | None = None  # its answer is awaited
        self._stop: Cancel | None = None  # stops it
        self._failure: Failure | None = None
        self._children: WeakSet[Executor] = WeakSet()

    @property
    def failure(self) -> Failure | None:
        """The first failure, if there is one by now."""
        return self._failure

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        with self._lock:
            return not (self._queue or self._working or self._asked)

    def add(self, tasks: Sequence[Task]) -> None:
        """Queue tasks, and start as many as can be."""
        with self._lock:
            failure = self._failure
            if failure is None:
                self._queue.extend(tasks)
        if failure is None:
            self._look_ahead(tasks)
            advance(self)
        else:
            _settle(tasks, failure)

    def wait(self) -> None:
        """Wait until everything added so far is done; raise the first failure."""
        self.reach().value()

    def reach(self) -> Outcome:
        """What is settled once everything added so far is done, or has failed."""
        reached = Reached(Outcome())
        self.add([reached])
        return reached.outcome

    def fork(self, count: int, keep_alive: object) -> list[Executor]:
        """Executors that go on from here, once everything added so far is done.

        `keep_alive` lives until then, even if nobody else holds it.
        """
        children = [Executor(keep_alive=keep_alive, prepare=self._prepare) for _ in range(count)]
        with self._lock:
            self._children.update(children)
        self.add([Fork(tuple(children))])
        return children

    def cancel(self, why: str) -> None:
        """Stop what is queued and running here and in the forks; what is done stays usable."""
        for executor in self._family():
            if not executor.idle:
                executor._fail(cancelled(why))

    def stop(self, why: str) -> None:
        """Stop everything here and in the forks, and give the sessions back."""
        for executor in self._family():
            executor._fail(cancelled(why))

    def drop(self) -> None:
        """Nobody holds the state any more: stop, and give the session back. Forks that have begun go on."""
        self._fail(cancelled("the state was dropped before this was done"))

    def _family(self) -> list[Executor]:
        family = [self]
        for executor in family:  # grows while it is walked
            with executor._lock:
                family.extend(executor._children)
        return family

    def _look_ahead(self, tasks: Sequence[Task]) -> None:
        """A call may wait here for a while: the backend compiles its constraint meanwhile, or refuses it now."""
        for task in tasks:
            if self._prepare and isinstance(task, Ask) and isinstance(task.op, Gen):
                self._prepare(task.op)

    # The queue

    def _begin(self, session: Session) -> None:
        with self._lock:
            self._session, self._keep_alive = session, None

    def _claim(self) -> bool:
        """Become the one thread that works; False if another does, which then sees what was just changed."""
        with self._lock:
            claimed, self._working = not self._working, True
        return claimed

    def _work(self, ready: deque[Executor]) -> None:
        """Do tasks until there is none or an answer is awaited. Forks that can start now are added to `ready`."""
        task = None
        try:
            while (task := self._next_task()) is not None:
                try:
                    self._do(task, ready)
                except Exception as error:
                    self._fail(_failure(error, task), task)
        except BaseException as error:  # an interrupt of this thread
            self._fail(_interrupted(error), task)
            with self._lock:
                self._working = False
            raise

    def _next_task(self) -> Task | None:
        """Take the next task, if this thread may do one. Gives the session back when it is of no more use."""
        task = over = None
        with self._lock:
            if self._asked is None and self._failure is not None:
                over, self._session = self._session, None
            elif self._asked is None and self._session is not None and self._queue:
                task = self._queue.popleft()
            self._working = task is not None
        if over is not None:
            over.close()
        return task

    def _do(self, task: Task, ready: deque[Executor]) -> None:
        session = self._session
        assert session is not None, f"no session for {task!r}"
        match task:
            case Text() | RoleBegin() | RoleEnd() | Tools():
                session.append(task)
            case Ask():
                self._ask(session, task)
            case Quote(source, outcome):
                said = characters(source.text(), "the variable")  # settled: its own task came before this one
                session.append(Text(said, control=False))
                source.copy_to(outcome)
            case Fork(children):
                for child, branch in zip(children, session.fork(len(children)), strict=True):
                    child._begin(branch)
                    ready.append(child)
            case Reached(outcome):
                outcome.succeed(None, "")
            case _:
                assert_never(task)

    # Questions and answers

    def _ask(self, session: Session, ask: Ask) -> None:
        with self._lock:
            self._asked, self._stop = ask, None
        match ask.op:
            case Gen():
                stop = session.generate(ask.op, _GenListener(self, ask))
            case Select():
                stop = session.select(ask.op, _SelectListener(self, ask))
        with self._lock:
            awaited = self._asked is ask
            self._stop = stop if awaited else None
            stop_now = awaited and self._failure is not None  # cancelled while it was being asked
        if stop_now:
            stop()

    def _answered(self, ask: Ask, failure: Failure | None = None) -> None:
        with self._lock:
            if self._asked is ask:
                self._asked = self._stop = None
        if failure is not None:
            self._fail(failure, ask)
        advance(self)

    def _fail(self, failure: Failure, task: Task | None = None) -> None:
        """Keep the first failure, and settle `task` and everything queued or running with it."""
        _settle([*self._give_up(failure, task), *([] if task is None else [task])], self._failure or failure)
        advance(self)

    def _give_up(self, failure: Failure, task: Task | None = None) -> list[Task]:
        """Keep the first failure and stop what is running; what has to be settled comes back."""
        with self._lock:
            self._failure = self._failure or failure
            self._keep_alive = None
            if self._asked is task:
                self._asked = self._stop = None  # it could not even be asked: no answer will come
            left: list[Task] = [self._asked] if self._asked else []
            left += self._queue
            self._queue.clear()
            stop = self._stop
        if stop is not None:
            stop()
        return left


def _settle(tasks: Sequence[Task], failure: Failure) -> None:
    """What these tasks should have given is given up. In a loop: forks of forks cost no stack."""
    left = list(tasks)
    for task in left:  # grows while it is walked
        match task:
            case Ask() | Quote() | Reached():
                task.outcome.fail(failure)
            case Fork(children):
                for child in children:
                    left += child._give_up(failure)
            case Text() | RoleBegin() | RoleEnd() | Tools():
                pass
            case _:
                assert_never(task)


def advance(executor: Executor) -> None:
    """Work this executor's queue, then those of the forks it started, in a loop: forks of forks cost no stack."""
    ready = deque([executor])
    try:
        while ready:
            current = ready.popleft()
            if current._claim():
                current._work(ready)
    except BaseException as error:  # an interrupt of this thread: nobody may wait for ever
        for left in ready:
            left._fail(_interrupted(error))
        raise


def _interrupted(error: BaseException) -> Failure:
    return cancelled(f"interrupted by {type(error).__name__}")


def _failure(error: Exception, task: Task) -> Failure:
    match task:
        case Ask(op, _, written_at):
            return Failure(error, op.call, written_at)
        case Fork(children):
            return Failure(error, f"fork({len(children)})")
        case _:
            return Failure(error, "appending text")


class _GenListener:
    """Hears of one `Gen`."""

    def __init__(self, executor: Executor, ask: Ask) -> None:
        self._executor = executor
        self._ask = ask

    def on_delta(self, delta: Delta) -> None:
        if delta.sample == 0:
            self._ask.outcome.grow(delta.text)

    def on_done(self, result: Completion) -> None:
        failure = None
        if result.finish_reason == "cancelled":
            failure = cancelled(f"{self._ask.op.call} was cancelled by the backend")
        else:
            failure = _keep(self._ask, *self._value(result), result.text, result)
        self._executor._answered(self._ask, failure)

    def _value(self, result: Completion) -> tuple[Any, Failure | None]:
        """What the variable is, or why it is nothing."""
        assert isinstance(self._ask.op, Gen)
        try:
            if result.samples:
                return [value_of(sample, self._ask.op.options) for sample in result.samples], None
            return value_of(result, self._ask.op.options), None
        except InvalidText as error:
            return None, _failure(error, self._ask)

    def on_failed(self, error: Exception) -> None:
        self._executor._answered(self._ask, _failure(error, self._ask))


class _SelectListener:
    """Hears of one `Select`."""

    def __init__(self, executor: Executor, ask: Ask) -> None:
        self._executor = executor
        self._ask = ask

    def on_delta(self, delta: Delta) -> None:
        """Nothing is certain before the winner is."""

    def on_done(self, result: Selection) -> None:
        self._executor._answered(self._ask, _keep(self._ask, result.choice, None, result.choice, result))

    def on_failed(self, error: Exception) -> None:
        self._executor._answered(self._ask, _failure(error, self._ask))


def _keep(
    ask: Ask, value: object, unreadable: Failure | None, text: str, result: Completion | Selection
) -> Failure | None:
    """Settle the outcome; an answer that contradicts what was told before is a failure, not a hang."""
    try:
        ask.outcome.succeed(value, text, result, unreadable=unreadable)
    except AssertionError as error:
        return _failure(error, ask)
    return None

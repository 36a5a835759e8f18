"""What a state says: text, roles and generated text in order, and its variables by name.

All of it is known as soon as it is written, before anything has run: a generated text stands in its
place as an `Outcome`. So forking copies references, and nobody needs to ask the backend what was said.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias
from weakref import WeakSet, ref

from branchwise.lang import Gen, LangError, Op, RoleBegin, RoleEnd, Select, Text, Tools, Var

from .changes import Changes, Wait
from .errors import Cancelled, UnknownVariable
from .outcome import Failure, Outcome
from .session import Segment


@dataclass(frozen=True, slots=True)
class Ask:
    """A call that the backend answers, and where the user wrote it."""

    op: Gen | Select
    outcome: Outcome
    written_at: str


@dataclass(frozen=True, slots=True)
class Quote:
    """The text of `source` is said again; `outcome` is that second saying."""

    source: Outcome
    outcome: Outcome


Task: TypeAlias = Segment | Ask | Quote
Entry: TypeAlias = Segment | Outcome


class Transcript:
    """Entries are only added, and their roles are balanced: an end has its begin, and none is inside another.

    One thread writes; any thread reads. Who reads while a program on another thread still writes can
    wait for what is not there yet: nothing more comes once `ended` is settled, with what the program
    returned or with why it did not.
    """

    def __init__(self, origin: Transcript | None = None) -> None:
        self.role: str | None = origin.role if origin else None
        self.ended: Outcome = Outcome()
        self._promised: str | None = None  # the role of a block that was made and not entered
        self.forks: list[tuple[int, list[Transcript]]] = []  # branches, and how many entries they had from the start
        self._entries: list[Entry] = list(origin._entries) if origin else []
        self._variables: dict[str, Outcome] = dict(origin._variables) if origin else {}
        self._inherited = len(self._entries)
        self._branches: WeakSet[Transcript] = WeakSet()
        self._origin = ref(origin) if origin else None
        if origin is not None:
            origin._branches.add(self)
        self._lock = Lock()
        self._changed = Changes(self._lock)

    def write(self, ops: Sequence[Op], written_at: str) -> list[Task]:
        """Add operations, all or none, and give back what there is to do for them."""
        self.check_blocks()
        self._check(ops)
        with self._lock:
            tasks = [self._add(op, written_at) for op in ops if op != Text("")]
            self._changed.happen()
        return tasks

    def say_again(self, branch: Transcript) -> list[Task]:
        """Add what a branch has added since the fork, all of which is settled, and give back what there is to do."""
        entries = branch._entries[branch._inherited :]
        self.check_blocks()
        self._check([entry for entry in entries if not isinstance(entry, Outcome)])
        with self._lock:
            tasks = [self._quote(e) if isinstance(e, Outcome) else self._add(e, "") for e in entries]
            self._changed.happen()
        return tasks

    def promise(self, role: str) -> None:
        """A block for a turn of `role` was made, and has to be entered before anything else is written."""
        self.check_blocks()
        self._promised = role

    def keep_promise(self) -> None:
        """The block that was made is entered."""
        self._promised = None

    def check_blocks(self) -> None:
        """Refuse to go on behind a block that was made and not entered: the program lacks a `with`."""
        if self._promised is not None:
            call, self._promised = f"s.{self._promised}", None  # said once
            raise LangError(f'{call}() alone begins no turn. Write "with {call}():" or {call}("...").')

    def set(self, name: str, outcome: Outcome) -> None:
        """Give the variable `name` a value, or another one."""
        with self._lock:
            self._variables[name] = outcome
            self._changed.happen()

    def end(self, returned: Any) -> None:
        """The program has returned."""
        self.ended.succeed(returned, "")
        self._wake()

    def end_with(self, failure: Failure) -> None:
        """The program has failed."""
        self.ended.fail(failure)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            self._changed.happen()

    def find(self, name: str) -> Outcome:
        """The variable `name`.

        Raises:
            UnknownVariable: nothing that is written sets it.
        """
        try:
            return self._variables[name]
        except KeyError:
            raise UnknownVariable(self._unknown(name)) from None

    def await_variable(self, name: str) -> Outcome:
        """The variable `name`, as soon as the program that is still writing sets it."""
        while (wait := self._not_set_yet(name)) is not None:
            wait.block()
        return self._set_by_the_program(name)

    def steps_of(self, name: str) -> Iterator[str | Wait]:
        """The text of the variable `name` in pieces, as soon as the program that is still writing sets it."""
        while (wait := self._not_set_yet(name)) is not None:
            yield wait
        yield from self._set_by_the_program(name).steps()

    def names(self) -> list[str]:
        return list(self._variables)

    def entries(self) -> list[Entry]:
        """What is written by now, done or not."""
        return list(self._entries)

    def name_of(self, outcome: Outcome) -> str | None:
        """The variable that has this outcome."""
        return next((name for name, other in list(self._variables.items()) if other is outcome), None)

    def branched(self, branches: list[Transcript]) -> None:
        """They went on from what is written now; kept so that they can be shown."""
        self.forks.append((len(self._entries), branches))

    def leading_constants(self) -> list[Segment]:
        """What is said before the first text that the program did not know when it began."""
        known = itertools.takewhile(lambda entry: not isinstance(entry, Outcome), list(self._entries))
        return [entry for entry in known if not isinstance(entry, Outcome)]

    def text(self) -> str:
        """Wait for all that is written, and give it as one text."""
        return "".join(_text(entry) for entry in list(self._entries))

    def text_so_far(self) -> str:
        return "".join(e.text_so_far() if isinstance(e, Outcome) else _text(e) for e in list(self._entries))

    def messages(self) -> list[dict[str, Any]]:
        """Wait for all that is written, and give it turn by turn; text outside of any role is not in a turn."""
        messages: list[dict[str, Any]] = []
        inside = False
        for entry in list(self._entries):
            match entry:
                case RoleBegin(role, fields):
                    messages.append({"role": role, "content": "", **json.loads(fields or "{}")})
                    inside = True
                case RoleEnd():
                    inside = False
                case _:
                    text = _text(entry)  # waits, and raises a failure, also outside of the turns
                    if inside:
                        messages[-1]["content"] += text
        return messages

    def steps(self, *, until_ended: bool) -> Iterator[str | Wait]:
        """The whole text from its start in pieces, each as soon as it is there.

        It ends with what is written now, or, `until_ended`, when the program has ended.
        """
        limit = None if until_ended else len(self._entries)
        index = 0
        while (entry := self._entry(index, limit)) is not None:
            if isinstance(entry, Wait):
                yield entry
                continue
            if isinstance(entry, Outcome):
                try:
                    yield from entry.steps()
                except Cancelled:
                    if until_ended and self.ended.failure is not None:
                        self.ended.value()  # raises what it was cancelled for
                    raise
            elif text := _text(entry):
                yield text
            index += 1
        if until_ended:
            self.ended.value()

    def _entry(self, index: int, limit: int | None) -> Entry | Wait | None:
        if limit is not None:
            return self._entries[index] if index < limit else None
        with self._lock:
            if index < len(self._entries):
                return self._entries[index]
            return self._changed.next() if self._growing() else None

    def _not_set_yet(self, name: str) -> Wait | None:
        with self._lock:
            return self._changed.next() if name not in self._variables and self._growing() else None

    def _set_by_the_program(self, name: str) -> Outcome:
        if name not in self._variables:
            self.ended.value()  # a program that failed says so, rather than what it did not get to
        return self.find(name)

    def _growing(self) -> bool:
        return not self.ended.done

    def _add(self, op: Op, written_at: str) -> Task:
        match op:
            case Text() | RoleBegin() | RoleEnd() | Tools():
                if isinstance(op, RoleBegin | RoleEnd):
                    self.role = op.role if isinstance(op, RoleBegin) else None
                self._entries.append(op)
                return op
            case Var(name):
                return self._quote(self.find(name))
            case Gen() | Select():
                ask = Ask(op, Outcome(), written_at)
                self._entries.append(ask.outcome)
                if op.name is not None:
                    self._variables[op.name] = ask.outcome
                return ask

    def _quote(self, source: Outcome) -> Quote:
        quote = Quote(source, Outcome())
        self._entries.append(quote.outcome)
        return quote

    def _check(self, ops: Sequence[Op]) -> None:
        role = self.role
        known = set(self._variables)
        for op in ops:
            match op:
                case RoleBegin():
                    role = _begun(op, role)
                case RoleEnd():
                    _check_end(op, role)
                    role = None
                case Var(name):
                    if name not in known:
                        raise UnknownVariable(self._unknown(name))
                case Gen(name) | Select(name):
                    known.update(() if name is None else (name,))
                case Tools():
                    if role is not None:
                        raise LangError(f"tools() inside the turn of {role}. Write it before the turn.")
                case Text():
                    pass

    def _unknown(self, name: str) -> str:
        known = ", ".join(f'"{known}"' for known in self._variables)
        listed = f"Known: {known}." if known else "None is set so far."
        return f'there is no variable "{name}". {listed} {self._where_to_find(name)}'

    def _where_to_find(self, name: str) -> str:
        origin = self._origin() if self._origin is not None else None
        if any(name in branch._variables for branch in self._branches):
            return f'A branch sets it: branches["{name}"] reads it there, branches.join() gathers it here.'
        if origin is not None and name in origin._variables:
            return "The state it was forked from sets it after the fork: write that before the fork."
        if origin is not None and any(name in sibling._variables for sibling in origin._branches):
            return f'Another branch sets it: read it there, branches[...]["{name}"].'
        return f'Write s += gen("{name}") on a line before the one that reads it.'


def _begun(op: RoleBegin, role: str | None) -> str:
    if role is not None:
        raise LangError(f"{op.role}_begin() inside the turn of {role}. End that first with {role}_end().")
    return op.role


def _check_end(op: RoleEnd, role: str | None) -> None:
    if role is None:
        raise LangError(f"{op.role}_end() without {op.role}_begin().")
    if role != op.role:
        raise LangError(f"{op.role}_end() inside the turn of {role}. Write {role}_end().")


def _text(entry: Entry) -> str:
    match entry:
        case Outcome():
            return entry.text()
        case Text(text):
            return text
        case RoleBegin() | RoleEnd() | Tools():
            return ""

"""What traced programs would ask of a model: their sessions are played without it, and a trie stands for its cache.

Prompts are those of a run, by the same sessions. In place of what the model would write stand numbers
that are no tokens, as many as it may write; calls that are sure to write the same get the same ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Protocol, TypeAlias, assert_never

from branchwise.lang import Forked, Gen, GenOptions, Plan, PlanRow, RoleBegin, RoleEnd, Select, Step, Text, Tools, Trace
from branchwise.lang.regex import most_characters
from branchwise.lang.symbol import Origin, Unknown
from branchwise.lang.trace import described, merged, shortened, summarized

from .encode import Encoder
from .outcome import Failure
from .session import Segment

GREEDY = 1e-4
"""Up to this temperature equal prompts are continued alike."""

UNWRITTEN = "[...]"
"""The text of a generation in the turns of a chat."""

FILLER = " the"
"""What stands for a token of text that a program says again without knowing it."""


class Played(Protocol):
    """What is asked of a session: its prompts, and to go on behind what was never written."""

    def append(self, segment: Segment) -> None: ...
    def prompt(self) -> array[int]: ...
    def choices(self, select: Select, prompt: array[int]) -> tuple[list[str], int, list[array[int]]]: ...
    def go_on(self, tokens: Sequence[int], text: str, *, healed: int = 0) -> None: ...
    def fork(self, count: int) -> Sequence[Played]: ...


class Model(Protocol):
    """What is asked of an engine."""

    encoder: Encoder
    num_slots: int

    @property
    def beginning(self) -> array[int]: ...
    def open_session(self) -> Played: ...
    def forced(self, gen: Gen) -> tuple[str, bool]: ...
    def check_prompt(self, prompt: array[int]) -> None: ...


def make_plan(model: Model, traces: Sequence[Trace]) -> Plan:
    """The calls of these runs in order, on one cache that begins empty and forgets nothing.

    Raises:
        What a run would raise before its first token, with the call's name.
    """
    tree, written = _Tree(), _Written()
    runs = [_Run(model, tree, written, number, trace) for number, trace in enumerate(traces)]
    rows = tuple(row for run in runs for row in run.rows())
    return Plan(
        program=traces[0].program,
        runs=len(traces),
        rows=rows,
        shared_tokens=_common_prefix([run.first_prompt for run in runs]) if len(runs) > 1 else 0,
        slots=tree.size,
        num_slots=model.num_slots,
        ended=tuple((number, trace.ended) for number, trace in enumerate(traces) if trace.ended is not None),
    )


_Node: TypeAlias = "dict[int, _Node]"


class _Tree:
    """Every prefix that was computed. `size` is the number of its tokens."""

    def __init__(self) -> None:
        self.size = 0
        self._root: _Node = {}

    def find(self, tokens: Sequence[int]) -> int:
        """How many tokens at the beginning are there."""
        node, found = self._root, 0
        for token in tokens:
            if token not in node:
                break
            node, found = node[token], found + 1
        return found

    def add(self, tokens: Sequence[int]) -> int:
        """How many of them were not there."""
        node, before = self._root, self.size
        for token in tokens:
            if token not in node:
                node[token] = {}
                self.size += 1
            node = node[token]
        return self.size - before


class _Written:
    """Numbers for tokens that the model would write: all different, but for greedy calls on equal prompts."""

    def __init__(self) -> None:
        self._next = -1
        self._greedy: dict[tuple[bytes, GenOptions, int], range] = {}

    def tokens(self, prompt: array[int], gen: Gen, most: int) -> range:
        if (gen.options.temperature or 0) > GREEDY:
            return self._fresh(most)
        key = prompt.tobytes(), replace(gen.options, seed=None, n=None), most
        if key not in self._greedy:
            self._greedy[key] = self._fresh(most)
        return self._greedy[key]

    def _fresh(self, count: int) -> range:
        first, self._next = self._next, self._next - count
        return range(first, self._next, -1)


class _Run:
    """One trace, played in its order."""

    def __init__(self, model: Model, tree: _Tree, written: _Written, number: int, trace: Trace) -> None:
        self._model = model
        self._tree = tree
        self._written = written
        self._number = number
        self._trace = trace
        self._sessions: dict[tuple[int, ...], Played] = {(): model.open_session()}
        self._num_forks: dict[tuple[int, ...], int] = {}
        self._lengths: dict[int, int] = {}  # of what each call writes, by the call's number
        self._roles: dict[tuple[int, ...], str] = {}
        self.first_prompt: array[int] = array("i")

    def rows(self) -> Iterator[PlanRow]:
        for number, step in merged(self._trace.steps):
            try:
                row = self._play(number, step)
            except Exception as error:
                call = step.said.call if isinstance(step.said, Gen | Select) else described(step.said)
                raise Failure(error, call, step.written_at).exception() from error
            if row is not None:
                yield row

    def _play(self, number: int, step: Step) -> PlanRow | None:
        session, said = self._sessions[step.branch], step.said
        match said:
            case Unknown(origin=origin):
                session.append(Text(self._filler(origin), control=False))
            case Text(text):
                session.append(said)
                role = f"{name}: " if (name := self._roles.get(step.branch)) else ""
                return self._row(step, role + shortened(text), tokens=len(self._encoded(text)))
            case RoleBegin() | RoleEnd() | Tools():
                session.append(said)
                self._roles[step.branch] = said.role if isinstance(said, RoleBegin) else ""
            case Forked(count):
                first = self._num_forks.get(step.branch, 0)
                self._num_forks[step.branch] = first + count
                for child, branch in enumerate(session.fork(count), start=first):
                    self._sessions[*step.branch, child] = branch
                    self._roles[*step.branch, child] = self._roles.get(step.branch, "")
            case Gen():
                row, self._lengths[number] = self._generate(step, said, session)
                return row
            case Select():
                row, self._lengths[number] = self._select(step, said, session)
                return row
            case _:
                assert_never(said)
        return None

    def _generate(self, step: Step, gen: Gen, session: Played) -> tuple[PlanRow, int]:
        """The row, and how many tokens the state goes on with."""
        prompt = self._prompt(session)
        forced, whole = self._model.forced(gen)
        known = self._encoded(forced)
        most = min(gen.options.max_tokens or 1, len(known)) if whole else self._most_tokens(gen, forced)
        found = self._tree.find(prompt)
        samples: list[Sequence[int]] = [
            known[:most] if whole else self._written.tokens(prompt, gen, most) for _ in range(gen.options.n or 1)
        ]
        computed = sum(self._tree.add([*prompt, *tokens[:-1]]) for tokens in samples)
        session.go_on(samples[0], UNWRITTEN)
        row = self._row(
            step,
            summarized(gen),
            tokens=len(prompt),
            requests=len(samples),
            hit_tokens=min(found, len(prompt) - 1) + (len(samples) - 1) * (len(prompt) - 1),
            computed_tokens=computed,
            most_tokens=most * len(samples),
            forced=forced,
        )
        return row, most

    def _select(self, step: Step, select: Select, session: Played) -> tuple[PlanRow, int]:
        """As `_generate`; the winner may be any, so it is the longest."""
        prompt = self._prompt(session)
        texts, healed, choices = session.choices(select, _constant_end(prompt))
        start = prompt[: len(prompt) - healed]
        hits = computed = 0
        starts = [start]
        if select.method == "unconditional_likelihood_normalized":
            starts.append(self._model.beginning)
        for begin in starts:
            for tokens in choices:
                hits += min(self._tree.find(begin), max(len(begin) - 1, 0))
                computed += self._tree.add([*begin, *tokens[:-1]])
        winner = max(range(len(choices)), key=lambda index: len(choices[index]))
        session.go_on(choices[winner], texts[winner], healed=healed)
        row = self._row(
            step,
            summarized(select),
            tokens=len(start),
            requests=len(choices) * len(starts),
            hit_tokens=hits,
            computed_tokens=computed,
        )
        return row, len(choices[winner])

    def _most_tokens(self, gen: Gen, forced: str) -> int:
        """So many tokens a generation writes at most. A pattern may limit it: what is forced, and then one for each
        character."""
        options = gen.options
        most = options.max_tokens or 1
        if options.choices is not None:
            return min(most, max(len(self._encoded(choice)) for choice in options.choices))
        longest = most_characters(options.regex) if options.regex is not None else None
        return most if longest is None else max(1, min(most, len(self._encoded(forced)) + longest - len(forced)))

    def _encoded(self, text: str) -> list[int]:
        """The tokens of a text alone."""
        encoder = self._model.encoder
        return encoder.encode(encoder.escape(text), at_start=False, bos=False)

    def _prompt(self, session: Played) -> array[int]:
        prompt = session.prompt()
        if min(prompt, default=0) >= 0:  # how long the others will be, nobody knows
            self._model.check_prompt(prompt)
        self.first_prompt = self.first_prompt or prompt
        return prompt

    def _filler(self, origin: Origin) -> str:
        return f" {origin.number}" + FILLER * (self._lengths[origin.number] - 1)

    def _row(self, step: Step, says: str, **counts: int | str | None) -> PlanRow:
        return PlanRow(run=self._number, branch=step.branch, written_at=step.written_at, says=says, **counts)  # type: ignore[arg-type]  # the fields of a row


def _constant_end(prompt: array[int]) -> array[int]:
    """The prompt behind what was never written, with one token before it: nothing is decided anew at the very start."""
    behind = next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] < 0), 0)
    return array("i", [0]) + prompt[behind:] if behind else prompt


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    alike = (len(set(tokens)) == 1 for tokens in zip(*prompts, strict=False))
    return sum(takewhile(bool, alike))

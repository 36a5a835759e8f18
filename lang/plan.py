"""What the calls of a traced program will ask of a model, in numbers: made by a backend, shown to a person."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .tables import as_html, as_text
from .trace import Ended, branch_text, counted, short


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One constant text, or one call.

    run: which of the runs that were planned together it belongs to.
    branch, written_at: see `Step`.
    says: the text or the call, on one line.
    tokens: of a constant, how many it has, alone; of a call, those of its prompt.
    hit_tokens: of those of a call's prompts, how many the cache has by then.
    computed_tokens: what the call computes, if it writes as much as it may.
    most_tokens: what the call writes, at most; None for a constant and where nothing is written anew.
    requests: samples of a generation, choices of a selection: each has the prompt.
    forced: the text that a constraint begins with, whatever the model says.
    """

    run: int
    branch: tuple[int, ...]
    written_at: str
    says: str
    tokens: int
    requests: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    most_tokens: int | None = None
    forced: str = ""

    @property
    def is_call(self) -> bool:
        return self.requests > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The calls of one run or of several that share what they can, as a cache that forgets nothing would see them.

    Exact, to a token or two at the edges of texts, for what a program says itself. What the model will write is counted
    at its most, which only the model can undercut. Guesses at forced text that turn out wrong are not in it, nor what
    an engine with pages computes again because it does not fill one.

    shared_tokens: with which the first prompts of all runs begin; 0 for a single run.
    slots: tokens that are in the cache at the end.
    num_slots: how many it has room for.
    ended: why the trace of a run ended early, by the run's number.
    """

    program: str
    runs: int
    rows: tuple[PlanRow, ...]
    shared_tokens: int
    slots: int
    num_slots: int
    ended: tuple[tuple[int, Ended], ...] = ()

    @property
    def calls(self) -> tuple[PlanRow, ...]:
        return tuple(row for row in self.rows if row.is_call)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each in full, as `engine.stats` counts them."""
        return sum(row.tokens * row.requests for row in self.calls)

    @property
    def hit_tokens(self) -> int:
        return sum(row.hit_tokens for row in self.calls)

    @property
    def computed_tokens(self) -> int:
        return sum(row.computed_tokens for row in self.calls)

    @property
    def most_tokens(self) -> int:
        """What the model writes in all, at most."""
        return sum((row.most_tokens or 0) for row in self.calls)

    def table(self) -> list[dict[str, Any]]:
        """A row for each constant and each call, as a dict: `pandas.DataFrame(plan.table())` takes it."""
        return [self._as_dict(row) for row in self.rows]

    def _as_dict(self, row: PlanRow) -> dict[str, Any]:
        run = {"run": row.run} if self.runs > 1 else {}
        call = row.is_call
        return {
            **run,
            "line": short(row.written_at),
            "branch": branch_text(row.branch),
            "says": row.says,
            "tokens": None if call else row.tokens,
            "prompt": row.tokens if call else None,
            "times": row.requests if call else None,
            "cached": row.hit_tokens if call else None,
            "computed": row.computed_tokens if call else None,
            "writes up to": row.most_tokens if call else None,
            "forced": row.forced,
        }

    def __str__(self) -> str:
        table = self.table()
        dull = {key for key in ("branch", "forced") if not any(row[key] for row in table)}
        dull |= {"times"} if all(row["times"] in (None, 1) for row in table) else set()
        shown = [{key: value for key, value in row.items() if key not in dull} for row in table]
        return "\n".join([self._headline(), as_text(shown), *self._summary()])

    def _repr_html_(self) -> str:
        return as_html(self.table(), above=self._headline(), below="\n".join(self._summary()))

    def _headline(self) -> str:
        runs = f"{counted(self.runs, 'run')}, " if self.runs > 1 else ""
        return f"{self.program}: {runs}{counted(len(self.calls), 'call')}"

    def _summary(self) -> list[str]:
        prompt, hit = self.prompt_tokens, self.hit_tokens
        share = f", {hit / prompt:.0%}" if prompt else ""
        lines = [
            f"prompt tokens: {prompt}, of which {hit} are in the cache by then{share}",
            f"computed: {self.computed_tokens} tokens, if all {self.most_tokens} that may be written are",
            f"slots: {self.slots} of {self.num_slots}",
        ]
        if self.slots > self.num_slots:
            lines[-1] += ": some prefixes will be evicted and computed again. Raise num_slots"
        if self.runs > 1:
            lines.insert(0, f"shared by all runs: {self.shared_tokens} tokens")
        ends = Counter(str(ended) for _, ended in self.ended)
        of_runs = [f"{count} of {self.runs} runs: " if self.runs > 1 else "" for count in ends.values()]
        return [*lines, *map("".join, zip(of_runs, ends, strict=True))]

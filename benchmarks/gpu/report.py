"""Verdicts, one a line as they come, and a table of what was measured."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


class NotHere(Exception):
    """This cannot be checked on such a machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    verdict: str  # PASS, FAIL or SKIP
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and what it should be at least or at most; None: it is only told."""

    name: str
    value: float
    unit: str
    target: str | None = None
    reached: bool | None = None


@dataclass
class Report:
    """What was found, as long as there is time: no check begins after `limit_s`. `only` leaves out other names."""

    limit_s: float
    only: str | None = None
    began: float = field(default_factory=time.monotonic)
    verdicts: list[Verdict] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def check(self, name: str, function: Callable[[], str]) -> None:
        """Run a check of that name, which says what it found, or raises `AssertionError` with what is wrong."""
        if self.only is not None and self.only not in name:
            return
        started = time.monotonic()
        if started - self.began > self.limit_s:
            verdict, detail = "SKIP", f"no time left: {self.limit_s:.0f} s are over"
        else:
            try:
                verdict, detail = "PASS", function()
            except NotHere as reason:
                verdict, detail = "SKIP", str(reason)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(place.filename).name}:{place.lineno}"
                verdict, detail = "FAIL", f"{type(error).__name__}: {error} ({where})"
        found = Verdict(name, verdict, " ".join(detail.split())[:400], round(time.monotonic() - started, 1))
        self.verdicts.append(found)
        print(f"{found.verdict}  {found.name}: {found.detail}  [{found.seconds} s]", flush=True)

    def figure(
        self, name: str, value: float, unit: str, least: float | None = None, most: float | None = None
    ) -> str:
        """Write down a number; as text."""
        target = f"≥ {least:g}" if least is not None else f"≤ {most:g}" if most is not None else None
        reached = value >= least if least is not None else value <= most if most is not None else None
        self.figures.append(Figure(name, value, unit, target, reached))
        return f"{name} {value:,.4g} {unit}"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def table(self) -> str:
        lines = ["| what | value | target | reached |", "| --- | --- | --- | --- |"]
        for figure in self.figures:
            reached = {True: "yes", False: "**no**", None: ""}[figure.reached]
            lines.append(f"| {figure.name} | {figure.value:,.4g} {figure.unit} | {figure.target or ''} | {reached} |")
        return "\n".join(lines)

    def write(self, file: Path) -> None:
        lines = [{"kind": kind, **asdict(one)} for kind in ("verdict", "figure") for one in getattr(self, f"{kind}s")]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

"""Gives workloads to one system and writes down how long it took: what all runners in `peers/` have in common.

A system sees a `Progress`: calls that can start, and the means to say what they gave. Only the standard library is
imported here, since this runs in every peer's environment.

    PYTHONPATH=benchmarks PYTHON benchmarks/peers/with_vllm.py --dtype float32 --out results.jsonl few_shot choices
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from workloads import PERSON, Answer, Call, Program, Writer, workload

PASSES = 3
"""Of a workload at most, each with new texts; the median counts."""

ENOUGH_S = 8.0
"""No further pass begins if it would end later than this."""

WARM_UP = {
    True: (Call(text="A note. JSON: ", regex=PERSON),),
    False: (Call(prompt=(Writer(-1).tokens(64),), output=4),),
}
"""Before the first workload: by whether that is constrained."""


@dataclass(frozen=True, slots=True)
class Task:
    """A call that can start: its prompt is known. `prompt` is empty where the call has `text`."""

    program: int
    number: int
    call: Call
    prompt: list[int]


@dataclass
class Progress:
    """Which calls of some programs can start, have started, and are done. A call is started once."""

    programs: Sequence[Program]
    _gave: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _taken: set[tuple[int, int]] = field(default_factory=set)

    @property
    def finished(self) -> bool:
        return len(self._gave) == sum(map(len, self.programs))

    def take(self, program: int | None = None) -> list[Task]:
        """All calls that can start now, or those of one program. They count as started."""
        found: list[Task] = []
        for p in range(len(self.programs)) if program is None else [program]:
            for number, call in enumerate(self.programs[p]):
                quoted = [part.call for part in call.prompt if isinstance(part, Answer)]
                if (p, number) not in self._taken and all((p, q) in self._gave for q in quoted):
                    self._taken.add((p, number))
                    prompt: list[int] = []
                    for part in call.prompt:
                        prompt += self._gave[p, part.call] if isinstance(part, Answer) else part
                    found.append(Task(p, number, call, prompt))
        return found

    def done(self, task: Task, answers: Sequence[Sequence[int]] = ()) -> None:
        """A call is done.

        Args:
            answers: the tokens of each sample; nothing where choices were scored, or the answer was constrained.
        """
        call = task.call
        if call.output:
            lengths, wanted = [len(answer) for answer in answers], [call.output] * call.samples
            assert lengths == wanted, f"answers of {wanted} tokens were wanted, and of {lengths} came"
        self._gave[task.program, task.number] = list(answers[0]) if answers else []


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class System(Protocol):
    """What is measured."""

    def run(self, progress: Progress) -> None:
        """Do all calls, each as soon as it can start."""

    def prepare(self, programs: Sequence[Program]) -> None:
        """Forget what was cached, and get ready for calls like those of `programs`. The clock does not run."""


def main(load: Callable[[str], System]) -> None:
    """The command line of a runner: `load(dtype)` makes the system, which then does the workloads named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON is appended to it for each workload")
    parser.add_argument("--tag", default="{}", help="JSON that goes into each line")
    parser.add_argument("workloads", nargs="+")
    options = parser.parse_args()
    began = time.perf_counter()
    system = load(options.dtype)
    warm_up = [WARM_UP[options.workloads[0] == "json"]]
    system.prepare(warm_up)
    _run(system, warm_up)
    loaded_s = time.perf_counter() - began
    for name in options.workloads:
        _write(options.out, {**json.loads(options.tag), "begun": name})
        line = {**json.loads(options.tag), "workload": name, "loaded_s": round(loaded_s, 2), **measure(system, name)}
        _write(options.out, line)


def measure(system: System, name: str) -> dict[str, object]:
    """Some passes over one workload. `value` is the median; more is better unless the unit is seconds."""
    values: list[float] = []
    spent = 0.0
    for seed in range(PASSES):
        work = workload(name, seed)
        system.prepare(work.programs)
        if work.before:
            _run(system, work.before)
        if work.one_by_one:
            seconds = [_run(system, [program]) for program in work.programs]
        else:
            seconds = [_run(system, work.programs)]
        values.append(statistics.median(seconds) if work.unit == "seconds" else work.amount / sum(seconds))
        spent += sum(seconds)
        if spent + sum(seconds) > ENOUGH_S:
            break
    return {"unit": work.unit, "value": statistics.median(values), "passes": values}


def _run(system: System, programs: Sequence[Program]) -> float:
    """Seconds that a system takes for some programs that start at once."""
    progress = Progress(programs)
    began = time.perf_counter()
    system.run(progress)
    seconds = time.perf_counter() - began
    assert progress.finished, "calls were left over"
    return seconds


def _write(file: Path, line: dict[str, object]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")

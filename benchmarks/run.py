"""All benchmarks beside all peers, one process at a time: `make bench`, or `python benchmarks/run.py [--quick]`.

Each result is a line of JSON in a file that is named after the commit, so a run that was interrupted goes on where it
was; delete the file to measure anew. At the end `table.py` makes a table of it. Peers that are not there yet are set up
first (`peers/setup.py`). A full run takes 25 minutes on two cores, a quick one 3; both want a machine that does nothing
else.

A process is one system in one dtype, and does one workload after the other: loading is not timed, caches are emptied
between two, and no workload has a text of another. What takes longer than the limit is stopped and stands in the table
as such. "Equal weights" is the first dtype of each system. The others are tried with `DECIDING` first: each
system does the whole list in another dtype only if that made the first of them faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import table
from peers import setup
from workloads import QUICK, WORKLOADS

from branchwise.runtime.models import resolve

HERE = Path(__file__).resolve().parent
LIMIT_S, QUICK_LIMIT_S = 120.0, 20.0
LOAD_S = 240.0
"""A process that has begun no workload by then is stopped."""

DECIDING = ("no_sharing", "one_stream")
CONSTRAINED = ("json",)
SCORING = ("choices",)


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A runner in `peers/`, its environment (None: branchwise's own), and what it is asked to do."""

    runner: str
    environment: str | None
    dtypes: tuple[str, ...]
    workloads: tuple[str, ...]
    quick: bool = True


def _without(*names: str) -> tuple[str, ...]:
    return tuple(name for name in WORKLOADS if name not in names)


SYSTEMS = {
    "branchwise": System(
        runner="with_branchwise",
        environment=None,
        dtypes=("float32", "bfloat16", "int4"),
        workloads=tuple(WORKLOADS),
    ),
    "vllm": System(
        runner="with_vllm", environment="vllm", dtypes=("float32", "bfloat16"), workloads=tuple(WORKLOADS)
    ),
    "llama.cpp, batched": System(
        runner="with_llama_cpp_batched",
        environment="llama_cpp",
        dtypes=("q4_1",),
        workloads=_without(*CONSTRAINED),
    ),
    "llama.cpp": System(
        runner="with_llama_cpp", environment="llama_cpp", dtypes=("q4_1",), workloads=_without(*SCORING)
    ),
    "transformers": System(
        runner="with_transformers",
        environment="transformers",
        dtypes=("float32", "bfloat16"),
        workloads=_without(*CONSTRAINED),
    ),
    "transformers, continuous": System(
        runner="with_transformers_continuous",
        environment="transformers",
        dtypes=("float32", "bfloat16"),
        workloads=_without(*SCORING, *CONSTRAINED),
        quick=False,
    ),
    "guidance": System(runner="with_guidance", environment="guidance", dtypes=("q4_1",), workloads=CONSTRAINED),
    "outlines": System(runner="with_outlines", environment="outlines", dtypes=("q4_1",), workloads=CONSTRAINED),
}

OWN = {"floors": ["floors.py"], "step_profile": ["step_profile.py"], "growth": ["growth.py"]}
"""Benchmarks of branchwise alone: each appends lines with its name as their `kind`."""


class Run:
    """A file of results, and what is still missing in it."""

    def __init__(self, out: Path, limit_s: float) -> None:
        self.out, self.limit_s = out, limit_s
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()

    def lines(self) -> list[dict[str, Any]]:
        return table.read(self.out)

    def write(self, **line: object) -> None:
        with self.out.open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def do(self, name: str, dtype: str, workloads: tuple[str, ...]) -> None:
        """Those of `workloads` that a system has not done in `dtype` yet."""
        system = SYSTEMS[name]
        if system.environment is not None and setup.installed(system.environment) is None:
            if not any(line.get("system") == name for line in self.lines()):
                self.write(kind="result", system=name, failed=f"not installed: {setup.failure(system.environment)}")
            return
        while missing := [workload for workload in workloads if self._result(name, dtype, workload) is None]:
            self._process(name, dtype, missing)

    def value(self, name: str, dtype: str, workload: str) -> float:
        """The rate of a system, 0 if there is none."""
        return float((self._result(name, dtype, workload) or {}).get("value", 0.0))

    def _result(self, name: str, dtype: str, workload: str) -> dict[str, Any] | None:
        found = [
            line
            for line in self.lines()
            if (line.get("system"), line.get("dtype"), line.get("workload")) == (name, dtype, workload)
        ]
        return found[-1] if found else None

    def _process(self, name: str, dtype: str, workloads: list[str]) -> None:
        """One process; if it has to be stopped, or fails, that is the result of the workload that it was at."""
        system = SYSTEMS[name]
        python = sys.executable if system.environment is None else setup.python_of(system.environment)
        tag = {"kind": "result", "system": name, "dtype": dtype}
        command = [python, HERE / "peers" / f"{system.runner}.py", "--dtype", dtype, "--out", self.out]
        log = self.out.with_suffix(f".{system.runner}.log")
        print(f"{name}, {dtype}: {' '.join(workloads)}", flush=True)
        with log.open("a") as stream:
            process = subprocess.Popen(
                [*map(str, command), "--tag", json.dumps(tag), *workloads],
                env=_environment(system),
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        size, since, begun = self.out.stat().st_size, time.monotonic(), None
        while process.poll() is None:
            time.sleep(0.2)
            if self.out.stat().st_size != size:
                size, since = self.out.stat().st_size, time.monotonic()
                begun = self.lines()[-1].get("begun", begun)
            if time.monotonic() - since > (LOAD_S if begun is None else self.limit_s):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if begun is not None:
                    self.write(**tag, workload=begun, over_s=self.limit_s)
                    return
        if process.returncode:
            reason = (log.read_text(errors="replace").strip().splitlines() or ["nothing said"])[-1]
            for workload in workloads if begun is None else [begun]:
                self.write(**tag, workload=workload, failed=f"{reason[:200]} (see {log.name})")


def _environment(system: System) -> dict[str, str]:
    own = {
        "BENCH_MODEL": str(resolve("smollm2-135m")),
        "BENCH_GGUF": str(setup.gguf()),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(setup.home() / "vllm-cache"),
        "PYTHONPATH": str(HERE),
    }
    if system.environment is None:
        own["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
    return {**os.environ, **own}


def machine() -> dict[str, object]:
    """What the results depend on that is not in the repository."""
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_before": round(os.getloadavg()[0], 2),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    """The commit, with a plus if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain") else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a share of the workloads, in one dtype")
    parser.add_argument("--out", type=Path, help="the file of results")
    options = parser.parse_args()
    name = f"results-{_commit()}{'-quick' if options.quick else ''}.jsonl"
    run = Run(options.out or setup.home() / name, QUICK_LIMIT_S if options.quick else LIMIT_S)
    subprocess.run([sys.executable, HERE / "peers" / "setup.py"], check=True)
    if not any(line.get("kind") == "machine" for line in run.lines()):
        versions = {peer: setup.installed(peer) for peer in setup.PEERS}
        run.write(kind="machine", limit_s=run.limit_s, peers=versions, **machine())
    for kind, command in OWN.items():
        if not any(line.get("kind") == kind for line in run.lines()) and not options.quick:
            print(kind, flush=True)
            subprocess.run(
                [sys.executable, HERE / command[0], "--out", run.out],
                env=_environment(SYSTEMS["branchwise"]),
                check=False,
            )
    for name, system in SYSTEMS.items():
        if system.quick or not options.quick:
            workloads = tuple(w for w in system.workloads if w in QUICK) if options.quick else system.workloads
            run.do(name, system.dtypes[0], workloads)
    for name, system in SYSTEMS.items():
        for dtype in () if options.quick else system.dtypes[1:]:
            run.do(name, dtype, DECIDING)
            if run.value(name, dtype, DECIDING[0]) > run.value(name, system.dtypes[0], DECIDING[0]):
                run.do(name, dtype, system.workloads)
    text = table.markdown(run.lines())
    run.out.with_suffix(".md").write_text(text)
    print(text)
    print(f"{run.out.with_suffix('.md')}: this table; {run.out}: what it was made from")


if __name__ == "__main__":
    main()

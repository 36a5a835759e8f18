"""A file of results as markdown: `python benchmarks/table.py FILE`. The targets stand here, beside what is compared.

A ratio says how many times as good branchwise is: its rate over the other's, or the other's seconds over its own. Where
a system was stopped at the limit, its rate is the most it can have been, and the ratio the least.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads import WORKLOADS, workload

OWN = "branchwise"

TARGETS: dict[str, float] = {
    "self_consistency_32": 2.5,
    "self_consistency_64": 2.5,
    "tree_of_thought": 2.5,
    "judge": 2.5,
    "chat_short": 2.5,
    "chat_long": 2.5,
    "few_shot": 4.0,
    "choices": 20.0,
    "no_sharing": 1.2,
}
"""Against the best peer, each system in its best dtype."""

PAIRS = (
    ("few_shot", None, "transformers", 20.0),
    ("one_stream", "int4", "llama.cpp", 0.9),
    ("one_stream", "float32", "transformers", 1.3),
)
"""A workload, branchwise's dtype (None: its best), a system, and the target against that one."""

FLOOR_TARGETS = {
    "decode 32 branches, 1,024 shared, 64 own": 1.4,
    "prefill 2,048": 1.35,
    "decode 64 branches, 4,096 shared": 1.4,
}
"""At most so many times the matmul floor."""

WIDE, NARROW, MOST_TIMES = "decode 64 branches, 4,096 shared", "decode 1 branch, 4,096 shared", 8.0
MOST_OVERHEAD = 0.08
MOST_SPINNING = 3.0

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Score:
    """What a system reached in a workload. `bounded`: it was stopped, and `value` is the best it can have been."""

    value: float
    dtype: str
    bounded: bool = False


def read(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def markdown(lines: Sequence[Line]) -> str:
    """All tables, and the misses."""
    misses: list[str] = []
    parts = [
        _machine(lines),
        _compared(lines, misses),
        _floors(lines, misses),
        _profile(lines, misses),
        _growth(lines),
    ]
    missed = ["## Misses", "", *([f"- {miss}" for miss in misses] or ["None of what was measured."])]
    return "\n\n".join("\n".join(part) for part in [*parts, missed] if part) + "\n"


def _machine(lines: Sequence[Line]) -> list[str]:
    found = [line for line in lines if line.get("kind") == "machine"]
    if not found:
        return []
    m = found[-1]
    peers = [f"- {name}: {versions or 'not installed'}" for name, versions in m["peers"].items()]
    rates = [
        f"- {line['dtype']}: {line['gb_s']:.0f} GB/s read, {line['gflops_s']:.0f} GFLOP/s in large products"
        for line in lines
        if line.get("kind") == "rates"
    ]
    return [
        f"{m['processor']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['system']}, Python {m['python']}, torch "
        f"{m['torch']}, OMP_NUM_THREADS {m['omp_num_threads'] or 'not set'}; {m['date']}, commit {m['commit']}; load "
        f"before: {m['load_before']}. Limit a workload: {m['limit_s']:.0f} s.",
        "",
        *rates,
        *peers,
    ]


def _scores(lines: Sequence[Line], name: str) -> dict[tuple[str, str], Score]:
    """For a workload, by system and dtype."""
    work = workload(name, 0)
    scores: dict[tuple[str, str], Score] = {}
    for line in lines:
        if line.get("workload") != name:
            continue
        key = line["system"], line["dtype"]
        if "value" in line:
            scores[key] = Score(line["value"], line["dtype"])
        elif "over_s" in line:
            limit = line["over_s"]
            value = limit / len(work.programs) if work.unit == "seconds" else work.amount / limit
            scores[key] = Score(value, line["dtype"], bounded=True)
    return scores


def _best(scores: Iterable[Score], unit: str) -> Score | None:
    return min(scores, key=lambda s: s.value if unit == "seconds" else -s.value, default=None)


def _ratio(own: Score, other: Score, unit: str) -> float:
    return other.value / own.value if unit == "seconds" else own.value / other.value


def _compared(lines: Sequence[Line], misses: list[str]) -> list[str]:
    results = [line for line in lines if line.get("kind") == "result"]
    systems = list(dict.fromkeys(line["system"] for line in results))
    if OWN not in systems:
        return []
    firsts: dict[str, str] = {}
    for line in results:
        firsts.setdefault(line["system"], line.get("dtype", ""))
    text: list[str] = []
    for title, best_dtype in (("Equal weights", False), ("Each system's best dtype", True)):
        rows: list[list[str]] = []
        for name in WORKLOADS:
            unit = workload(name, 0).unit
            of: dict[str, list[Score]] = {system: [] for system in systems}
            for (system, dtype), score in _scores(results, name).items():
                if best_dtype or dtype == firsts[system]:
                    of[system].append(score)
            by_system = {system: _best(scores, unit) for system, scores in of.items()}
            own = by_system[OWN]
            if own is None:
                continue
            peers = {system: score for system, score in by_system.items() if score is not None and system != OWN}
            row = [name, "s" if unit == "seconds" else f"{unit}/s", *(_cell(by_system[s], best_dtype) for s in systems)]
            best = _best(peers.values(), unit)
            if best is None:
                rows.append([*row, "-", "-"])
                continue
            ratio, target = _ratio(own, best, unit), TARGETS.get(name) if best_dtype else None
            rows.append([*row, _times(ratio, best.bounded), f"{target:g}x" if target else "-"])
            if target and ratio < target:
                who = next(system for system, score in peers.items() if score is best)
                misses.append(f"{name}: {ratio:.2f}x {who}, the best peer; target {target:g}x")
        text += ["", f"## {title}", "", *_rows(["workload", "unit", *systems, "to the best peer", "target"], rows)]
    pairs: list[list[str]] = []
    for name, dtype, system, target in PAIRS:
        unit, scores = workload(name, 0).unit, _scores(results, name)
        own = _best((s for (who, d), s in scores.items() if who == OWN and dtype in (None, d)), unit)
        of = system.split(",")[0]
        other = _best((s for (who, d), s in scores.items() if who.split(",")[0] == of), unit)
        if own is None or other is None:
            continue
        ratio = _ratio(own, other, unit)
        what = f"{name}, branchwise in {own.dtype} against {system} in {other.dtype}"
        pairs.append([what, _times(ratio, other.bounded), f"{target:g}x"])
        if ratio < target:
            misses.append(f"{what}: {ratio:.2f}x; target {target:g}x")
    failed = [
        f"- {line['system']}{', ' + line['workload'] if 'workload' in line else ''}: {line['failed']}"
        for line in results
        if "failed" in line
    ]
    text += ["", *_rows(["one system alone", "ratio", "target"], pairs)] if pairs else []
    return text[1:] + (["", "Not measured:", "", *failed] if failed else [])


def _cell(score: Score | None, with_dtype: bool) -> str:
    if score is None:
        return "-"
    number = f"{score.value:.3f}" if score.value < 1 else f"{score.value:.1f}"
    return f"{'stopped: ' if score.bounded else ''}{number}" + (f" ({score.dtype})" if with_dtype else "")


def _times(ratio: float, bounded: bool = False) -> str:
    return f"{'at least ' if bounded else ''}{ratio:.2f}x"


def _floors(lines: Sequence[Line], misses: list[str]) -> list[str]:
    rows: list[list[str]] = []
    seconds: dict[tuple[str, str], float] = {}
    for line in lines:
        if line.get("kind") != "floors":
            continue
        what, dtype = line["what"], line["dtype"]
        seconds[what, dtype] = line["seconds"]
        ratio, target = line["seconds"] / line["matmul_s"], FLOOR_TARGETS.get(what)
        matmul = [_ms(line["matmul_s"]), f"{ratio:.2f}", f"{target:g}" if target else "-"]
        machine = [_ms(line["machine_s"]), f"{line['seconds'] / line['machine_s']:.2f}"]
        rows.append([what, dtype, _ms(line["seconds"]), *matmul, *machine])
        if target and ratio > target:
            misses.append(f"{what}, {dtype}: {ratio:.2f} of the matmul floor; target at most {target:g}")
    if not rows:
        return []
    heads = ["step", "dtype", "ms", "matmul floor, ms", "time / floor", "target", "machine floor, ms", "time / floor"]
    text = ["## Floors", "", *_rows(heads, rows), ""]
    for dtype in dict.fromkeys(dtype for _, dtype in seconds):
        if (WIDE, dtype) in seconds and (NARROW, dtype) in seconds:
            times = seconds[WIDE, dtype] / seconds[NARROW, dtype]
            text.append(f"- {dtype}: 64 branches take {times:.1f}x a step of one; target at most {MOST_TIMES:g}x")
            if times > MOST_TIMES:
                misses.append(f"64 branches against 1, {dtype}: {times:.1f}x; target at most {MOST_TIMES:g}x")
    return text


def _profile(lines: Sequence[Line], misses: list[str]) -> list[str]:
    profiles = [line for line in lines if line.get("kind") == "step_profile"]
    if not profiles:
        return []
    names = list(dict.fromkeys(part for line in profiles for part in line["shares"]))
    rows = [[name, *(f"{line['shares'].get(name, 0):.1%}" for line in profiles)] for name in names]
    heads = ["part", *(line["dtype"] for line in profiles)]
    text = ["## A step at batch 32, by what it is spent on", "", *_rows(heads, rows), ""]
    for line in profiles:
        told = f"{line['dtype']}: {line['overhead']:.1%} of a step is not the model's; target under {MOST_OVERHEAD:.0%}"
        text.append(f"- {told}")
        if line["overhead"] >= MOST_OVERHEAD:
            misses.append(told)
    for line in lines:
        if line.get("kind") == "spinning":
            beside = f"a step beside {line['threads']} user threads in pure Python, {line['dtype']}"
            told = f"{beside}: {line['ratio']:.1f}x an idle one; target at most {MOST_SPINNING:g}x"
            text.append(f"- {told}")
            if line["ratio"] > MOST_SPINNING:
                misses.append(told)
    return text


def _growth(lines: Sequence[Line]) -> list[str]:
    found = [line for line in lines if line.get("kind") == "growth"]
    if not found:
        return []
    steps = [
        [
            str(g["branches"]),
            f"{g['shared']:,}",
            _ms(g["prefix_s"]),
            _ms(g["step_s"]),
            f"{g['slots']:,}",
            f"{g['kv_mib']:.0f}",
        ]
        for g in found
        if g["what"] != "programs"
    ]
    programs = [
        [f"{g['programs']:,}", f"{g['seconds']:.2f}", f"{g['programs_s']:.0f}", f"{g['more_mib']:.0f}"]
        for g in found
        if g["what"] == "programs"
    ]
    return [
        "## Growth",
        "",
        *_rows(["branches", "shared tokens", "prefix, ms", "step, ms", "slots", "of KV, MiB"], steps),
        "",
        *_rows(["programs at once", "s", "programs/s", "more memory, MiB"], programs),
    ]


def _rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return ["| " + " | ".join(row) + " |" for row in [heads, rule, *rows]]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


if __name__ == "__main__":
    print(markdown(read(Path(sys.argv[1]))))

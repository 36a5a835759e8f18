"""How fast it is, beside what the GPU allows: decoding, prompts, branches, and the other benchmarks' workloads."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from harness import measure
from peers.with_branchwise import Branchwise
from place import Place, backend
from random_model import EIGHT_B, ONE_B, SMALL, Shape, random_engine
from report import NotHere, Report
from steps import Branches, step_s
from workloads import Writer

from branchwise.runtime.attention import AttnSpec
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.gpu import calibration

WORKLOADS = ("few_shot", "tree_of_thought", "self_consistency_64", "no_sharing", "one_stream", "first_token_cold",
             "first_token_warm")  # fmt: skip
SMALL_WORKLOADS = ("one_stream",)


class Speed:
    """The measurements of one model, on one engine."""

    def __init__(self, place: Place, shape: Shape, report: Report, folder: Path) -> None:
        self._place, self._shape, self._report = place, shape, report
        options: dict[str, Any] = {"max_step_tokens": 8192, "num_slots": 1 << 16}
        if place.small:
            options = {"max_step_tokens": 256, "num_slots": 4096}
        with backend(place):
            self.engine = random_engine(folder, shape, device=place.device, dtype=str(place.dtype)[6:], **options)

    def decode(self) -> str:
        """64 branches that share little, a step: its share of the floor of reading weights and keys."""
        branches = Branches(4, 64, 24) if self._place.small else Branches(64, 512, 64)
        seconds = step_s(self.engine, branches)
        read = self._shape.weights * self._place.dtype.itemsize
        read += (branches.shared + branches.count * branches.own) * self._shape.kv_bytes(self._place.dtype.itemsize)
        floor = read / self._place.bytes_s()
        name = f"{self._shape.name}: decode of {branches.count}"
        told = self._report.figure(f"{name}, tokens", branches.count / seconds, "tokens/s")
        least = 0.8 if self._shape.name == "8B" else None
        share = self._report.figure(f"{name}, share of the bandwidth floor", floor / seconds, "", least=least)
        return f"{told}; {share}"

    def idle(self) -> str:
        """How much of a step the GPU waits: a step beside what its graph alone takes, so draws count as waiting."""
        runner: Any = self.engine._loop._runner
        if runner._replays is None:
            raise NotHere("nothing is recorded here")
        branches = Branches(64, 512, 64)
        seconds = step_s(self.engine, branches)
        last = runner._attention._wrappers  # a graph is replayed only while its own plan is the last one
        recorded = [each for each in runner._replays._recorded.values() if each.wrappers is last]
        assert recorded, "the last step was not a recorded one"
        alone = self._place.seconds(recorded[0].replay)
        return self._report.figure(f"{self._shape.name}: GPU idle in a step of 64", 1 - alone / seconds, "", most=0.03)

    def prefill(self) -> str:
        """A prompt that nobody has seen."""
        rows = 200 if self._place.small else 8192
        seconds = []
        for seed in range(4):
            self.engine.reset_cache()
            prompt = list(Writer(seed).tokens(rows))
            began = time.perf_counter()
            self.engine.generate(prompt, max_tokens=1, temperature=0)
            seconds.append(time.perf_counter() - began)
        fastest = min(seconds[1:])
        peak, of_what = self._place.flops_s()
        share = self._shape.prefill_flops(rows) / fastest / peak
        name = f"{self._shape.name}: prompt of {rows:,}"
        least = 0.55 if self._shape.name == "8B" else None
        told = self._report.figure(f"{name}, tokens", rows / fastest, "tokens/s")
        return f"{told}; {self._report.figure(f'{name}, share {of_what}', share, '', least=least)}"

    def branches(self) -> str:
        """64 branches over 8,192 shared tokens, read once and read by each."""
        branches = Branches(4, 256, 24) if self._place.small else Branches(64, 8192, 64)
        runner: Any = self.engine._loop._runner
        cost, times = runner.cost, []
        for each in (cost, CostModel(max_levels=0)):
            runner.cost = each
            times.append(step_s(self.engine, branches))
        runner.cost = cost
        name = f"{self._shape.name}: {branches.count} branches over {branches.shared:,}"
        least = None if self._place.small else 3.0
        told = self._report.figure(f"{name}, tokens", branches.count / times[0], "tokens/s")
        return f"{told}; {self._report.figure(f'{name}, gain of sharing', times[1] / times[0], 'times', least=least)}"

    def workload(self, name: str) -> str:
        """A workload as it is, and with nothing read once for several rows."""
        runner: Any = self.engine._loop._runner
        cost, told, system = runner.cost, [], Branchwise(self.engine)
        for suffix, each in (("", cost), (", cascade off", CostModel(max_levels=0))):
            runner.cost = each
            found = measure(system, name)
            unit = "s" if found["unit"] == "seconds" else f"{found['unit']}/s"
            told.append(self._report.figure(f"{self._shape.name}: {name}{suffix}", float(str(found["value"])), unit))
            if name.startswith(("first_token", "one_stream", "no_sharing")):
                break  # nothing is shared
        runner.cost = cost
        return "; ".join(told)


def check_all(place: Place, shape: Shape, report: Report, folder: Path) -> None:
    """All measurements of one model, a verdict each. If there is no engine, that is the only one."""
    made: list[Speed] = []

    def start() -> str:
        began = time.perf_counter()
        made.append(Speed(place, shape, report, folder))
        return f"{made[0].engine!r} in {time.perf_counter() - began:.1f} s"

    report.check(f"{shape.name}: an engine", start)
    if not made:
        return
    speed = made[0]
    for check in (speed.decode, speed.idle, speed.prefill, speed.branches):
        report.check(f"{shape.name}: {check.__name__}", check)
    for name in SMALL_WORKLOADS if place.small else WORKLOADS:
        report.check(f"{shape.name}: {name}", partial(speed.workload, name))
    speed.engine.close()
    made.clear()
    del speed, check
    place.release()


def worth_sharing(place: Place, report: Report) -> str:
    """From where on a shared level pays: what an engine measures at its first start."""
    told = []
    if place.small:
        calibration.SHARED, calibration.REPEATS = (64, 256), 1
    for shape in (SMALL,) if place.small else (ONE_B, EIGHT_B):
        spec = AttnSpec(shape.heads, shape.kv, shape.size, shape.size**-0.5)
        times = calibration.measure(place.attention(), spec, place.dtype, place.device, place.record())
        for shared, (without, with_level) in zip(calibration.SHARED, times, strict=True):
            name = f"{calibration.ROWS} rows over {shared:,} tokens, heads of {shape.size}"
            told.append(f"{shared}: {without / with_level:.2f}")
            report.figure(f"{name}: a shared level", without / with_level, "times as fast")
        report.figure(f"heads of {shape.size}: least tokens to spare", calibration.break_even(times), "tokens")
    return ", ".join(told)

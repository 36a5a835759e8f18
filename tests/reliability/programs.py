"""Random programs on engines in every state, each of their calls asked again of an engine with an empty cache.

    python tests/reliability/programs.py --count 10000

A program says tokens, generates greedily, by chance with a seed, or under a constraint, and forks. Many run at once, on
an engine of a random setup. A token that differs is *wrong*, unless the two candidates were within 1e-4 of each other
by the empty engine's own scores; then it is a *near-tie*, is counted and listed, and nothing is tried again.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from branchwise.runtime import Engine, Result
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.attention.reference import ReferenceAttention
from branchwise.runtime.policies import EVICTION, SCHEDULING
from branchwise.runtime.sampling import SamplingParams, gumbel

NEAR = 1e-4
VOCAB = 400
PROGRAMS_AN_ENGINE = 50
AT_ONCE = 12
REGEXES = ("(yes|no) [0-9]{1,3}", "[ab]{2,6}", '\\{"a": "[a-z]{1,4}"\\}')

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """One call that a program made, and what it got."""

    prompt: Tokens
    params: dict[str, Any]
    result: Result


@dataclass
class Tally:
    """What came of it."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    near: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counted = ", ".join(f"{self.counts[name]:,} {name}" for name in ("programs", "calls", "tokens", "forks"))
        rest = ", ".join(f"{self.counts[name]:,} {name}" for name in ("hits", "evicted", "retracted", "restored"))
        return f"{counted}; {rest}; near-ties: {len(self.near)}, wrong: {len(self.wrong)}"


def setup(rng: random.Random) -> dict[str, Any]:
    """Options of an engine."""
    page_size = rng.choice([1, 1, 16])
    step = rng.choice([7, 16, 64, 512])
    return {
        "num_slots": rng.choice([160, 320, 2048]),
        "page_size": page_size,
        "max_step_tokens": step,
        "max_running": min(step, rng.choice([4, 8, 32])),
        "policy": rng.choice(SCHEDULING),
        "eviction": rng.choice([*EVICTION]),
        "host_cache_bytes": rng.choice([0, 0, 1 << 20]),
        "jump_forward": rng.random() < 0.8,
        "deterministic": rng.random() < 0.15,
    }


def bend(engine: Engine, groups: str = "auto", attention: str = "fastest", admits: str = "auto") -> None:
    """Force what an engine chooses by itself.

    groups: "on", "off" or "auto"; attention: "fastest" or "reference"; admits: "all" who fit now, or "auto": with
    regard to what those that run will need.
    """
    if admits == "all":
        engine._loop._scheduler._still_needed = float  # type: ignore[method-assign]  # 0.0
    if groups != "auto":
        engine._loop._runner.cost = CostModel(price=0.0, max_levels=3) if groups == "on" else None
    if attention == "reference":
        engine._loop._runner._attention = ReferenceAttention()


class Runner:
    """Programs of one seed on one engine."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.asked: list[Asked] = []
        self.forks = 0
        self._stems = [self._tokens(rng, rng.randint(5, 60)) for _ in range(4)]

    def run(self, count: int) -> None:
        seeds = [self.rng.randrange(1 << 30) for _ in range(count)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(self._program, random.Random(seed)) for seed in seeds]:
                done.result(120)

    def _program(self, rng: random.Random) -> None:
        stem = rng.choice(self._stems)
        salt = rng.choice([None, None, None, "a"])
        branches = [stem[: rng.randint(1, len(stem))]]
        for _ in range(rng.randint(1, 4)):
            branch = rng.randrange(len(branches))
            match rng.choice(["say", "gen", "gen", "gen", "fork", "reset"]):
                case "say":
                    branches[branch] += self._tokens(rng, rng.choice([1, 2, 17]))
                case "gen":
                    branches[branch] += self._generate(rng, branches[branch], salt)
                case "fork" if len(branches) < 3:
                    self.forks += 1
                    branches += [branches[branch]] * rng.randint(1, 2)
                case "reset" if rng.random() < 0.05:
                    self.engine.reset_cache()
        for tokens in branches:
            self._generate(rng, tokens, salt)

    def _generate(self, rng: random.Random, prompt: Tokens, salt: str | None) -> Tokens:
        params: dict[str, Any] = {"max_tokens": rng.choice([1, 3, 6, 20]), "ignore_eos": True, "temperature": 0.0}
        match rng.choice(["greedy", "seeded", "regex"]):
            case "seeded":
                params |= {"temperature": 1.0, "seed": rng.randrange(100)}
            case "regex":
                params |= {"regex": rng.choice(REGEXES), "max_tokens": 8, "ignore_eos": False}
        result = self.engine.generate(prompt, cache_salt=salt, **params)
        self.asked.append(Asked(prompt, params, result))
        return result.tokens

    @staticmethod
    def _tokens(rng: random.Random, count: int) -> Tokens:
        return tuple(rng.randrange(3, VOCAB - 1) for _ in range(count))


class Judge:
    """An engine that computes every call from nothing."""

    def __init__(self, folder: Path, *, jump_forward: bool) -> None:
        self._engine = Engine(folder, num_slots=2048, jump_forward=jump_forward)

    def close(self) -> None:
        self._engine.close()

    def judge(self, asked: Asked, tally: Tally, where: str) -> None:
        self._engine.reset_cache()
        right, got = self._engine.generate(asked.prompt, **asked.params).tokens, asked.result.tokens
        tally.counts["calls"] += 1
        tally.counts["tokens"] += len(got)
        cut = asked.result.detail == "slots"  # its pool was too small for more
        tally.counts["cut short"] += cut
        if got == (right[: len(got)] if cut else right):
            return
        place = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
        what = f"{where}: {len(asked.prompt)} tokens, {asked.params}: token {place} of {got} should be as in {right}"
        if place < min(len(got), len(right)) and self._gap(asked, right[:place], right[place], got[place]) < NEAR:
            tally.near.append(what)
        else:
            tally.wrong.append(what)

    def _gap(self, asked: Asked, before: Tokens, first: int, second: int) -> float:
        """By how much the two candidates differ in what they are chosen by."""
        prompt = asked.prompt + before
        options = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "top_logprobs": VOCAB}
        logprobs = self._engine.generate(prompt, **options).logprobs
        assert logprobs is not None
        scores = dict(logprobs[0].top)
        gap = scores[first] - scores[second]
        if asked.params["temperature"] > 0:
            noise = SamplingParams(temperature=asked.params["temperature"], seed=asked.params["seed"])
            both = gumbel(torch.tensor([first, second]), noise, len(prompt)).tolist()
            gap = gap / noise.temperature + both[0] - both[1]
        return abs(gap)


def check(engine: Engine) -> str:
    """What is wrong with an engine that is idle; empty if nothing is."""
    engine.check()
    stats = engine.stats
    idle = stats.protected_slots == stats.held_slots == stats.running == stats.waiting == 0
    return "" if idle and stats.free_slots + stats.evictable_slots == stats.num_slots else f"not idle: {stats}"


def try_setup(folder: Path, options: dict[str, Any], rng: random.Random, count: int, tally: Tally) -> None:
    """`count` programs on one engine; half of them, sometimes, on another one that has loaded its cache."""
    kinds = (["auto", "on", "off"], ["fastest", "fastest", "reference"], ["all", "auto"])
    bent = [rng.choice(kind) for kind in kinds]
    where = f"{folder.name}, {options}, groups {bent[0]}, attention {bent[1]}, admits {bent[2]}"
    asked: list[Asked] = []
    with tempfile.TemporaryDirectory() as place:
        saved = Path(place) / "cache" if rng.random() < 0.2 else None
        for turn in range(2 if saved else 1):
            with Engine(folder, **options) as engine:
                bend(engine, *(("off", "fastest") if options["deterministic"] else bent[:2]), bent[2])
                if saved and turn:
                    engine.load_cache(saved)
                runner = Runner(engine, rng)
                runner.run(count // 2 if saved else count)
                if wrong := check(engine):
                    tally.wrong.append(f"{where}: {wrong}")
                if saved and not turn:
                    engine.save_cache(saved)
                stats = engine.stats
                tally.counts["forks"] += runner.forks
                tally.counts["hits"] += stats.hit_tokens
                tally.counts["evicted"] += stats.evicted_slots
                tally.counts["retracted"] += stats.retracted
                tally.counts["restored"] += stats.restored_tokens
                asked += runner.asked
    tally.counts["programs"] += count
    judge = Judge(folder, jump_forward=options["jump_forward"])
    for one in asked:
        judge.judge(one, tally, where)
    judge.close()


def run(folders: Sequence[Path], count: int, seed: int, tally: Tally) -> Iterator[Tally]:
    """`count` programs of a seed; the tally so far after each engine."""
    rng = random.Random(seed)
    while tally.counts["programs"] < count:
        some = min(PROGRAMS_AN_ENGINE, count - tally.counts["programs"])
        try_setup(rng.choice(folders), setup(rng), rng, max(2, some // 2 * 2), tally)
        yield tally


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.conftest import CONFIGS, save_tiny, train_tokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=["llama", "qwen3", "gemma3"], choices=[*CONFIGS])
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    start, tally = time.monotonic(), Tally()
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / kind for kind in options.kinds]
        for kind, folder in zip(options.kinds, folders, strict=True):
            save_tiny(kind, folder, train_tokenizer())
        for number, _ in enumerate(run(folders, options.count, options.seed, tally)):
            if number % 10 == 9:
                print(f"{time.monotonic() - start:7.0f} s  {tally}", flush=True)
    print(f"{time.monotonic() - start:7.0f} s  {tally}")
    for line in [*(f"near-tie: {one}" for one in tally.near), *(f"WRONG: {one}" for one in tally.wrong[:20])]:
        print(line)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

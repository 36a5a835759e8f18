"""What `deterministic=True` costs: seconds of the same work with and without it, in turns, in one process.

    python benchmarks/deterministic.py --model smollm2-135m --rounds 5

Each figure is the median over the rounds, with the least and the most behind it; the last column is the ratio of the
medians. Of a prompt nothing is cached.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from branchwise.runtime import Engine

Work = Callable[[Engine, random.Random], None]


def ask(engine: Engine, rng: random.Random, prompt: int, answer: int, n: int) -> None:
    tokens = [rng.randrange(1000, 40000) % engine.model.vocab_size for _ in range(prompt)]
    engine.generate(tokens, n=n, max_tokens=answer, temperature=1.0, ignore_eos=True, seed=rng.randrange(1 << 30))


WORK: dict[str, Work] = {
    "prompt of 1,000 tokens": lambda engine, rng: ask(engine, rng, 1000, 1, 1),
    "60 tokens of one answer": lambda engine, rng: ask(engine, rng, 8, 60, 1),
    "60 tokens of 8 answers": lambda engine, rng: ask(engine, rng, 8, 60, 8),
    "20 tokens of 8 answers behind 1,500": lambda engine, rng: ask(engine, rng, 1500, 20, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    engines = [Engine(options.model, num_slots=8192, dtype=options.dtype, deterministic=d) for d in (False, True)]
    took: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in WORK}
    for round_number in range(options.rounds + 1):  # the first one warms up
        for name, work in WORK.items():
            for engine, seconds in zip(engines, took[name], strict=True):
                engine.reset_cache()
                start = time.perf_counter()
                work(engine, random.Random(round_number))
                if round_number:
                    seconds.append(time.perf_counter() - start)
    print(f"{options.model}, {options.dtype}, {engines[0].num_threads} threads, {options.rounds} rounds")
    for name, (default, deterministic) in took.items():
        ratio = statistics.median(deterministic) / statistics.median(default)
        print(f"{name:<37}{_seconds(default)}{_seconds(deterministic)}  x {ratio:.2f}")
    for engine in engines:
        engine.close()


def _seconds(values: list[float]) -> str:
    return f"  {statistics.median(values):7.3f} s ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()

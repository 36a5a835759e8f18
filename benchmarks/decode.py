"""What a decode step costs: rows that share a prefix and have an end of their own, beside the model's matmuls alone.

    python benchmarks/decode.py [--dtype float32] [--quantization int4] [--temperature 0] [--spinning 4]

The demo model, greedy unless told. Each line is one engine run of 24 steps: the median step, the same number of rows
through the model's matrices alone in the same run, and the share of the step that is not the model (scheduling, tree,
layout, sampling, text, callbacks). With `--spinning`, so many threads run Python code beside it and nothing else.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from branchwise import Engine
from branchwise.runtime import GenerateParams
from branchwise.runtime.layout import Layout

STEPS, OWN = 24, 64
CASES = [(1, 1024), (8, 1024), (32, 1024), (64, 1024), (1, 4096), (32, 4096), (64, 4096), (16, 0)]


def matmuls(model: Any, rows: int) -> float:
    """Seconds for `rows` rows through every matrix of a lean model, the head included."""
    has = model._traits
    inputs = {
        size: torch.randn(rows, size).to(model.dtype) for size in {has.hidden, has.queries, has.inner}
    }

    def once() -> float:
        start = time.perf_counter()
        for layer in model._layers:
            for linear, size in ((layer.qkv, has.hidden), (layer.out, has.queries), (layer.gate_up, has.hidden)):
                linear(inputs[size])
            layer.down(inputs[has.inner])
        model._head(inputs[has.hidden])
        return time.perf_counter() - start

    with torch.inference_mode():
        once()
        return statistics.median(once() for _ in range(7))


def decode(engine: Engine, rows: int, shared: int, temperature: float) -> tuple[float, float]:
    """The median seconds of a step in which all rows decode, and of its forward pass."""
    rng = random.Random(rows + shared)
    prefix = [rng.randrange(100, 40_000) for _ in range(shared)]
    steps: list[float] = []
    passes: list[float] = []
    step, forward = engine._loop._step, engine._loop._forward

    def timed_step() -> None:
        start = time.perf_counter()
        step()
        steps.append(time.perf_counter() - start)

    def timed_forward(layout: Layout) -> torch.Tensor:
        start = time.perf_counter()
        logits = forward(layout)
        passes.append(time.perf_counter() - start)
        return logits

    if prefix:
        engine.generate(prefix, max_tokens=1)
    done: list[Future[object]] = [Future() for _ in range(rows)]
    with patch.object(engine._loop, "_step", timed_step), patch.object(engine._loop, "_forward", timed_forward):
        for number in range(rows):
            own = [rng.randrange(100, 40_000) for _ in range(OWN if shared else 128)]
            engine.start(
                array("i", prefix + own),
                GenerateParams(max_tokens=STEPS + 8, temperature=temperature, ignore_eos=True, seed=number),
                on_delta=lambda sample, delta: None,
                on_done=lambda sample, result, number=number: done[number].set_result(result),
            )
        for future in done:
            future.result()
    return statistics.median(steps[-STEPS:-2]), statistics.median(passes[-STEPS:-2])


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Threads that keep the interpreter busy."""
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            pass

    threads = [threading.Thread(target=spin) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    done.set()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--spinning", type=int, default=0)
    args = parser.parse_args()
    options = {"dtype": args.dtype, "quantization": args.quantization, "num_slots": 24_000, "max_step_tokens": 2048}
    print("| rows | shared | step, ms | matmuls alone, ms | step / matmuls | not the model |")
    print("|---:|---:|---:|---:|---:|---:|")
    with Engine("smollm2-135m", **options) as engine:
        for rows, shared in CASES:
            alone = matmuls(engine.model, rows)
            with spinning(args.spinning):
                whole, passed = decode(engine, rows, shared, args.temperature)
            print(
                f"| {rows} | {shared:,} | {1000 * whole:.1f} | {1000 * alone:.1f} | {whole / alone:.2f} | "
                f"{1 - passed / whole:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""How far a step is from what the machine allows: `python benchmarks/floors.py [--out FILE]`.

Two floors, measured in the same run as the steps:

- the *matmul floor*: the model's own products alone at that many rows, in the faster of torch's plain `linear` and
  oneDNN's own order of weights, and attention: the longer of reading each key and value once, and its arithmetic;
- the *machine floor*: reading each weight, key and value once, or all arithmetic, whichever takes longer.

Reading is at the bandwidth of summing a buffer far larger than any cache, arithmetic at the rate of a large product.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from steps import Branches, append, step_s
from torch import Tensor
from torch.nn import functional as F
from workloads import Writer

from branchwise.runtime import Engine
from branchwise.runtime.kv import bytes_per_slot
from branchwise.runtime.model.configuration import read_config
from branchwise.runtime.model.linear import Linear, dense
from branchwise.runtime.models import resolve

MODEL = "smollm2-135m"
STREAM_BYTES = 1 << 29
LARGE = 3072

DECODE = Branches(32, 1024, 64)
PREFILL = 2048
WIDE, NARROW = Branches(64, 4096, 16), Branches(1, 4096, 16)


@dataclass(frozen=True, slots=True)
class Rates:
    """Of this machine, on torch's threads: bytes read a second, and floating-point operations a second."""

    bytes_s: float
    flops_s: float


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model of the Llama family: its matrices as [N, K] of one layer, and of the head."""

    layers: int
    matrices: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    heads: int
    head_dim: int

    @property
    def weights(self) -> int:
        return self.layers * sum(n * k for n, k in self.matrices) + self.head[0] * self.head[1]

    def matmul_flops(self, rows: int, logits: int) -> int:
        return 2 * (rows * self.layers * sum(n * k for n, k in self.matrices) + logits * self.head[0] * self.head[1])

    def attention_flops(self, pairs: int) -> int:
        """Scores and sums for so many pairs of a row and a key that it sees."""
        return 4 * pairs * self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Step:
    """What a step must do.

    keys: distinct tokens that are attended to; pairs: of a row and a key that it sees.
    chunks: the rows may go in so many passes; the fastest way counts.
    """

    rows: int
    logits: int
    keys: int
    pairs: int
    chunks: tuple[int, ...] = (1,)


def shapes() -> Shapes:
    c = read_config(resolve(MODEL))
    heads, keys, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    hidden, inner = c.hidden_size, c.intermediate_size
    matrices = (((heads + 2 * keys) * d, hidden), (hidden, heads * d), (2 * inner, hidden), (hidden, inner))
    return Shapes(c.num_hidden_layers, matrices, (c.vocab_size, hidden), heads, d)


def least(run: Callable[[], object], repeats: int = 7) -> float:
    """The least seconds of some: what disturbs only adds to them."""
    run()
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def rates(dtype: torch.dtype) -> Rates:
    buffer = torch.ones(STREAM_BYTES // 4)
    a, b = torch.randn(2, LARGE, LARGE).to(dtype)
    linear = dense(b)
    seconds = min(least(lambda: a @ b, 4), least(lambda: linear(a), 4))
    return Rates(STREAM_BYTES / min(least(buffer.sum), least(buffer.amax)), 2 * LARGE**3 / seconds)


class Products:
    """All matrices of a model, with any values, each in a place of its own, as in a step."""

    def __init__(self, of: Shapes, dtype: torch.dtype) -> None:
        def plain(weight: Tensor) -> Linear:
            return lambda x: F.linear(x, weight)

        def one(make: Callable[[Tensor], Linear], n: int, k: int) -> tuple[Linear, int]:
            return make(torch.randn(n, k).mul_(0.02).to(dtype)), k

        self._ways = [
            ([one(make, n, k) for _ in range(of.layers) for n, k in of.matrices], one(make, *of.head))
            for make in (plain, dense)
        ]
        self._dtype = dtype

    @torch.inference_mode()
    def seconds(self, step: Step) -> float:
        found: list[float] = []
        for chunks in step.chunks:
            inputs = {k: torch.ones(step.rows // chunks, k, dtype=self._dtype) for _, k in self._ways[0][0]}
            for layers, (head, k) in self._ways:
                last = torch.ones(step.logits, k, dtype=self._dtype)
                found.append(chunks * least(partial(_once, layers, head, inputs, last), 5))
        return min(found)


def _once(layers: Sequence[tuple[Linear, int]], head: Linear, inputs: dict[int, Tensor], last: Tensor) -> None:
    for linear, width in layers:
        linear(inputs[width])
    head(last)


def floors(step: Step, of: Shapes, products: Products, rates: Rates, slot_bytes: int, item: int) -> tuple[float, float]:
    """Seconds of the matmul floor and of the machine floor."""
    kv, attention = step.keys * slot_bytes, of.attention_flops(step.pairs)
    matmul = products.seconds(step) + max(kv / rates.bytes_s, attention / rates.flops_s)
    flops = of.matmul_flops(step.rows, step.logits) + attention
    return matmul, max((of.weights * item + kv) / rates.bytes_s, flops / rates.flops_s)


def decode_step(branches: Branches) -> Step:
    count, path = branches.count, branches.shared + branches.own
    return Step(count, count, branches.shared + count * branches.own, count * path)


def prefill_s(engine: Engine) -> float:
    """Seconds for a prompt that nobody has seen, and the token after it; the median."""
    write, seconds = Writer(1), []
    for _ in range(5):
        prompt = write.tokens(PREFILL)
        engine.reset_cache()
        began = time.perf_counter()
        engine.generate(prompt, max_tokens=1, temperature=0)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    of = shapes()
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        with Engine(MODEL, dtype=name) as engine:
            chunks = PREFILL // engine.config.max_step_tokens
            prefill = Step(PREFILL, 1, PREFILL, PREFILL * (PREFILL + 1) // 2, (1, chunks))
            steps = {
                "decode 32 branches, 1,024 shared, 64 own": (decode_step(DECODE), step_s(engine, DECODE)),
                "prefill 2,048": (prefill, prefill_s(engine)),
                "decode 64 branches, 4,096 shared": (decode_step(WIDE), step_s(engine, WIDE)),
                "decode 1 branch, 4,096 shared": (decode_step(NARROW), step_s(engine, NARROW)),
            }
            slot_bytes = bytes_per_slot(engine.model.specs, dtype)
        products, machine = Products(of, dtype), rates(dtype)
        append(out, kind="rates", dtype=name, gb_s=machine.bytes_s / 1e9, gflops_s=machine.flops_s / 1e9)
        for what, (step, seconds) in steps.items():
            matmul, least_s = floors(step, of, products, machine, slot_bytes, dtype.itemsize)
            append(out, kind="floors", what=what, dtype=name, seconds=seconds, matmul_s=matmul, machine_s=least_s)


if __name__ == "__main__":
    main()

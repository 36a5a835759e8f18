"""A soak: a tiny model and 512 slots under everything at once, for as long as is asked; nothing may be lost.

    python benchmarks/soak.py --minutes 5 --seed 1
    python benchmarks/soak.py --minutes 5 --at-once 10000 --cancel 0.5

Every greedy answer is compared with the one that its prompt got first, and the engine is checked when idle. The exit
code is 1 if anything was lost, wrong or left hanging. What the process holds (resident memory, open files, threads) is
told after each fifth of the time: it grows at first, by what is answered for the first time, and must then stay.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from branchwise.runtime import Engine, GenerateParams, OutOfSlots, Result
from branchwise.runtime.policies import EVICTION, SCHEDULING

NUM_SLOTS = 512
MOST_AT_ONCE = 24
ANSWER_S = 60.0


def tiny_model(folder: Path) -> Path:
    """A random Llama over single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {character: i + 1 for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.3, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Soak:
    """Starts random requests, a bounded number at once, and judges what comes back."""

    def __init__(self, engine: Engine, seed: int, at_once: int = MOST_AT_ONCE, cancel: float = 0.1) -> None:
        self.engine, self.at_once, self.cancel = engine, at_once, cancel
        self.rng = random.Random(seed)
        self.first_answer: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._room = threading.Semaphore(at_once)
        self._stems = [self._tokens(self.rng.randint(10, 120)) for _ in range(12)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, 257) for _ in range(count)]

    def run(self, seconds: float) -> None:
        """Start requests for so long, then wait for all of them."""
        end = time.monotonic() + seconds
        handles: list[Any] = []
        while time.monotonic() < end:
            if not self._room.acquire(timeout=ANSWER_S):
                self.wrong.append(f"no request of {self.at_once} ended within {ANSWER_S} s")
                return
            handles = [*handles[-40:], self._start()]
            if self.rng.random() < self.cancel:
                self.rng.choice(handles).cancel()
            if self.rng.random() < 0.01:
                self._stems[self.rng.randrange(len(self._stems))] = self._tokens(self.rng.randint(10, 120))
        for _ in range(self.at_once):
            if not self._room.acquire(timeout=ANSWER_S):
                self.wrong.append(f"a request did not end within {ANSWER_S} s")
        for _ in range(self.at_once):
            self._room.release()

    def _start(self) -> Any:
        stem = self.rng.choice(self._stems)
        prompt = stem[: self.rng.randint(1, len(stem))] + self._tokens(self.rng.choice([0, 1, 3, 20]))
        greedy = self.rng.random() < 0.6
        params: dict[str, Any] = {
            "max_tokens": self.rng.choice([1, 8, 20, 60]),
            "temperature": 0.0 if greedy else 1.0,
            "ignore_eos": greedy,
            "cache_salt": self.rng.choice([None, None, None, "a", "b"]),
            "priority": self.rng.choice([0, 0, 0, 1]),
            "timeout_s": self.rng.choice([None, None, None, 0.05, 2.0]),
        }
        if not greedy and self.rng.random() < 0.3:
            params["regex"] = self.rng.choice(["[ab]{1,30}", "(yes|no)?", "[0-9]+([.][0-9]+)?"])
        if not greedy and self.rng.random() < 0.3:
            params["stop"] = ("a", "bc")
        count = self.rng.choice([1, 1, 1, 4])
        key = (*prompt, -1)
        missing = [count]

        def on_done(_: int, result: Result | Exception) -> None:
            self._judge(key if greedy else None, result)
            missing[0] -= 1
            if not missing[0]:
                self._room.release()

        return self.engine.start(array("i", prompt), GenerateParams(**params), n=count, on_done=on_done)

    def _judge(self, key: tuple[int, ...] | None, result: Result | Exception) -> None:
        """On the engine's completion thread."""
        if isinstance(result, Exception):
            self.counts[type(result).__name__] += 1
            if not isinstance(result, OutOfSlots):
                self.wrong.append(repr(result))
            return
        self.counts[result.detail if result.finish_reason != "stop" else "stop"] += 1
        if key is not None:
            known = self.first_answer.get(key, ())
            common = min(len(known), len(result.tokens))
            if known[:common] != result.tokens[:common]:
                self.wrong.append(f"a prompt of {len(key) - 1} tokens was answered in two ways")
            if len(result.tokens) > len(known):
                self.first_answer[key] = result.tokens


def held() -> str:
    """What this process holds."""
    with open("/proc/self/status") as status:
        resident = next(line.split()[1] for line in status if line.startswith("VmRSS"))
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    return f"{int(resident) / 1024:.0f} MiB, {files} files, {threads} threads"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=MOST_AT_ONCE, help="requests that run or wait at any time")
    parser.add_argument("--cancel", type=float, default=0.1, help="share of requests after which one is cancelled")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    setup: dict[str, Any] = {
        "num_slots": NUM_SLOTS,
        "page_size": rng.choice([1, 1, 16]),
        "policy": rng.choice(SCHEDULING),
        "eviction": rng.choice([*EVICTION]),
        "max_step_tokens": rng.choice([32, 64, 256]),
        "max_running": rng.choice([4, 16, 32]),
    }
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Engine(tiny_model(Path(folder)), **setup) as engine:
        soak = Soak(engine, options.seed, options.at_once, options.cancel)
        for _ in range(5):
            soak.run(options.minutes * 60 / 5)
            print(f"{engine.stats.requests} requests: {held()}", flush=True)
        engine.check()
        stats = engine.stats
        if stats.free_slots + stats.evictable_slots != NUM_SLOTS or stats.running or stats.waiting:
            soak.wrong.append(f"slots or requests are left over: {stats}")
    print(
        f"seed {options.seed}, {options.minutes:g} min, {setup}: {stats.requests} requests, {stats.steps} steps, "
        f"{stats.generated_tokens} tokens, {stats.evicted_slots} slots evicted, {stats.retracted} retracted, "
        f"{dict(soak.counts)}; lost or wrong: {len(soak.wrong)}",
        flush=True,
    )
    for line in soak.wrong[:10]:
        print("  " + line, flush=True)
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

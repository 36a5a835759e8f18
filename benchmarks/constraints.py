"""Constraints measured: how many schemas are held and how well, and what compiling and masking costs.

    python benchmarks/constraints.py --schemas schemas304.jsonl

Thread CPU time on the vocabulary of the demo model; no model runs. A schema is judged *right* when every instance that
comes with it is: valid ones can be written, invalid ones cannot, or are told by the check of the finished text. With
`--model` the demo model writes JSON, with jump-forward and without, and beside compilations. With `--peers PYTHON` the
same instances are put to the engines in that environment (`benchmarks/constraint_peers.sh` makes one).
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import torch

from branchwise.runtime import Engine, GenerateParams
from branchwise.runtime.constrain import Compiler, Constraint, JsonSchema, Regex, Spec, Vocab
from branchwise.runtime.errors import ConstraintError
from branchwise.runtime.models import resolve
from branchwise.runtime.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "tests" / "data"


class Bench:
    """One vocabulary, and what was measured with it."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer = Tokenizer(resolve("smollm2-135m"))
        self.encode = partial(tokenizer.encode, at_start=False, control=False)
        self.vocab = Vocab(
            tokenizer.token_bytes,
            tokenizer.special_ids,
            tokenizer.eos_ids,
            size=tokenizer.vocab_size,
            encode=self.encode,
        )
        self.compiler = Compiler(self.vocab)
        self.compiler.compile(JsonSchema("{}")).result()  # the library's vocabulary, made once
        self.compiler.compile(Regex("a")).result()
        self.masks_s: list[float] = []

    def compiled(self, spec: Spec) -> tuple[Constraint | None, float]:
        """Compiled on this thread, past the cache, and the CPU seconds that took."""
        start = time.thread_time()
        try:
            return self.compiler._compile(spec), time.thread_time() - start
        except ConstraintError:
            return None, time.thread_time() - start

    def accepts(self, constraint: Constraint, text: str) -> bool:
        """Whether `text` can be written; each mask on the way is timed."""
        state = constraint.start()
        for token in self.encode(text):
            start = time.thread_time()
            mask = state.mask()
            self.masks_s.append(time.thread_time() - start)
            if not (bool(mask[token]) or state.forced_tokens().certain) or not state.advance(token):
                return False
        return state.is_complete

    def passes(self, constraint: Constraint, text: str) -> tuple[int, int, int]:
        """Passes of the model that writing `text` takes, its tokens, and forced tokens that are not the tokenizer's."""
        tokens, state = self.encode(text), constraint.start()
        passes, at, strange = 0, 0, 0
        while at < len(tokens) and not state.is_finished:
            ahead = state.forced_tokens()
            for token in ahead.certain:
                if at >= len(tokens) or token != tokens[at]:
                    return passes, at, strange + 1
                state.advance(token)
                at += 1
            if ahead.certain:
                continue
            passes += 1
            for guess in (*ahead.draft, None):
                if at == len(tokens):
                    break
                state.advance(tokens[at])
                at += 1
                if guess != tokens[at - 1]:
                    break
        return passes, len(tokens), strange


def judge(bench: Bench, entries: Sequence[dict[str, Any]]) -> None:
    """The rows about schemas, with valid and invalid instances."""
    seconds, right, compiled, exact, unflagged, invalid = [], 0, 0, 0, 0, 0
    passes = tokens = strange = 0
    bench.masks_s.clear()
    for entry in entries:
        constraint, took = bench.compiled(JsonSchema(json.dumps(entry["schema"], ensure_ascii=False)))
        seconds.append(took)
        is_right = constraint is not None
        compiled += constraint is not None
        for test in entry["tests"] if constraint else ():
            text = json.dumps(test["data"], ensure_ascii=False)
            assert constraint is not None
            accepted = bench.accepts(constraint, text)
            delivered = accepted and not constraint.violation(text)
            is_right &= delivered == test["valid"]
            invalid += not test["valid"]
            unflagged += delivered and not test["valid"]
            if accepted and test["valid"]:
                took_passes, took_tokens, off = bench.passes(constraint, text)
                passes, tokens, strange = passes + took_passes, tokens + took_tokens, strange + off
        right += is_right
        exact += constraint is not None and constraint.exact
    count = len(entries)
    print(f"  compiled {compiled} of {count} ({compiled / count:.1%}), {exact} exact")
    print(f"  right {right} ({right / count:.1%})")
    print(f"  invalid instances let through without a word: {unflagged} of {invalid}")
    print(f"  compile ms:  {spread(seconds, 1e3)}")
    print(f"  mask us:     {spread(bench.masks_s, 1e6)}")
    print(f"  passes a token: {passes / tokens:.3f} ({tokens} tokens); forced tokens not the tokenizer's: {strange}")


def judge_regexes(bench: Bench, entries: Sequence[dict[str, Any]]) -> None:
    seconds, exact = [], 0
    bench.masks_s.clear()
    for entry in entries:
        constraint, took = bench.compiled(Regex(entry["regex"]))
        seconds.append(took)
        exact += constraint is not None and all(
            bench.accepts(constraint, test["text"]) == test["valid"] for test in entry["tests"]
        )
    print(f"  exact: {exact} of {len(entries)}")
    print(f"  compile ms:  {spread(seconds, 1e3)}")
    print(f"  mask us:     {spread(bench.masks_s, 1e6)}")


def mask_and_apply(bench: Bench, schema: str, rows: int = 32, rounds: int = 30) -> float:
    """CPU milliseconds to mask `rows` rows of logits, each of a sequence of its own, after one character more."""
    constraint, _ = bench.compiled(JsonSchema(schema))
    assert constraint is not None
    states = [constraint.start() for _ in range(rows)]
    for state in states:
        for token in bench.encode('{"name": "'):
            state.advance(token)
    letters = [token for token, spelled in enumerate(bench.vocab.token_bytes) if spelled.isalpha()]
    logits = torch.randn(rows, bench.vocab.size)
    times = []
    for turn in range(rounds):
        for row, state in enumerate(states):
            state.advance(letters[(turn * rows + row) * 7 % len(letters)])
        start = time.thread_time()
        for row, state in zip(logits, states, strict=True):
            row.masked_fill(~state.mask(), -torch.inf)
        times.append(time.thread_time() - start)
    return statistics.median(times) * 1e3


class Person(NamedTuple):
    """What the demo model is asked for, as a schema."""

    schema: str = json.dumps(
        {
            "type": "object",
            "properties": {
                "full_name": {"type": "string"},
                "year_of_birth": {"type": "integer", "minimum": 1000, "maximum": 2030},
                "profession": {"enum": ["mathematician", "painter", "physicist", "novelist"]},
                "nationality": {"enum": ["British", "Polish", "German", "Mexican"]},
            },
            "required": ["full_name", "year_of_birth", "profession", "nationality"],
            "additionalProperties": False,
        }
    )
    prompt: str = "Marie Curie was a physicist. She was born in 1867 in Warsaw, Poland.\nAs JSON: "


def extract(jump_forward: bool, rounds: int = 12) -> tuple[float, int, str]:
    """Median wall seconds of one extraction, its steps, and its text."""
    asked = Person()
    with Engine("smollm2-135m", num_slots=4096, jump_forward=jump_forward) as engine:
        times = []
        for _ in range(rounds):
            before, start = engine.stats, time.perf_counter()
            result = engine.generate(asked.prompt, json_schema=asked.schema, temperature=0, max_tokens=80)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:]), engine.stats.since(before).steps, result.text


def steps_beside_compilations(schemas: Sequence[str], seconds: float = 10.0) -> tuple[str, str]:
    """Milliseconds between the tokens of one request, alone and while others' schemas and regexes are compiled."""

    def gaps(engine: Engine) -> list[float]:
        times: list[float] = []
        done = Event()
        engine.start(
            engine.prompt_tokens("Once upon a time"),
            GenerateParams(max_tokens=150, ignore_eos=True),
            on_delta=lambda *_: times.append(time.perf_counter()),
            on_done=lambda *_: done.set(),
        )
        done.wait()
        return [after - before for before, after in pairwise(times)][5:]

    with Engine("smollm2-135m", num_slots=4096) as engine:
        gaps(engine)
        alone = gaps(engine)
        end = time.perf_counter() + seconds
        stop = Event()

        def compile_on() -> None:
            number = 0
            while time.perf_counter() < end and not stop.is_set():
                number += 1
                schema = schemas[number % len(schemas)]
                wait([engine._compiler.compile(JsonSchema(schema[:-1] + f', "$comment": "{number}"}}'))])

        compiling = Thread(target=compile_on)
        compiling.start()
        beside = gaps(engine)
        stop.set()
        compiling.join()
    return spread(alone, 1e3), spread(beside, 1e3)


def spread(values: Iterable[float], scale: float) -> str:
    ordered = sorted(value * scale for value in values)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * part))] for part in (0.5, 0.95)]
    return f"p50 {at[0]:.1f}, p95 {at[1]:.1f}, max {ordered[-1]:.1f}"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, help="schemas with instances, one JSON object a line")
    parser.add_argument("--model", action="store_true", help="run the demo model, too")
    parser.add_argument("--peers", help="the Python of an environment with other engines")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    bench = Bench()
    print(f"vocabulary of {bench.vocab.size}; thread CPU time")
    if given.schemas:
        print(f"{given.schemas.name}:")
        judge(bench, read(given.schemas))
    print("20 Pydantic models:")
    judge(bench, read(DATA / "pyd20.jsonl"))
    print("32 regexes:")
    judge_regexes(bench, read(DATA / "regexes.jsonl"))
    schema = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
    print(f"mask and apply, 32 rows inside a string: {mask_and_apply(bench, schema):.2f} ms")
    bench.compiler.close()
    if given.model:
        (fast, few, text), (slow, many, same) = extract(True), extract(False)
        print(f"extraction: {fast * 1e3:.0f} ms in {few} steps; without jump-forward {slow * 1e3:.0f} ms in {many}: "
              f"{slow / fast:.2f}x; same text: {text == same}")  # fmt: skip
        path = given.schemas or DATA / "pyd20.jsonl"
        alone, beside = steps_beside_compilations([json.dumps(entry["schema"]) for entry in read(path)])
        print(f"ms between tokens: {alone}; beside one compilation after another: {beside}")
    if given.peers:
        files = [str(given.schemas)] if given.schemas else []
        script = Path(__file__).with_name("constraint_peers.py")
        folder = str(resolve("smollm2-135m"))
        subprocess.run([given.peers, str(script), folder, str(DATA), *files], check=True, stdout=sys.stdout)


if __name__ == "__main__":
    main()

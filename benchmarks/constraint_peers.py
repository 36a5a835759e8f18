"""What `constraints.py` measures, for engines on their own: run by it, in their own environment."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

LIMIT_S = 20
LIMIT_BYTES = 6 << 30
ALPHABET = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in ALPHABET]
BYTE_OF = {chr(byte): byte for byte in ALPHABET} | {chr(256 + at): byte for at, byte in enumerate(OTHERS)}

Walk = Callable[[list[int], list[float]], bool]


class Vocabulary:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        special = {token["id"] for token in json.loads(self.text)["added_tokens"] if token["special"]}
        self.size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self.eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
        names = [self.tokenizer.id_to_token(token) or "" for token in range(self.size)]
        self.spelled = [
            b"" if token in special else bytes(BYTE_OF.get(letter, 32) for letter in name)
            for token, name in enumerate(names)
        ]


def llguidance_engine(vocab: Vocabulary) -> Callable[[str, Any], Walk]:
    import llguidance

    tokenizer = llguidance.LLTokenizer(vocab.text, n_vocab=vocab.size, eos_token=vocab.eos)

    def compile_(kind: str, spec: Any) -> Walk:
        matcher_of = llguidance.LLMatcher
        spaced = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        grammar = (
            matcher_of.grammar_from_json_schema(json.dumps(spec), overrides=spaced)
            if kind == "schema" else matcher_of.grammar_from_regex(spec)
        )  # fmt: skip
        first = matcher_of(tokenizer, grammar, log_level=0)
        if first.is_error():
            raise ValueError(first.get_error())

        def walk(tokens: list[int], masks_s: list[float]) -> bool:
            matcher = first.deep_copy()
            for token in tokens:
                start = time.thread_time()
                matcher.compute_bitmask()
                masks_s.append(time.thread_time() - start)
                if not matcher.try_consume_tokens([token]):
                    return False
            return bool(matcher.is_accepting())

        return walk

    return compile_


def outlines_engine(vocab: Vocabulary) -> Callable[[str, Any], Walk]:
    import numpy as np
    from outlines_core import Guide, Index
    from outlines_core import Vocabulary as Known
    from outlines_core.json_schema import build_regex_from_schema

    ids: dict[bytes, list[int]] = {}
    for token, spelled in enumerate(vocab.spelled):
        if spelled:
            ids.setdefault(spelled, []).append(token)
    known = Known(vocab.eos, ids)

    def compile_(kind: str, spec: Any) -> Walk:
        index = Index(build_regex_from_schema(json.dumps(spec)) if kind == "schema" else spec, known)

        def walk(tokens: list[int], masks_s: list[float]) -> bool:
            guide = Guide(index)
            words = np.zeros(vocab.size // 32 + 1, dtype=np.int32)
            for token in tokens:
                start = time.thread_time()
                guide.write_mask_into(words.ctypes.data, len(words), 4)
                masks_s.append(time.thread_time() - start)
                if not words[token // 32] >> (token % 32) & 1:
                    return False
                guide.advance(token, return_tokens=False)
            return bool(guide.is_finished() or vocab.eos in guide.get_tokens())

        return walk

    return compile_


def xgrammar_engine(vocab: Vocabulary) -> Callable[[str, Any], Walk]:
    import xgrammar

    info = xgrammar.TokenizerInfo(
        vocab.spelled, xgrammar.VocabType.RAW, vocab_size=vocab.size, stop_token_ids=[vocab.eos]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_(kind: str, spec: Any) -> Walk:
        compiled = (
            compiler.compile_json_schema(
                json.dumps(spec), any_whitespace=False, separators=(", ", ": "), strict_mode=False
            )
            if kind == "schema" else compiler.compile_regex(spec)
        )  # fmt: skip
        mask = xgrammar.allocate_token_bitmask(1, vocab.size)

        def walk(tokens: list[int], masks_s: list[float]) -> bool:
            matcher = xgrammar.GrammarMatcher(compiled)
            for token in tokens:
                start = time.thread_time()
                matcher.fill_next_token_bitmask(mask)
                masks_s.append(time.thread_time() - start)
                if not matcher.accept_token(token):
                    return False
            return bool(matcher.is_completed())

        return walk

    return compile_


ENGINES = {"outlines-core": outlines_engine, "llguidance": llguidance_engine, "xgrammar": xgrammar_engine}


def measure(engine: str, folder: Path, kind: str, entries: list[dict[str, Any]], results: Any) -> None:
    """In a process of its own: one answer for each entry, as far as it gets."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    vocab = Vocabulary(folder)
    compile_ = ENGINES[engine](vocab)
    for entry in entries:
        masks_s: list[float] = []
        start = time.process_time()
        try:
            walk = compile_(kind, entry[kind])
            took = time.process_time() - start
            texts = [test["text"] if kind == "regex" else json.dumps(test["data"], ensure_ascii=False)
                     for test in entry["tests"]]  # fmt: skip
            found = [walk(vocab.tokenizer.encode(text, add_special_tokens=False).ids, masks_s) for text in texts]
            wrong = [test["valid"] for test, said in zip(entry["tests"], found, strict=True) if said != test["valid"]]
            results.put((True, took, not wrong, wrong.count(False), masks_s))
        except Exception:
            results.put((False, time.process_time() - start, False, 0, masks_s))


def judge(engine: str, folder: Path, kind: str, entries: list[dict[str, Any]]) -> None:
    """Each entry within its time; a process that does not answer is ended, and another goes on with the next."""
    context = get_context("spawn")
    done: list[tuple[bool, float, bool, int, list[float]]] = []
    while len(done) < len(entries):
        results = context.Queue()
        process = context.Process(target=measure, args=(engine, folder, kind, entries[len(done) :], results))
        process.start()
        patience = 60.0
        while len(done) < len(entries):
            until = time.monotonic() + patience
            answer = None
            while answer is None and time.monotonic() < until and (process.is_alive() or not results.empty()):
                try:
                    answer = results.get(timeout=0.5)
                except Exception:
                    continue
            if answer is None:
                done.append((False, LIMIT_S, False, 0, []))
                break
            done.append(answer)
            patience = LIMIT_S
        process.kill()
        process.join()
    masks = [seconds for each in done for seconds in each[4]]
    compiled = [each for each in done if each[0]]
    print(
        f"  {engine}: compiled {len(compiled)} of {len(done)}, right {sum(each[2] for each in done)}, "
        f"{sum(each[3] for each in done)} invalid let through"
    )
    print(f"    compile ms: {spread((each[1] for each in done), 1e3)}; mask us: {spread(masks, 1e6)}")


def spread(values: Iterable[float], scale: float) -> str:
    ordered = sorted(value * scale for value in values)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * part))] for part in (0.5, 0.95)]
    return f"p50 {at[0]:.1f}, p95 {at[1]:.1f}, max {ordered[-1]:.1f}"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def main() -> None:
    folder, data, *more = map(Path, sys.argv[1:])
    sets = [("schema", data / "pyd20.jsonl"), ("regex", data / "regexes.jsonl"), *(("schema", path) for path in more)]
    for kind, path in sets:
        print(f"{path.name}, engines on their own:", flush=True)
        for engine in ENGINES:
            judge(engine, folder, kind, read(path))


if __name__ == "__main__":
    main()

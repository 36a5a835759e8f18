"""Routes x families x greedy, seeded and constrained: the same programs, judged by an engine with an empty cache.

Routes of greedy answers against transformers are in `tests/golden`; here are the others, and random programs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from branchwise.runtime import Engine
from branchwise.runtime.attention import cpu
from tests.reliability.programs import Judge, Runner, Tally, bend, check, run

from ..conftest import MakeTiny

KINDS = ["llama", "qwen3", "gemma3"]
PROGRAMS = 8

ROUTES: dict[str, dict[str, Any]] = {
    "warm": {"twice": True},
    "after eviction": {"num_slots": 160, "sees": "evicted_slots"},
    "from host memory": {"num_slots": 160, "host_cache_bytes": 1 << 21, "twice": True, "sees": "restored_tokens"},
    "reloaded from disk": {"reload": True, "sees": "hit_tokens"},
    "chunks of 1": {"max_step_tokens": 1, "max_running": 1},
    "chunks of 5": {"max_step_tokens": 5, "max_running": 5},
    "chunks of 16": {"max_step_tokens": 16, "max_running": 16},
    "one after another": {"max_running": 1},
    "same step": {"max_step_tokens": 2048, "max_running": 256},
    "retracted": {"num_slots": 112, "bent": {"admits": "all"}, "twice": True, "sees": "retracted"},
    "no jump forward": {"jump_forward": False},
    "pages": {"page_size": 16},
    "pages, evicted": {"page_size": 16, "num_slots": 320, "max_step_tokens": 24, "max_running": 8},
    "groups on": {"bent": {"groups": "on"}},
    "groups off": {"bent": {"groups": "off"}},
    "reference attention": {"bent": {"attention": "reference"}},
    "reference attention, groups on": {"bent": {"attention": "reference", "groups": "on"}},
    "torch's attention": {"compiled": False},
    "torch's attention, groups on": {"compiled": False, "bent": {"groups": "on"}},
    "deterministic": {"deterministic": True},
    "deterministic, pages, chunks": {
        "deterministic": True, "page_size": 16, "num_slots": 480, "max_step_tokens": 9, "max_running": 8
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def near_ties() -> Iterator[Counter[str]]:
    """Counted and listed, never tried again: more than one of a module would be no chance."""
    counted: Counter[str] = Counter()
    yield counted
    print(f"near-ties: {dict(counted)}")
    assert counted.total() <= 1, counted


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_route_changes_an_answer(
    kind: str,
    route: str,
    make_tiny: MakeTiny,
    near_ties: Counter[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"num_slots": 2048, **ROUTES[route]}
    bent, sees = options.pop("bent", {}), options.pop("sees", None)
    twice, reload = (options.pop(name, False) for name in ("twice", "reload"))
    if not options.pop("compiled", True):
        monkeypatch.setattr(cpu, "kernel_for", lambda *_: None)
        monkeypatch.setattr("branchwise.runtime.model.fused.FusedLayers.can", lambda *_: False)
    asked, folder = [], make_tiny(kind)
    for turn in range(2 if twice or reload else 1):
        if turn == 0 or reload:
            engine = Engine(folder, **options)
            bend(engine, **bent)
        if reload and turn:
            engine.load_cache(tmp_path / "cache")
        runner = Runner(engine, random.Random(7))
        runner.run(PROGRAMS)
        asked += runner.asked
        assert not check(engine)
        if reload and not turn:
            engine.save_cache(tmp_path / "cache")
        if sees is not None and (turn or not twice):
            assert getattr(engine.stats, sees) > 0
        if reload or turn or not twice:
            engine.close()
    judge, tally = Judge(folder, jump_forward=options.get("jump_forward", True)), Tally()
    for one in asked:
        judge.judge(one, tally, route)
    judge.close()
    near_ties[f"{kind}, {route}"] += len(tally.near)
    assert not tally.wrong
    assert tally.counts["calls"] > 2 * PROGRAMS


def test_random_programs(make_tiny: MakeTiny) -> None:
    """The share of `programs.py` that runs everywhere: always the same."""
    tally = Tally()
    for _ in run([make_tiny(kind) for kind in KINDS], 150, 1, tally):
        assert not tally.wrong
    print(tally)
    assert tally.counts["hits"] > 1000


def test_a_cache_that_changes_answers_is_seen(make_tiny: MakeTiny) -> None:
    folder = make_tiny("qwen3")
    judge, tally = Judge(folder, jump_forward=True), Tally()
    with Engine(folder, num_slots=2048) as engine:
        Runner(engine, random.Random(7)).run(PROGRAMS)

        def spoil(scheduler: Any) -> None:
            for node in scheduler.tree.nodes():
                engine._loop._pool.v[1][torch.tensor(list(node.slots[:2]))] += 5.0

        engine._ask(spoil)
        runner = Runner(engine, random.Random(7))
        runner.run(PROGRAMS)
    for one in runner.asked:
        judge.judge(one, tally, "spoilt")
    judge.close()
    assert len(tally.wrong) > 2

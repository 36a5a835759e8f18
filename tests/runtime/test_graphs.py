"""Recorded steps: filled up to a size and replayed, they are what they stand for. "Replaying" is a call here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.runtime import Engine, engine
from branchwise.runtime.attention import AttnBatch, AttnSpec, attn_batch
from branchwise.runtime.attention.flashinfer import FlashInferAttention
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.attention.reference import ReferenceAttention
from branchwise.runtime.gpu.graphs import SIZES, Graphs, Shape, fill_up, shape_of
from branchwise.runtime.layout import build_layout
from branchwise.runtime.runner import StepRunner
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.transfers import DirectTransfers
from branchwise.runtime.tree import RadixTree
from tests import flashinfer_standin
from tests.golden.test_cache_never_changes_answers import NEW, prompts, together, transformers_greedy

from ..conftest import MakeTiny
from .trees import decode_step, place

CPU = torch.device("cpu")
NUM_SLOTS = 480
ALWAYS = CostModel(price=0.0, max_levels=2)


def decode_batch(rng: random.Random, branches: int, page_size: int, cost: CostModel | None) -> AttnBatch:
    return attn_batch(decode_step(rng, branches, NUM_SLOTS, page_size), NUM_SLOTS, CPU, page_size, cost)


@pytest.mark.parametrize("cost", [None, ALWAYS])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_rows_that_are_added_change_nothing_for_the_others(seed: int, page_size: int, cost: CostModel | None) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    batch = decode_batch(rng, rng.randint(1, 11), page_size, cost)
    shape = shape_of(batch)
    assert shape is not None and shape.rows in SIZES and shape.rows >= batch.num_rows
    padded = fill_up(batch, shape, NUM_SLOTS // page_size)
    assert [len(level.last_page_len) for level in padded.levels] == [*shape.groups, shape.rows]
    assert {int(level.qo_indptr[-1]) for level in (*padded.levels, padded.flat)} == {shape.rows}
    q = torch.randn(shape.rows, 4, 16)
    k, v = (torch.randn(NUM_SLOTS + page_size, 2, 16) for _ in "kv")
    for spec in (AttnSpec(4, 2, 16, 0.25), AttnSpec(4, 2, 16, 0.25, window=3)):
        out: list[Tensor] = []
        for each in (batch, padded):
            reference = ReferenceAttention()
            reference.plan(each, [spec])
            out.append(reference.forward(0, q[: each.num_rows], k, v))
        torch.testing.assert_close(out[1][: batch.num_rows], out[0])
        assert not out[1].isnan().any()


def test_what_is_no_plain_decode_step_is_not_recorded() -> None:
    rng = random.Random(0)
    assert shape_of(decode_batch(rng, 3, 1, None)) == Shape(4, ())
    assert shape_of(decode_batch(rng, 4, 1, None)) == Shape(4, ())
    tree = RadixTree(SlotPool(NUM_SLOTS, 1))
    place(tree, [1, 2, 3])
    assert shape_of(attn_batch(build_layout(tree.fresh_nodes(), []), NUM_SLOTS, CPU)) is None  # three rows of one path
    batch = decode_batch(rng, 6, 1, ALWAYS)
    many = AttnBatch((*[batch.flat] * 2, batch.flat), batch.make_flat, batch.write_slots, 6)
    assert shape_of(many) == Shape(8, (8, 8))
    crowd = decode_batch(rng, 9, 1, None)
    nine = AttnBatch((crowd.flat, crowd.flat), crowd.make_flat, crowd.write_slots, 9)
    assert shape_of(nine) is None  # so many groups of a shared level


class Counting:
    """Runs what it is given, anew at each replay."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return run()

        return replay


@pytest.mark.parametrize(("kind", "page_size"), [("llama", 1), ("gemma2", 16)])
def test_whole_models_give_the_tokens_of_transformers(
    make_tiny: MakeTiny, kind: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked, record = make_tiny(kind), prompts(5), Counting()

    def runner_for(model: Any, pool: Any, **_: Any) -> StepRunner:
        attention = FlashInferAttention(flashinfer_standin, CPU, torch.float32)
        transfers = DirectTransfers(CPU)
        graphs = Graphs(model, attention, pool, transfers, record)
        return StepRunner(model, attention, ALWAYS, pool, graphs)

    monkeypatch.setattr(engine, "runner_for", runner_for)
    with Engine(folder, num_slots=2048, page_size=page_size, max_step_tokens=64, max_running=8) as running:
        for _ in range(2):
            found = together(running, asked)
        running.check()
    assert found == [transformers_greedy(folder, prompt, NEW) for prompt in asked]
    assert 0 < record.recorded < record.replayed


def test_a_graph_that_cannot_be_recorded_is_told_once_and_steps_go_on(
    make_tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, asked = make_tiny("llama"), prompts(2)

    def fails(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    def runner_for(model: Any, pool: Any, **_: Any) -> StepRunner:
        attention = FlashInferAttention(flashinfer_standin, CPU, torch.float32)
        graphs = Graphs(model, attention, pool, DirectTransfers(CPU), fails)
        return StepRunner(model, attention, ALWAYS, pool, graphs)

    monkeypatch.setattr(engine, "runner_for", runner_for)
    with Engine(folder, num_slots=512) as running:
        found = together(running, asked)
    assert found == [transformers_greedy(folder, prompt, NEW) for prompt in asked]
    assert caplog.text.count("CUDA graphs cannot be used, so steps cost more to launch: RuntimeError") == 1

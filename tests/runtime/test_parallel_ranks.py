"""An engine in two processes on a CPU: the same tokens as in one, and an end that is told."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.runtime import Engine, EngineError, RequestError
from branchwise.runtime.attention import attn_batch
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.model.configuration import read_config
from branchwise.runtime.model.family import traits
from branchwise.runtime.model.split import Split, SplitWeights
from branchwise.runtime.model.weights import Weights
from branchwise.runtime.ranks.wire import decode, encode
from tests.golden.test_cache_never_changes_answers import NEW, prompts, together, transformers_greedy

from ..conftest import MakeTiny
from .trees import decode_step, random_step

CPU = torch.device("cpu")


def share(rank: int, size: int) -> Split:
    return Split(rank, size, lambda x: None, lambda x: x)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_shares_of_all_ranks_are_the_whole(make_tiny: MakeTiny, kind: str) -> None:
    folder = make_tiny(kind)
    has = traits(read_config(folder))
    shares = [SplitWeights(Weights(folder, torch.float32, CPU), share(rank, 2)) for rank in range(2)]
    whole = Weights(folder, torch.float32, CPU)
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."

    def joined(prefix: str, name: str, height: int, width: int, dim: int) -> Tensor:
        return torch.cat([each.stacked(prefix, {name: height}, width) for each in shares], dim)

    cases = [
        (attention, "q_proj", has.queries, has.hidden, 0),
        (attention, "o_proj", has.hidden, has.queries, 1),
        (mlp, "gate_proj", has.inner, has.hidden, 0),
        (mlp, "down_proj", has.hidden, has.inner, 1),
    ]
    for prefix, name, height, width, dim in cases:
        part = (height // 2, width) if dim == 0 else (height, width // 2)
        assert torch.equal(joined(prefix, name, *part, dim), whole.stacked(prefix, {name: height}, width))
    if kind == "qwen2":
        name = f"{attention}q_proj.bias"
        parts = [each.optional(name, has.queries // 2) for each in shares]
        assert torch.equal(torch.cat([part for part in parts if part is not None]), whole.get(name, has.queries))


@pytest.mark.parametrize("seed", range(20))
def test_a_step_arrives_as_it_was_sent(seed: int) -> None:
    rng = random.Random(seed)
    *_, layout = random_step(rng)
    for each in (layout, decode_step(rng, 5)):
        found = decode(encode(each))
        assert found.tokens == each.tokens and found.write_slots == each.write_slots
        for page_size in (1, 2):
            ours, theirs = (attn_batch(one, 256, CPU, page_size, CostModel(price=0.0)) for one in (found, each))
            assert len(ours.levels) == len(theirs.levels)
            for mine, other in zip((*ours.levels, ours.flat), (*theirs.levels, theirs.flat), strict=True):
                assert mine.qo_indptr.tolist() == other.qo_indptr.tolist()
                assert mine.kv_indices.tolist() == other.kv_indices.tolist()
                assert mine.last_page_len.tolist() == other.last_page_len.tolist()


def test_a_bias_that_is_added_up_is_added_once() -> None:
    class Ones:
        def __contains__(self, name: str) -> bool:
            return True

        def get(self, name: str, *shape: int) -> Tensor:
            return torch.ones(shape)

    shares = [SplitWeights(Ones(), share(rank, 2)) for rank in range(2)]  # type: ignore[arg-type]  # as far as it is asked
    found = [each.optional("model.layers.0.self_attn.o_proj.bias", 3) for each in shares]
    assert [None if part is None else part.tolist() for part in found] == [[1.0] * 3, [0.0] * 3]


def test_what_cannot_be_divided_is_refused(tiny_model: Path) -> None:
    with pytest.raises(RequestError, match="tensor_parallel 3 does not divide this model's query heads of 4"):
        share(0, 3).traits(traits(read_config(tiny_model)), 400)
    with pytest.raises(RequestError, match="host_cache_bytes and tensor_parallel do not go together"):
        Engine(tiny_model, tensor_parallel=2, host_cache_bytes=1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2"])
def test_two_processes_give_the_tokens_of_one(make_tiny: MakeTiny, kind: str) -> None:
    folder, asked = make_tiny(kind), prompts(3)
    options: dict[str, Any] = {"num_slots": 2048, "max_step_tokens": 64, "max_running": 8}
    with Engine(folder, **options) as alone:
        sampled = alone.generate([5, 6, 7], max_tokens=20, seed=3, top_p=0.9, n=3)
    with Engine(folder, tensor_parallel=2, **options) as engine:
        for _ in range(2):
            assert together(engine, asked) == [transformers_greedy(folder, prompt, NEW) for prompt in asked]
        found = engine.generate([5, 6, 7], max_tokens=20, seed=3, top_p=0.9, n=3)
        assert [one.tokens for one in found] == [one.tokens for one in sampled]
        engine.check()
        with pytest.raises(RequestError, match="save_cache is for engines of one process; this one has 2"):
            engine.save_cache("nowhere")


@pytest.mark.slow
def test_a_process_that_ends_is_told_and_none_is_left(tiny_model: Path) -> None:
    with Engine(tiny_model, tensor_parallel=2, num_slots=512) as engine:
        assert engine.generate(array("i", [5, 6]), max_tokens=2).tokens
        (other,) = engine._loop._runner._team._others
        other.kill()
        other.wait()
        with pytest.raises(EngineError, match=r"a process of this engine has ended \(rank 1 with -9\)"):
            engine.generate(array("i", [5, 6]), max_tokens=2)
    with Engine(tiny_model, tensor_parallel=2, num_slots=512) as engine:
        (other,) = engine._loop._runner._team._others
    assert other.poll() is not None

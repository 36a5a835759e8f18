"""Whether what runs on the GPU computes what it should: each kernel, whole trees, graphs, draws, whole models."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from place import Place, backend
from random_model import SMALL, RandomWeights, write_folder
from report import NotHere
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from branchwise.runtime import Engine
from branchwise.runtime.attention import AttnSpec, Level, attn_batch
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.attention.reference import ReferenceAttention
from branchwise.runtime.device_draws import DeviceDrawer, TorchOperations
from branchwise.runtime.drawers import drawer_for
from branchwise.runtime.draws import Draw, Drawer, HostDrawer
from branchwise.runtime.gpu.graphs import Graphs
from branchwise.runtime.gpu.libraries import Missing, triton
from branchwise.runtime.kv import KVPool
from branchwise.runtime.model.llama import LlamaModel
from branchwise.runtime.model.rows import TorchRows, gpu_rows
from branchwise.runtime.request import Request
from branchwise.runtime.runner import StepRunner
from branchwise.runtime.sampling import SamplingParams
from tests.runtime.trees import decode_step, random_step

NEAR = 5e-3
"""How far a result in bfloat16 may be from that in float32, by norm."""

NUM_SLOTS = 480
ALWAYS = CostModel(price=0.0, max_levels=2)


def distance(found: Tensor, expected: Tensor) -> float:
    """Of the difference, by norm, as a share of what is expected."""
    assert not found.isnan().any(), "it has numbers that are none"
    wanted = expected.float()
    return float((found.float() - wanted).norm() / wanted.norm().clamp(min=1e-6))


def random_level(rng: random.Random, page: int, pages: int, *, causal: bool) -> Level:
    """Groups of very different sizes; some without a key, if that is allowed."""
    rows, ends, last, indices = [0], [0], [], []
    for _ in range(rng.randint(1, 12)):
        count = rng.choice([1, 1, 1, 2, 17, 70])
        keys = rng.choice([1, page, 100, 700]) + count if causal else rng.choice([0, 1, page, 300])
        used = -(-keys // page)
        indices += rng.sample(range(pages), used)
        rows.append(rows[-1] + count)
        ends.append(len(indices))
        last.append((keys - 1) % page + 1 if keys else 0)
    arrays = (torch.tensor(values, dtype=torch.int32) for values in (rows, ends, indices, last))
    return Level(*arrays, page_size=page, causal=causal)


def specs(heads: int, kv: int, size: int) -> Iterator[AttnSpec]:
    """Plain ones first: the others need more modules of FlashInfer."""
    for window, cap in ((None, None), (100, None), (None, 30.0), (100, 30.0)):
        yield AttnSpec(heads, kv, size, size**-0.5, window, cap)


def wrappers(place: Place, size: int, *, plain: bool) -> str:
    """FlashInfer's kernel for heads of one size against plain torch in float32, also of keys that are split."""
    attention, reference, worst, count = place.attention(), ReferenceAttention(), 0.0, 0
    kv, pages = 2, 48 if place.small else 3000
    for repeat, page, seed in product((1, 3, 4, 7), (1, 16), range(1 if place.small else 3)):
        rng = random.Random(seed)
        k, v = (place.random(max(pages, 1000) * page, kv, size) for _ in "kv")
        for spec in specs(repeat * kv, kv, size):
            if plain != (spec.window is None and spec.softcap is None):
                continue
            for causal in (True, False):
                if spec.window is not None and not causal:
                    continue
                level = random_level(rng, page, max(pages, 1000), causal=causal)
                q = place.random(int(level.qo_indptr[-1]), repeat * kv, size)
                for each in (attention, reference):
                    each._specs = [spec]  # `partial` needs no step to be planned
                place.poison(*q.shape)
                out, lse = attention.partial(level, 0, q, k, v)
                expected, expected_lse = reference.partial(level, 0, q.float(), k.float(), v.float())
                seen = expected_lse > -math.inf
                assert torch.equal(lse > -math.inf, seen), "rows with and without keys are mistaken"
                sums, expected_sums = lse[seen].exp(), expected_lse[seen].exp()
                worst = max(worst, distance(out[seen], expected[seen]), distance(sums, expected_sums))
                assert float(out[~seen].abs().sum()) == 0, "rows without a key are not zero"
                count += 1
    assert worst < 2 * NEAR, f"{worst:.2e} from float32"
    return f"{count} levels, at most {worst:.1e} from float32"


def own_attention(place: Place) -> str:
    """Our own kernels, in float32 and in 16 bits, for heads that FlashInfer has not."""
    if not place.gpu:
        raise NotHere("our kernels run on a GPU; the tests run them in Triton's interpreter")
    if isinstance(missing := triton(place.device), Missing):
        raise NotHere(missing.reason)
    from branchwise.runtime.attention.triton import TritonAttention

    worst = {torch.float32: 0.0, torch.bfloat16: 0.0}
    attention, reference = TritonAttention(place.device), ReferenceAttention()
    for (dtype, size, repeat), page in product(product(worst, (16, 80, 128), (1, 4, 9)), (1, 16)):
        k, v = (torch.randn(1000 * page, 2, size, device=place.device).to(dtype) for _ in "kv")
        for spec in specs(2 * repeat, 2, size):
            level = random_level(random.Random(size + repeat), page, 1000, causal=True)
            q = torch.randn(int(level.qo_indptr[-1]), 2 * repeat, size, device=place.device).to(dtype)
            for each in (attention, reference):
                each._specs = [spec]
            found = attention.partial(level, 0, q, k, v)[0]
            expected = reference.partial(level, 0, q.float(), k.float(), v.float())[0]
            worst[dtype] = max(worst[dtype], distance(found, expected))
    assert worst[torch.float32] < 1e-4 and worst[torch.bfloat16] < 2 * NEAR, f"{worst}"
    return f"at most {worst[torch.float32]:.1e} off in float32, {worst[torch.bfloat16]:.1e} in bfloat16"


def own_rows(place: Place) -> str:
    """Norms, turned queries, stored keys, activations: FlashInfer's and our kernels against torch."""
    if not place.gpu:
        raise NotHere("kernels for rows run on a GPU")
    rows, plain, spec = gpu_rows(place.dtype, place.device), TorchRows(), AttnSpec(8, 2, 64, 0.125)
    if type(rows) is TorchRows:
        raise NotHere("there is no Triton here")
    pools = [KVPool(64, [spec], place.dtype, place.device) for _ in range(2)]
    x, more, weight = place.random(40, 512), place.random(40, 512), place.random(512)
    angle = torch.rand(40, 1, 32, device=place.device)
    qkv, slots = place.random(40, 12 * 64), torch.randperm(64, device=place.device)[:40]
    found: list[list[Tensor]] = []
    for each, pool in zip((rows, plain), pools, strict=True):
        total = x.clone()
        normed = each.add_norm(total, more.clone(), weight, 1e-5).clone()
        q = each.place(qkv.clone(), (angle.cos().to(place.dtype), angle.sin().to(place.dtype)), slots, pool, 0)
        gated = each.gate(qkv.clone(), F.silu).clone()
        found.append([total, normed, q, pool.k[0][slots], pool.v[0][slots], gated])
    worst = max(distance(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert worst < 2 * NEAR, f"{worst:.2e} from torch"
    return f"at most {worst:.1e} from torch"


def trees(place: Place) -> str:
    """Random trees with what they share read once, and read by each row."""
    attention, worst = place.attention(), 0.0
    count = 6 if place.small else 60
    for seed in range(count):
        page = (1, 16)[seed % 2]
        *_, layout = random_step(random.Random(seed), NUM_SLOTS, page)
        k, v = (place.random(NUM_SLOTS + page, 2, 64) for _ in "kv")
        q, spec = place.random(len(layout.tokens), 6, 64), AttnSpec(6, 2, 64, 0.125)
        outs = []
        for cost in (None, ALWAYS):
            attention.plan(attn_batch(layout, NUM_SLOTS, torch.device("cpu"), page, cost), [spec])
            outs.append(attention.forward(0, q, k, v).clone())
        worst = max(worst, distance(outs[1], outs[0]))
    assert worst < 2 * NEAR, f"{worst:.2e} apart"
    return f"{count} trees, at most {worst:.1e} apart"


def graph_replays(place: Place) -> str:
    """Steps of changing sizes and sharing, recorded and eager, with no wait between one and the next."""
    model = LlamaModel(RandomWeights(place.dtype, place.device), SMALL.config(), dtype=place.dtype, device=place.device)
    pool = KVPool(NUM_SLOTS, model.specs, place.dtype, place.device)
    for each in (*pool.k, *pool.v):
        each.normal_()
    recorded = place.attention()
    graphs = Graphs(model, recorded, pool, place.transfers, place.record())
    runners = [StepRunner(model, place.attention(), ALWAYS, pool), StepRunner(model, recorded, ALWAYS, pool, graphs)]
    rng = random.Random(0)
    layouts = [decode_step(rng, rng.randint(1, 24), NUM_SLOTS) for _ in range(8 if place.small else 100)]
    found = [[runner.forward(layout).clone() for runner in runners] for layout in layouts]  # both write the same slots
    worst = max(distance(replayed, eager) for eager, replayed in found)
    assert not graphs._failed, "no graph could be recorded"
    assert worst < 4 * NEAR, f"{worst:.2e} apart"  # keys are split elsewhere, and two layers follow
    return f"{len(layouts)} steps by {len(graphs._recorded)} graphs, at most {worst:.1e} from eager ones"


def draws(place: Place) -> str:
    """The tokens that are drawn on the GPU are those of the CPU."""
    logits = (torch.randn(16, 1000 if place.small else 128_256) * 3).float()
    options = [{}, {"temperature": 0.0}, {"temperature": 0.3}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05},
               {"top_k": 50, "top_p": 0.8, "min_p": 0.01}]  # fmt: skip
    requests = [
        Request(
            tokens=array("i", [1]), num_prompt=1, on_done=lambda _: None,
            sampling=SamplingParams(seed=number, **options[number % len(options)]),
        )
        for number in range(70)
    ]  # fmt: skip
    wanted = [Draw(request, number % 16) for number, request in enumerate(requests)]
    on_device: Drawer = drawer_for(place.device, frozenset({2}))
    if not place.gpu:
        on_device = DeviceDrawer(frozenset({2}), TorchOperations(), place.transfers)
    ours = on_device.draw(logits.to(place.device), wanted)
    theirs = HostDrawer(frozenset({2})).draw(logits, wanted)
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    assert equal >= len(wanted) - 2, f"{equal} of {len(wanted)} are equal"  # a probability in float32 may just be cut
    return f"{equal} of {len(wanted)} tokens are those of the CPU"


def golden(place: Place, folder: Path) -> str:
    """A small model in float32: the tokens of transformers' own `generate`, cold, warm and beside others."""
    torch.manual_seed(0)
    disable_progress_bar()
    folder = write_folder(folder / "golden", SMALL)
    made = AutoModelForCausalLM.from_config(SMALL.config(initializer_range=0.25), dtype=torch.float32)
    made.save_pretrained(folder)
    made = made.to(place.device).eval()
    prompts = [[5, 9, 7, 100 + i, *range(300, 300 + 7 * i)] for i in range(6)]
    made.generation_config.eos_token_id = None
    ends = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = [
        made.generate(torch.tensor([prompt], device=place.device), **ends)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    with Engine(folder, device=place.device, dtype="float32", num_slots=4096) as engine:
        for _ in range(2):
            found = [list(engine.generate(p, max_tokens=24, temperature=0, ignore_eos=True).tokens) for p in prompts]
            assert found == expected, "other tokens"
    return f"{len(prompts)} prompts, 24 tokens each, cold and warm"


def scores(place: Place, folder: Path) -> str:
    """Log-probabilities in the engine's own dtype, where many rows share a prompt, beside transformers in float32."""
    torch.manual_seed(0)
    folder = write_folder(folder / "scores", SMALL)
    made = AutoModelForCausalLM.from_config(SMALL.config(initializer_range=0.1), dtype=torch.float32)
    disable_progress_bar()
    made.save_pretrained(folder)
    made = made.to(place.device).eval()
    prompt = list(range(1000, 1200))
    continuations = [[2000 + 7 * i + j * j for j in range(8)] for i in range(12)]
    expected = []
    for continuation in continuations:
        ids = torch.tensor([prompt + continuation], device=place.device)
        rows = made(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected.append(rows.gather(1, ids[0, len(prompt) :, None])[:, 0])
    name = str(place.dtype).removeprefix("torch.")
    with backend(place), Engine(folder, device=place.device, dtype=name, num_slots=4096) as engine:
        found = torch.tensor(engine.score(prompt, continuations), device=place.device)
    apart = float((found - torch.stack(expected)).abs().mean())
    assert apart < (0.05 if place.gpu else 1e-4), f"{apart:.2e} nats apart"
    return f"{len(continuations)} continuations of 8 tokens, {apart:.1e} nats apart on average"

"""Our own GPU kernels, in Triton's interpreter: equal to what they stand for; and compiled for an H200."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from branchwise.runtime.attention import AttnSpec, attn_batch
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.attention.reference import ReferenceAttention
from branchwise.runtime.device_draws import TorchOperations, packed
from branchwise.runtime.gpu import libraries
from branchwise.runtime.gpu.libraries import Missing
from branchwise.runtime.kv import KVPool
from branchwise.runtime.model.rows import TorchRows

from .trees import random_step

if find_spec("triton") is None or [int(part) for part in version("triton").split(".")[:2]] < [3, 7]:
    pytest.skip("needs Triton; up to 3.6 its interpreter does not know today's numpy", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is loaded

from branchwise.runtime.attention.triton import TritonAttention
from branchwise.runtime.gpu.draws import GpuOperations
from branchwise.runtime.model.gpu_rows import GpuRows

pytestmark = pytest.mark.triton
CPU = torch.device("cpu")
NUM_SLOTS = 256
ALWAYS = CostModel(price=0.0, max_levels=3)


@pytest.fixture(scope="module", autouse=True)
def _interpreted() -> Iterator[None]:
    yield
    del os.environ["TRITON_INTERPRET"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies the bits of bfloat16
@pytest.mark.parametrize(("heads", "kv", "size"), [(6, 2, 16), (4, 4, 24), (9, 1, 40)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_attention_equals_the_reference(
    page_size: int, heads: int, kv: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("branchwise.runtime.attention.triton.KEYS", 8)  # so that paths are split
    torch.manual_seed(heads)
    scale = size**-0.5
    specs = [AttnSpec(heads, kv, size, scale, window, cap) for window, cap in ((None, None), (3, None), (None, 5.0))]
    *_, layout = random_step(random.Random(heads + page_size), NUM_SLOTS, page_size)
    batch = attn_batch(layout, NUM_SLOTS, CPU, page_size, ALWAYS)
    q = torch.randn(len(layout.tokens), heads, size).to(dtype)
    k, v = (torch.randn(NUM_SLOTS + page_size, kv, size).to(dtype) for _ in "kv")
    ours, reference = TritonAttention(CPU), ReferenceAttention()
    for each in (ours, reference):
        each.plan(batch, specs)
    close: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for layer in range(len(specs)):
        found, expected = (each.forward(layer, q, k, v) for each in (ours, reference))
        torch.testing.assert_close(found, expected, **close)
    for level in batch.levels:
        for part, expected in zip(
            ours.partial(level, 0, q, k, v), reference.partial(level, 0, q, k, v), strict=True
        ):
            torch.testing.assert_close(part, expected, **close)


@pytest.mark.parametrize("turns", [True, False])
def test_queries_are_turned_and_keys_and_values_stored(turns: bool) -> None:
    heads, kv, size, rows = 3, 2, 12, 4
    spec = AttnSpec(heads, kv, size, 1.0)
    pools = [KVPool(8, [spec], torch.float32, CPU) for _ in range(2)]
    for pool in pools:
        pool.k[0].zero_(), pool.v[0].zero_()
    qkv = torch.randn(rows, (heads + 2 * kv) * size)
    angle = torch.rand(rows, 1, size // 2)
    angles = (angle.cos(), angle.sin()) if turns else None
    slots = torch.tensor([5, 0, 8, 2])
    ours = GpuRows(Missing("")).place(qkv.clone(), angles, slots, pools[0], 0)
    expected = TorchRows().place(qkv.clone(), angles, slots, pools[1], 0)
    torch.testing.assert_close(ours, expected)
    for mine, other in zip(pools[0].k + pools[0].v, pools[1].k + pools[1].v, strict=True):
        torch.testing.assert_close(mine, other)


def test_it_is_tried_out_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttnSpec(4, 2, 24, 1.0)
    TritonAttention(CPU).try_out([spec, spec], torch.float16)
    libraries.triton.cache_clear()
    assert not isinstance(libraries.triton(CPU), Missing)
    libraries.triton.cache_clear()
    monkeypatch.setattr("branchwise.runtime.gpu.kernels.mask_kernel", None)
    missing = libraries.triton(CPU)
    libraries.triton.cache_clear()
    assert isinstance(missing, Missing) and missing.reason.startswith("its kernels cannot be run: TypeError: ")


def operations(monkeypatch: pytest.MonkeyPatch) -> tuple[GpuOperations, TorchOperations]:
    monkeypatch.setattr("branchwise.runtime.gpu.draws.BLOCK", 64)
    return GpuOperations(Missing("")), TorchOperations()


@pytest.mark.parametrize("size", [64, 97, 130])
def test_masks_bar_what_their_bits_do_not_allow(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, rows = torch.randn(4, size), torch.tensor([3, 1])
    allowed = torch.rand(2, size) < 0.5
    bits = torch.from_numpy(np.stack([packed(mask, size) for mask in allowed]))
    expected = x.clone()
    expected[rows] = expected[rows].masked_fill(~allowed, -torch.inf)
    for each in operations(monkeypatch):
        found = x.clone()
        each.mask(found, rows, bits)
        assert torch.equal(found, expected)


def test_the_noise_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal scores the noise alone decides: 48 draws from 97 tokens come out alike."""
    x, rows = torch.zeros(3, 97), torch.arange(3).repeat(16)
    words = torch.randint(-(2**31), 2**31, (48, 2), generator=torch.Generator().manual_seed(0)).int()
    temperature = torch.full((48, 1), 0.7, dtype=torch.float64)
    ours, theirs = (each.draw(x, rows, words, temperature) for each in operations(monkeypatch))
    assert torch.equal(ours, theirs)
    assert len(set(ours.tolist())) > 24


KERNELS = """
    import warnings
    warnings.simplefilter("ignore")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from branchwise.runtime.gpu import kernels

    def build(kernel, types, **constants):
        names = kernel.arg_names
        signature = dict(zip(names, types.split())) | dict.fromkeys(constants, "constexpr")
        places = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        cubin = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
        print(kernel.__name__, len(cubin))

    for dtype in ("*bf16", "*fp32"):
        build(kernels.attend_kernel, f"{dtype} {dtype} {dtype} *fp32 *fp32 *i32 *i32 fp32 fp32 i32",
              HEADS=9, REPEAT=3, SIZE=96, WIDTH=128, ROWS=21, LANES=64, BLOCK=32)
        build(kernels.merge_kernel, f"*fp32 *fp32 *i32 *i32 {dtype} *fp32", HEADS=9, SIZE=96, WIDTH=128)
    build(kernels.place_kernel, "*bf16 *bf16 *bf16 *i64 *bf16 *bf16 *bf16 i32", Q=9, K=3, HALF=32, BLOCK=32, TURNS=True)
    build(kernels.mask_kernel, "*fp32 *i64 *i32 i32 i32", BLOCK=1024)
    build(kernels.draw_kernel, "*fp32 *i64 *i32 *fp64 *fp64 *i64 i32", BLOCK=1024)
"""


def test_they_compile_for_an_h200() -> None:
    """To machine code, by the compiler that Triton brings; what interprets them cannot, in the same process."""
    environment: dict[str, Any] = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KERNELS)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in built].count("attend_kernel") == 2 and len(built) == 7
    assert all(int(size) > 1000 for _, size in built)

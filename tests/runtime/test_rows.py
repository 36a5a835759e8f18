"""What compiled code does to each row is what torch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from branchwise.runtime.attention import AttnSpec
from branchwise.runtime.kv import KVPool
from branchwise.runtime.model.rope import Rope
from branchwise.runtime.model.rows import CompiledRows, TorchRows, loading_kernels, rows_for

H, K, D, HIDDEN = 6, 2, 16, 96
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


def compiled(dtype: torch.dtype) -> CompiledRows:
    loading_kernels(dtype == torch.bfloat16).result()
    rows = rows_for(dtype, torch.device("cpu"))
    assert isinstance(rows, CompiledRows)
    return rows


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("count", [1, 33])
def test_norms(dtype: torch.dtype, count: int, adds: bool) -> None:
    torch.manual_seed(0)
    x, more = torch.randn(2, count, HIDDEN).to(dtype) * 3
    weight = torch.randn(HIDDEN).to(dtype)
    theirs, ours = x.clone(), x.clone()
    expected = TorchRows().add_norm(theirs, more if adds else None, weight, 1e-5)
    found = compiled(dtype).add_norm(ours, more if adds else None, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(ours, theirs)  # what goes on to the next layer


@pytest.mark.parametrize("turns", [True, False])
def test_positions_and_the_pool(dtype: torch.dtype, turns: bool) -> None:
    torch.manual_seed(0)
    spec = AttnSpec(H, K, D, 1.0)
    positions = torch.tensor([5, 900, 0, 17])
    slots = torch.tensor([3, 1, 8, 6])
    angles = Rope(10_000.0 ** -(torch.arange(0, D, 2) / D), 1.0)(positions, dtype) if turns else None
    qkv = torch.randn(4, (H + 2 * K) * D).to(dtype)
    pools = [KVPool(8, [spec, spec], dtype, torch.device("cpu")) for _ in range(2)]
    for pool in pools:
        for part in (*pool.k, *pool.v):
            part.zero_()
    expected = TorchRows().place(qkv.clone(), angles, slots, pools[0], 1)
    found = compiled(dtype).place(qkv.clone(), angles, slots, pools[1], 1)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for layer in range(2):
        for theirs, ours in ((pools[0].k, pools[1].k), (pools[0].v, pools[1].v)):
            torch.testing.assert_close(ours[layer], theirs[layer], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            assert (ours[layer][[0, 2, 4, 5, 7]] == 0).all()  # nobody's


@pytest.mark.parametrize("activation", [F.silu, F.gelu])
@pytest.mark.parametrize("count", [1, 100])
def test_gates(dtype: torch.dtype, count: int, activation: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(count, 40).to(dtype) * 30
    expected = TorchRows().gate(gate_up.clone(), activation)
    found = compiled(dtype).gate(gate_up.clone(), activation)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_other_devices_and_dtypes_take_torch() -> None:
    assert isinstance(rows_for(torch.float16, torch.device("cpu")), TorchRows)
    assert isinstance(rows_for(torch.float32, torch.device("meta")), TorchRows)

"""The compiled kernel against the reference backend, on random trees, and how it is loaded, shared and done without."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from branchwise.runtime import compiling
from branchwise.runtime.attention import AttnBatch, AttnSpec, attn_batch, kernels
from branchwise.runtime.attention.cpu import CpuAttention
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.attention.reference import ReferenceAttention
from branchwise.runtime.attention.units import MOST_LANES, units_of
from branchwise.runtime.layout import Layout, Segment, Span
from tests.runtime.trees import random_step

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent.parent
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled code of the tests is kept where the user's is, else every run would take a minute."""
    for dtype in TOLERANCE:
        assert kernels.loading_of(16, 2, dtype).result(timeout=110), "numba is there, so the kernel is"


def forest(branches: int, shared: int, own: int, rows: int = 1, gap: int = 1) -> Layout:
    """Branches over `shared` tokens with `own` more each, the last `rows` of them new; every `gap`th slot is used."""
    prefix = Span(0, array("i", range(0, shared * gap, gap)))
    segments, base = [], shared * gap
    for branch in range(branches):
        slots = array("i", range(base + branch, base + branches * own, branches))  # between those of the others
        segments.append(Segment(branch * rows, rows, (*([prefix] if shared else []), Span(1 + branch, slots))))
    zeros = array("i", [0] * (branches * rows))
    return Layout(zeros, zeros, zeros, tuple(segments), array("i"), array("i"))


def both(batch: AttnBatch, spec: AttnSpec, dtype: torch.dtype, slots: int) -> tuple[Tensor, Tensor]:
    """What the kernel gives and what the reference gives in float32."""
    assert kernels.loading_of(spec.head_dim, spec.num_q_heads // spec.num_kv_heads, dtype).result(timeout=110)
    q = torch.randn(batch.num_rows, spec.num_q_heads, spec.head_dim).to(dtype)
    k, v = (torch.randn(slots + 1, spec.num_kv_heads, spec.head_dim).to(dtype) for _ in range(2))
    compiled, reference = CpuAttention(), ReferenceAttention()
    compiled.plan(batch, [spec])
    reference.plan(batch, [spec])
    got = compiled.forward(0, q, k, v)
    assert got.dtype == dtype
    return got.float(), reference.forward(0, q.float(), k.float(), v.float())


def assert_equal(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("cost", [None, CostModel(price=0.0, max_levels=3)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(6))
def test_random_trees(
    seed: int, dtype: torch.dtype, page_size: int, window: int | None, softcap: float | None, cost: CostModel | None
) -> None:
    torch.manual_seed(seed)
    *_, layout = random_step(random.Random(seed), 256, page_size)
    batch = attn_batch(layout, 256, CPU, page_size, cost)
    assert_equal(*both(batch, AttnSpec(4, 2, 16, 0.25, window, softcap), dtype, 256), dtype)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("branches", "shared", "own", "rows"), [(1, 0, 300, 1), (1, 70, 200, 200), (50, 100, 33, 1), (9, 65, 40, 17)]
)
def test_more_rows_and_keys_than_a_block(branches: int, shared: int, own: int, rows: int, window: int | None) -> None:
    torch.manual_seed(0)
    layout = forest(branches, shared, own, rows, gap=2)
    batch = attn_batch(layout, 4096, CPU, cost=CostModel())
    for dtype in TOLERANCE:
        assert_equal(*both(batch, AttnSpec(6, 3, 16, 0.25, window), dtype, 4096), dtype)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (5, 1, 96), (8, 2, 128), (8, 1, 256), (140, 1, 8)]
)
def test_shapes_of_heads(heads: int, key_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = attn_batch(forest(20, 40, 37, 3), 2048, CPU, cost=CostModel())
    for window in (None, 20):
        spec = AttnSpec(heads, key_heads, head_dim, head_dim**-0.5, window, softcap=3.0)
        assert_equal(*both(batch, spec, dtype, 2048), dtype)


def test_large_scores_and_weights_that_are_not_numbers() -> None:
    torch.manual_seed(0)
    batch = attn_batch(forest(8, 64, 20), 1024, CPU, cost=CostModel())
    assert_equal(*both(batch, AttnSpec(4, 2, 16, 500.0), torch.float32, 1024), torch.float32)
    attention, spec = CpuAttention(), AttnSpec(4, 2, 16, 0.25)
    attention.plan(batch, [spec])
    k, v, q = torch.randn(1025, 2, 16), torch.randn(1025, 2, 16), torch.randn(8, 4, 16)
    k[3] = torch.nan  # a shared key
    assert attention.forward(0, q, k, v).isnan().all()


def test_partial_results_say_where_a_row_has_no_key() -> None:
    torch.manual_seed(0)
    batch = attn_batch(forest(8, 64, 20), 1024, CPU, cost=CostModel())
    spec = AttnSpec(4, 2, 16, 0.25)
    k, v, q = torch.randn(1025, 2, 16), torch.randn(1025, 2, 16), torch.randn(10, 4, 16)
    attention, reference = CpuAttention(), ReferenceAttention()
    for backend in (attention, reference):
        backend.plan(batch, [spec])
    for level in batch.levels:
        for got, wanted in zip(
            attention.partial(level, 0, q, k, v), reference.partial(level, 0, q, k, v), strict=True
        ):
            torch.testing.assert_close(got, wanted)
    assert attention.partial(batch.levels[0], 0, q, k, v)[1][8:].isneginf().all()


@pytest.mark.parametrize("branches", [2, 8, 32])
def test_keys_are_read_once_for_all_branches(branches: int) -> None:
    """P + N x suffix: counted in the spans of the units, which is what the kernel walks."""
    batch = attn_batch(forest(branches, 1024, 64), 8192, CPU, cost=CostModel())
    assert units_of(batch.levels, 3, 3, None, threads=1).keys_read == 1024 + branches * 64
    assert units_of([batch.flat], 3, 3, None, threads=1).keys_read == branches * (1024 + 64)
    assert units_of([batch.flat], 3, 3, 100, threads=1).keys_read == branches * 100


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("repeat", [1, 3, 7, 200])
@pytest.mark.parametrize("rows", [1, 2, 42, 43, 200])
def test_no_unit_is_wider_than_the_kernels_buffers(rows: int, repeat: int, threads: int) -> None:
    units = units_of(attn_batch(forest(1, 5, rows, rows), 512, CPU).levels, 1, repeat, None, threads).units
    widths = (units[:, 1] - units[:, 0]) * repeat
    assert ((widths <= MOST_LANES) | (units[:, 1] - units[:, 0] == 1)).all()
    assert (units[1:, 0] == units[:-1, 1]).all()
    assert units[0, 0] == 0
    assert units[-1, 1] == rows


def test_several_engines_and_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each caller's helpers join and leave when they like; nobody's numbers change."""
    monkeypatch.setattr(kernels, "SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    torch.manual_seed(0)
    batch = attn_batch(forest(30, 100, 33), 2048, CPU, cost=CostModel())
    spec = AttnSpec(4, 2, 16, 0.25)
    q, k, v = torch.randn(30, 4, 16), torch.randn(2049, 2, 16), torch.randn(2049, 2, 16)
    reference = ReferenceAttention()
    reference.plan(batch, [spec])
    wanted = reference.forward(0, q, k, v)

    def engine(_: int) -> None:
        attention = CpuAttention()
        for _ in range(50):
            attention.plan(batch, [spec])
            torch.testing.assert_close(attention.forward(0, q, k, v), wanted)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(engine, range(3)))


def test_without_numba_torch_does_it_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "branchwise.runtime.attention.ragged", None)
    monkeypatch.setattr(compiling, "_said", [])
    with caplog.at_level(logging.WARNING):
        for head_dim in (20, 24):
            assert kernels.loading_of(head_dim, 2, torch.float32).result(timeout=60) is None
    assert len(caplog.records) == 1
    assert "there is no compiled code" in caplog.text
    batch, spec = attn_batch(forest(8, 64, 20), 1024, CPU, cost=CostModel()), AttnSpec(4, 2, 20, 0.25)
    q, k, v = torch.randn(8, 4, 20), torch.randn(1025, 2, 20), torch.randn(1025, 2, 20)
    attention, reference = CpuAttention(), ReferenceAttention()
    for backend in (attention, reference):
        backend.plan(batch, [spec])
    torch.testing.assert_close(attention.forward(0, q, k, v), reference.forward(0, q, k, v))
    kernels.loading_of.cache_clear()


LOAD = """
import logging, torch
logging.basicConfig()
from branchwise.runtime.attention.kernels import loading_of
kernel = loading_of(4, 1, torch.float32).result()
print(kernel is not None, sum(kernel.stats.cache_hits.values()))
"""


def load(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "BRANCHWISE_CACHE": str(cache)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", LOAD], cwd=ROOT, env=environment, text=True, **pipes)


@pytest.mark.slow
def test_processes_that_start_at_once_on_an_empty_cache_leave_one_that_serves(tmp_path: Path) -> None:
    for process in [load(tmp_path) for _ in range(3)]:
        assert process.communicate()[0].startswith("True"), process.returncode
    assert load(tmp_path).communicate()[0] == "True 1\n"
    (data,) = tmp_path.rglob("*.nbc")
    data.write_bytes(b"broken")
    out, err = load(tmp_path).communicate()
    assert out == "True 0\n"
    assert "made anew" in err


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named_and_done_without(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    out, err = load(tmp_path).communicate()
    assert out == "True 0\n"
    assert "cannot be kept in" in err

"""Weights on grids: how far they are moved, and that a GGUF's own quants are found again."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from branchwise.runtime.model.quantize import GROUP, Int4, Int8, to_int4, to_int8


def random_weight(rows: int = 256, columns: int = 576) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator) * 0.02 + 0.001


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def from_gguf(kind: str) -> torch.Tensor:
    """The values of a weight that a file holds in this type."""
    of = GGMLQuantizationType[kind]
    return torch.from_numpy(dequantize(quantize(random_weight().numpy(), of), of))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bits_of_a_gguf_stay_what_they_are_but_for_the_rounding_of_scales(kind: str) -> None:
    weight = from_gguf(kind)
    grid = to_int4(weight)
    moved = (grid.values() - weight).view(*grid.scale.shape, GROUP)
    assert float((moved / grid.scale.float()[..., None]).abs().max()) < 0.1
    assert rms(moved) < 0.0025 * rms(weight)


def test_a_q8_0_has_no_grid_of_one_scale_a_row_and_is_moved_by_about_as_much_as_it_was_by_itself() -> None:
    values = from_gguf("Q8_0")
    by_itself = rms(values - random_weight()) / rms(values)
    assert 0.005 < by_itself < 0.006
    assert rms(to_int8(values).values() - values) < 0.008 * rms(values)


@pytest.mark.parametrize(("to_grid", "error"), [(to_int4, 0.08), (to_int8, 0.008)])
def test_any_weight_is_moved_by_a_part_of_its_size(to_grid: type, error: float) -> None:
    weight = random_weight()
    grid = to_grid(weight)
    assert isinstance(grid, Int4 | Int8)
    assert error / 2 < rms(grid.values() - weight) / rms(weight) < error
    assert grid.scale.dtype == torch.bfloat16


def test_four_bits_are_nearer_than_gguf_has_them() -> None:
    weight = random_weight()
    ours = rms(to_int4(weight).values() - weight)
    for kind in ("Q4_0", "Q4_1"):
        assert ours < rms(from_gguf(kind) - weight)


@pytest.mark.parametrize("to_grid", [to_int4, to_int8])
@pytest.mark.parametrize("value", [0.0, 0.5, -0.5])
def test_rows_of_one_value_keep_it(to_grid: type, value: float) -> None:
    weight = torch.full((16, 64), value)
    values = to_grid(weight).values()
    torch.testing.assert_close(values, weight, rtol=2**-8, atol=0)


def test_bfloat16_weights_are_quantised_as_what_they_are() -> None:
    weight = random_weight().bfloat16()
    assert torch.equal(to_int4(weight).quants, to_int4(weight.float()).quants)
    assert torch.equal(to_int8(weight).quants, to_int8(weight.float()).quants)

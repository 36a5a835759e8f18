"""From where on sharing pays: what is timed, what is concluded, and that it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from branchwise.runtime.attention import AttnSpec
from branchwise.runtime.attention.flashinfer import FlashInferAttention
from branchwise.runtime.gpu import calibration
from branchwise.runtime.gpu.calibration import ROWS, SHARED, break_even, least_saved
from tests import flashinfer_standin

CPU = torch.device("cpu")


def test_sharing_pays_from_where_it_wins_for_good() -> None:
    won, lost = (2.0, 1.0), (1.0, 2.0)
    assert break_even([won] * len(SHARED)) == (ROWS - 1) * SHARED[0]
    assert break_even([lost, won, lost, *[won] * (len(SHARED) - 3)]) == (ROWS - 1) * SHARED[3]
    assert break_even([*[won] * (len(SHARED) - 1), lost]) == (ROWS - 1) * 2 * SHARED[-1]


def test_it_is_measured_once_for_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "cache_folder", lambda: tmp_path / "cache")
    times: list[list[tuple[float, float]]] = []

    def measure() -> list[tuple[float, float]]:
        times.append([(2.0, 1.0)] * len(SHARED))
        return times[-1]

    first = least_saved(measure, "a GPU", 1)
    assert least_saved(measure, "a GPU", 1) == first and len(times) == 1
    least_saved(measure, "another", 1)
    assert len(times) == 2
    for file in (tmp_path / "cache").iterdir():
        file.write_text("{torn")
    assert least_saved(measure, "a GPU", 1) == first and len(times) == 3


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(calibration, "cache_folder", lambda: tmp_path / "file" / "below")
    assert least_saved(lambda: [(1.0, 2.0)] * len(SHARED), "a GPU") > 0


def test_what_is_timed_reads_the_shared_span_once_and_by_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the stand-in, whose planner is strict: its pages are counted in the place of seconds."""
    monkeypatch.setattr(calibration, "SHARED", (8, 32))
    made: list[flashinfer_standin.BatchPrefillWithPagedKVCacheWrapper] = []

    class Library:
        merge_state_in_place = staticmethod(flashinfer_standin.merge_state_in_place)

        @staticmethod
        def BatchPrefillWithPagedKVCacheWrapper(*args: object, **options: object) -> object:  # its name there
            made.append(flashinfer_standin.BatchPrefillWithPagedKVCacheWrapper(*args, **options))  # type: ignore[arg-type]  # passed on
            return made[-1]

    def pages(replay: object, device: torch.device) -> float:
        before = sum(wrapper.pages_read for wrapper in made)
        assert callable(replay)
        out: Tensor = replay()
        assert out.shape == (ROWS, 4, 64)
        return float(sum(wrapper.pages_read for wrapper in made) - before)

    monkeypatch.setattr(calibration, "_seconds", pages)
    attention = FlashInferAttention(Library, CPU, torch.float32)
    spec = AttnSpec(4, 2, 64, 0.125)
    found = calibration.measure(attention, spec, torch.float32, CPU, lambda run: run)
    layers, own = calibration.LAYERS, calibration.OWN
    assert found == [(layers * ROWS * (shared + own), layers * (shared + ROWS * own)) for shared in (8, 32)]

"""The probe: what is chosen from its numbers, and that they are measured once and kept, whatever the file is like."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from branchwise.runtime import Engine, RequestError, probe
from branchwise.runtime.config import engine_config
from branchwise.runtime.probe import ROWS, Speeds

MEASURE = probe.measure  # before anything takes its place
CPU = torch.device("cpu")
ONE, HALF, TWICE = [1.0] * len(ROWS), [0.5] * len(ROWS), [2.0] * len(ROWS)


def of(**ways: list[float]) -> Speeds:
    return Speeds({"float32": ONE, "bfloat16": ONE, **ways}, {"4": ONE, "2": ONE})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where speeds are kept, empty."""
    monkeypatch.setattr(probe, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Speeds]:
    """What was measured; each time bfloat16 is faster than the time before."""
    results: list[Speeds] = []

    def measure() -> Speeds:
        results.append(of(bfloat16=[1.0 / (len(results) + 1)] * len(ROWS)))
        return results[-1]

    monkeypatch.setattr(probe, "measure", measure)
    return results


@pytest.mark.parametrize(
    ("bfloat16", "dtype"), [(HALF, torch.bfloat16), ([0.9] * len(ROWS), torch.float32), (TWICE, torch.float32)]
)
def test_bfloat16_is_chosen_where_it_is_clearly_faster(bfloat16: list[float], dtype: torch.dtype) -> None:
    assert of(bfloat16=bfloat16).dtype() == dtype


@pytest.mark.parametrize(
    ("threads", "chosen"),
    [
        ({"4": ONE}, None),
        ({"4": ONE, "2": [0.9] * len(ROWS)}, None),
        ({"4": ONE, "2": HALF, "1": TWICE}, 2),
        ({"4": HALF, "2": ONE}, None),
    ],
)
def test_another_number_of_threads_is_chosen_where_it_is_clearly_faster(
    threads: dict[str, list[float]], chosen: int | None
) -> None:
    assert Speeds(of().ways, threads).num_threads() == chosen


def test_packed_weights_are_taken_up_to_the_first_number_of_rows_at_which_they_are_slower() -> None:
    speeds = of(bfloat16=HALF, int4=[0.1, 0.4, 0.5, 0.6, 0.4])
    assert speeds.packed_rows("int4", torch.bfloat16) == ROWS[2]
    assert speeds.packed_rows("int4", torch.float32) == speeds.packed_rows("int4", torch.float16) == ROWS[4]
    assert of(int4=TWICE).packed_rows("int4", torch.float32) == 4
    assert of().packed_rows("int4", torch.float32) == 4


def test_what_was_measured_first_is_kept(folder: Path, measured: list[Speeds]) -> None:
    assert probe.speeds() == probe.speeds() == measured[0]
    assert len(measured) == 1
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"ways": 1, "threads": 2}',
        json.dumps({"ways": {"float32": ONE}, "threads": {"1": ONE}}),
        json.dumps({"ways": {"float32": ONE, "bfloat16": ONE}, "threads": {}}),
        json.dumps({"ways": {"float32": ONE, "bfloat16": [0.0] * len(ROWS)}, "threads": {"1": ONE}}),
        json.dumps({"ways": {"float32": ONE, "bfloat16": ONE[1:]}, "threads": {"1": ONE}}),
        json.dumps({"ways": {"float32": ONE, "bfloat16": ["x"] * len(ROWS)}, "threads": {"1": ONE}}),
        json.dumps({"ways": {"float32": ONE, "bfloat16": ONE}, "threads": {"1": ONE, "many": HALF}}),
        "[" * 100_000,
    ],
)
def test_a_torn_file_is_measured_anew(folder: Path, measured: list[Speeds], content: str) -> None:
    probe.speeds()
    [file] = folder.iterdir()
    file.write_text(content)
    assert probe.speeds() == probe.speeds() == measured[1]


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path, measured: list[Speeds]) -> None:
    folder.write_text("a file, where a folder should be")
    assert probe.speeds() == measured[0]
    assert probe.speeds() == measured[1]


def test_of_two_processes_the_first_to_keep_its_speeds_decides(
    folder: Path, measured: list[Speeds], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = of(bfloat16=TWICE)

    def measure() -> Speeds:
        folder.mkdir()
        (folder / f"probe-{probe._machine()}.json").write_text(json.dumps(asdict(other)))
        return of()

    monkeypatch.setattr(probe, "measure", measure)
    assert probe.speeds() == other


@pytest.mark.parametrize("change", ["torch", "processor", "cores", "threads", "version"])
def test_another_machine_is_measured_for_itself(
    change: str, folder: Path, measured: list[Speeds], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.speeds()
    match change:
        case "torch":
            monkeypatch.setattr(torch, "__version__", "99.0")
        case "processor":
            monkeypatch.setattr(probe, "_processor", lambda: "a newer one")
        case "cores":
            monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(999), raising=False)
        case "threads":
            monkeypatch.setenv("OMP_NUM_THREADS", "999")
        case "version":
            monkeypatch.setattr(probe, "VERSION", 99)
    assert probe.speeds() == measured[1]


@pytest.mark.parametrize(("load", "threads"), [(0.0, ["4", "2", "1"]), (999.0, ["4"])], ids=["idle", "busy"])
def test_measuring_times_every_way_and_leaves_torch_as_it_was(
    load: float, threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        speeds = MEASURE()
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert set(speeds.ways) == {"float32", "bfloat16", "int8", "int4"}
    assert list(speeds.threads) == threads
    for times in (*speeds.ways.values(), *speeds.threads.values()):
        assert len(times) == len(ROWS) and min(times) > 0


# ------------------------------------------------------------------------------------------- what an engine takes


def test_fastest_takes_what_the_probe_says(measured: list[Speeds], folder: Path) -> None:
    config = engine_config(dtype="fastest")
    assert config.torch_dtype(CPU) == torch.float32
    assert config.num_threads(CPU) is None
    for file in folder.iterdir():
        file.unlink()
    assert config.torch_dtype(CPU) == torch.bfloat16
    assert engine_config().torch_dtype(CPU) == torch.float32  # whatever the probe says


def test_explicit_values_need_no_probe(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "measure", lambda: pytest.fail("measured"))
    monkeypatch.setattr(probe, "_read", lambda file: pytest.fail("read"))
    before = torch.get_num_threads()
    try:
        with Engine(tiny_model, num_slots=64, dtype="bfloat16", threads=1) as engine:
            assert engine.model.dtype == torch.bfloat16
            assert repr(engine) == f"Engine({str(tiny_model)!r}, torch.bfloat16, cpu, 1 threads, 64 slots)"
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "all"])
def test_threads_are_a_positive_number(threads: Any) -> None:
    with pytest.raises(RequestError, match=r"^Engine: threads must be a positive integer, got .*\.$"):
        engine_config(threads=threads)

"""Which checks there are, in their order: what is needed most and takes least comes first. Run by `check.py`."""

from __future__ import annotations

import argparse
import platform
import tempfile
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numerics
import speed
import torch
from place import Place
from random_model import EIGHT_B, ONE_B, SMALL
from report import Report

from branchwise.runtime.config import EngineConfig
from branchwise.runtime.devices import gib, gpu_lacks, total_bytes
from branchwise.runtime.errors import EngineError

LIMIT_S = 430.0
"""No check begins after that: the longest take half a minute."""


def versions(place: Place) -> str:
    """What there is, and whether it is enough."""
    names = ("torch", "triton", "flashinfer-python", "apache-tvm-ffi", "transformers", "numpy")
    told = [f"Python {platform.python_version()}", f"CUDA {torch.version.cuda}"]
    for name in names:
        try:
            told.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            told.append(f"no {name}")
    if place.gpu:
        told.append(f"{torch.cuda.get_device_name(place.device)}, {gib(total_bytes(place.device))}")
        lacks = gpu_lacks(place.device)
        assert lacks is None, lacks
        place.library()
    return ", ".join(told)


def main(description: str) -> int:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and few repeats, to try the checks")
    parser.add_argument("--only", help="checks with this in their name")
    parser.add_argument("--out", type=Path, help="a file for all of it, as lines of JSON")
    options = parser.parse_args()
    try:
        place = Place(EngineConfig(device=options.device).torch_device(), options.small)
    except EngineError as error:
        print(f"FAIL  device: {error}")
        return 1
    report = Report(LIMIT_S, options.only)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        run(place, report, Path(folder))
    print("", report.table(), "", sep="\n")
    counts = [f"{sum(v.verdict == kind for v in report.verdicts)} {kind}" for kind in ("PASS", "FAIL", "SKIP")]
    print(", ".join(counts), f"in {report.seconds:.0f} s")
    if options.out is not None:
        report.write(options.out)
    return int(any(v.verdict == "FAIL" for v in report.verdicts))


def run(place: Place, report: Report, folder: Path) -> None:
    check = report.check
    check("versions", partial(versions, place))
    check("our kernels: rows", partial(numerics.own_rows, place))
    check("our kernels: attention", partial(numerics.own_attention, place))
    check("draws", partial(numerics.draws, place))
    check("golden tokens", partial(numerics.golden, place, folder))
    check("log-probabilities", partial(numerics.scores, place, folder))
    for size in (64, 128):
        check(f"FlashInfer, heads of {size}", partial(numerics.wrappers, place, size, plain=True))
    check("random trees, cascade and plain", partial(numerics.trees, place))
    check("graphs and eager steps", partial(numerics.graph_replays, place))
    check("where sharing pays", partial(speed.worth_sharing, place, report))
    for shape in (SMALL,) if place.small else (EIGHT_B, ONE_B):
        speed.check_all(place, shape, report, folder)
    check("FlashInfer, windows and soft caps", partial(numerics.wrappers, place, 64, plain=False))

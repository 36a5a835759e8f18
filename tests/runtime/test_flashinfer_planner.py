"""What we give FlashInfer, its real wrappers and planners take, on a fake CUDA runtime: see `tests/flashinfer_planner.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from branchwise.runtime.models import cache_folder

TESTS = Path(__file__).parents[1]
NEEDED = ("gcc", "nvcc")

pytestmark = [
    pytest.mark.flashinfer,
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # the first time, nvcc compiles FlashInfer's kernel for heads of 64 numbers
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason="needs gcc and nvcc, to build for a GPU"),
]


def build(folder: Path) -> None:
    """libcudart.so.13, and a libcuda that is empty, as it is only linked to."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "version.map"
    script.write_text("libcudart.so.13 { global: *; };")
    gcc = ["gcc", "-shared", "-fPIC", "-w", "-O1"]
    names = ["-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={script}"]
    subprocess.run([*gcc, "-o", folder / "libcudart.so.13", TESTS / "fake_cudart.c", *names], check=True)
    subprocess.run([*gcc, "-o", folder / "libcuda.so", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1"], check=True)
    shutil.copy(folder / "libcuda.so", folder / "libcuda.so.1")
    shutil.copy(folder / "libcudart.so.13", folder / "libcudart.so")


def test_real_planners_list_the_work_that_our_arrays_describe() -> None:
    folder = cache_folder() / "flashinfer-planner"
    build(folder)
    environment = os.environ | {
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{folder}",
        "FLASHINFER_USE_CUDA_NORM": "1",
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # ninja is beside Python
    }
    done = subprocess.run(
        [sys.executable, TESTS / "flashinfer_planner.py", "60"],
        env=environment, capture_output=True, text=True, check=False, cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "levels of 60 trees" in done.stdout and ", 0 of them" not in done.stdout

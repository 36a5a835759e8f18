"""FlashInfer's real wrappers and planners take what we give them: `tests/flashinfer_planner.py`, in a process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from branchwise.runtime.models import cache_folder
from tests.fake_cuda import HERE, NEEDED, build, environment

pytestmark = [
    pytest.mark.flashinfer,
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # the first time, nvcc compiles FlashInfer's kernel for heads of 64 numbers
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason="needs gcc and nvcc, to build for a GPU"),
]


def test_real_planners_list_the_work_that_our_arrays_describe() -> None:
    folder = cache_folder() / "flashinfer-planner"
    build(folder)
    command = [sys.executable, HERE / "flashinfer_planner.py", "60"]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "levels of 60 trees" in done.stdout and ", 0 of them" not in done.stdout

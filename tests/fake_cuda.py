"""An environment in which FlashInfer's host code is built and runs without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NEEDED = ("gcc", "nvcc")


def build(folder: Path) -> None:
    """A libcudart.so.13 that has no GPU, and a libcuda that is empty, as it is only linked to."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "version.map"
    script.write_text("libcudart.so.13 { global: *; };")
    gcc = ["gcc", "-shared", "-fPIC", "-w", "-O1"]
    names = ["-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={script}"]
    subprocess.run([*gcc, "-o", folder / "libcudart.so.13", HERE / "fake_cudart.c", *names], check=True)
    subprocess.run([*gcc, "-o", folder / "libcuda.so", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1"], check=True)
    shutil.copy(folder / "libcuda.so", folder / "libcuda.so.1")
    shutil.copy(folder / "libcudart.so.13", folder / "libcudart.so")


def environment(folder: Path, capability: str = "9.0a") -> dict[str, str]:
    """For a process that imports FlashInfer. Its modules are built in `folder`, for GPUs of that capability."""

    def path(name: str, *first: Path) -> str:
        return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get(name)])])

    return os.environ | {
        "FLASHINFER_CUDA_ARCH_LIST": capability,
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{folder}",
        "FLASHINFER_USE_CUDA_NORM": "1",
        "LD_LIBRARY_PATH": path("LD_LIBRARY_PATH", folder),
        "PYTHONPATH": path("PYTHONPATH", HERE.parent),
        "PATH": path("PATH", Path(sys.executable).parent),  # ninja is beside Python
    }

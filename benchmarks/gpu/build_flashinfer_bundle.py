"""FlashInfer with its modules compiled, as one zip, for a GPU machine without a compiler or a network.

    python benchmarks/gpu/build_flashinfer_bundle.py --out flashinfer-bundle.zip [--heads 64 128] [--capability 9.0a]

Needs FlashInfer (the `cuda` extra), gcc and nvcc, and no GPU: modules are compiled by asking for what an engine asks
for, on a fake CUDA runtime. Norms and sampling need headers of cuBLAS and cuRAND: name folders that have them with
--include. There:

    unzip flashinfer-bundle.zip -d bundle
    PYTHONPATH=bundle FLASHINFER_DISABLE_JIT=1 python benchmarks/gpu/check.py

What is in it is FlashInfer's and tvm-ffi's, under their licences; the repository holds none of it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("data/cutlass", "data/cccl", "data/spdlog", "data/include")
"""What is needed to compile only."""

PACKAGES = {"flashinfer": "flashinfer-python", "tvm_ffi": "apache-tvm-ffi"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 128], help="sizes of heads")
    parser.add_argument("--plain", action="store_true", help="no windows and no soft caps: a quarter of the modules")
    parser.add_argument("--capability", default="9.0a", help="of the GPU, as FLASHINFER_CUDA_ARCH_LIST takes it")
    parser.add_argument("--include", type=Path, nargs="*", default=[], help="folders with further headers")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)  # in the process that does it
    options = parser.parse_args()
    if options.compile:
        return compile_modules(options.heads, plain=options.plain)
    from branchwise.runtime.models import cache_folder
    from tests.fake_cuda import NEEDED, build, environment

    missing = [name for name in NEEDED if shutil.which(name) is None]
    missing += [package for name, package in PACKAGES.items() if find_spec(name) is None]
    if missing:
        print(f"there is no {', no '.join(missing)}, which this needs")
        return 1
    folder = cache_folder() / "flashinfer-planner"
    build(folder)
    flags = " ".join(f"-I{path.resolve()}" for path in options.include)
    variables = environment(folder, options.capability) | {"FLASHINFER_EXTRA_CUDAFLAGS": flags}
    done = subprocess.run([sys.executable, __file__, "--compile", *sys.argv[1:]], env=variables, check=False)
    version = distribution(PACKAGES["flashinfer"]).version
    modules = {path.stem: path for path in folder.glob(f".cache/flashinfer/{version}/*/cached_ops/*/*.so")}
    with zipfile.ZipFile(options.out, "w", zipfile.ZIP_DEFLATED) as bundle:
        for path, name in files():
            bundle.write(path, name)
        for name, path in modules.items():
            bundle.write(path, f"flashinfer/data/aot/{name}/{name}.so")
    size = options.out.stat().st_size / 2**20
    print(f"{options.out}: {size:.1f} MiB, {len(modules)} modules: {', '.join(sorted(modules))}")
    return done.returncode


def files() -> Iterator[tuple[Path, str]]:
    """What an import needs, and its name in the bundle."""
    for name, package in PACKAGES.items():
        where = Path((find_spec(name) or sys.exit(f"no {name}")).origin or "").parent
        for path in sorted(where.rglob("*")):
            inside = path.relative_to(where).as_posix()
            if path.is_file() and "__pycache__" not in path.parts and not inside.startswith((*LEFT_OUT, "data/aot")):
                yield path, f"{name}/{inside}"
        for file in distribution(package).files or ():
            if file.parts[0].endswith(".dist-info"):
                yield Path(str(file.locate())), file.as_posix()


def compile_modules(heads: list[int], *, plain: bool) -> int:
    """Use everything that an engine uses. What cannot be compiled is told, and the rest goes on."""
    import torch

    from branchwise.runtime.attention import AttnSpec
    from branchwise.runtime.attention.flashinfer import FlashInferAttention
    from tests.flashinfer_planner import load

    _, flashinfer = load()
    failed = 0

    def attempt(name: str, use: Callable[[], object]) -> None:
        nonlocal failed
        try:
            use()
            print(f"compiled: {name}", flush=True)
        except Exception as error:
            failed += 1
            print(f"NOT compiled: {name}: {' '.join(str(error).split())[-400:]}", flush=True)

    wrapper: Any = type("Wrapper", (), {"merge_state_in_place": lambda *_: None})()
    wrapper.BatchPrefillWithPagedKVCacheWrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    attention = FlashInferAttention(wrapper, torch.device("cpu"), torch.bfloat16)
    for size, window, cap in product(heads, (None,) if plain else (None, 64), (None,) if plain else (None, 30.0)):
        spec = AttnSpec(4, 2, size, 0.1, window, cap)
        attempt(f"attention, {spec}", lambda spec=spec: attention.try_out([spec]))
    others = {
        "merges": flashinfer.cascade.get_cascade_module,
        "silu": lambda: flashinfer.activation.get_act_and_mul_module("silu"),
        "gelu": lambda: flashinfer.activation.get_act_and_mul_module("gelu_tanh"),
        "norms": flashinfer.norm.get_norm_module,
        "sampling": flashinfer.sampling.get_sampling_module,
    }
    for name, use in others.items():
        attempt(name, use)
    return int(failed > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    sys.exit(main())

"""Which layer may import what, read from the syntax tree: nothing here runs the code it judges."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT: dict[str, set[str]] = {"lang": set(), "runtime": set(), "interpreter": {"lang", "runtime"}}
FILES = [path.relative_to(ROOT) for layer in sorted(MAY_IMPORT) for path in sorted((ROOT / layer).rglob("*.py"))]
FACE = [path.relative_to(ROOT) for path in sorted((ROOT / "branchwise").glob("*.py"))]

# Every other import stands at the top of its file: one inside a function hides a layer or a cycle.
LATE = {
    ("interpreter/changes.py", "asyncio"): "30 ms that only async programs need",
    ("interpreter/mapping.py", ".loops"): "asyncio",
    ("interpreter/progress.py", "tqdm.auto"): "asyncio, and what a notebook needs for its bars",
    ("interpreter/run.py", ".loops"): "asyncio",
    ("interpreter/serve/cluster.py", ".app"): "who deploys replicas needs no engine",
    ("interpreter/serve/cluster.py", "..local"): "who deploys replicas needs no engine",
    ("interpreter/serve/command.py", ".serving"): "an extra, and torch; --help needs neither",
    ("interpreter/serve/serving.py", "."): "an extra: Ray",
    ("runtime/attention/choice.py", ".deterministic"): "numba, which nobody else must wait for; may be missing",
    ("runtime/attention/choice.py", ".triton"): "Triton, which only GPUs need; may be missing",
    ("runtime/attention/kernels.py", ".ragged"): "numba and its compiler, in a thread of their own; may be missing",
    ("runtime/draws.py", ".draw_kernel"): "numba and its compiler, in a thread of their own; may be missing",
    ("runtime/drawers.py", ".gpu.draws"): "Triton, which only GPUs need; may be missing",
    ("runtime/gpu/libraries.py", ".kernels"): "Triton, which only GPUs need; may be missing",
    ("runtime/model/fused.py", ".fused_kernel"): "numba and its compiler, in a thread of their own; may be missing",
    ("runtime/model/rows.py", ".gpu_rows"): "Triton, which only GPUs need; may be missing",
    ("runtime/model/rows.py", ".rowwise"): "numba and its compiler, in a thread of their own; may be missing",
    ("runtime/model/load.py", ".transformers"): "a second of imports that most models do not need",
    ("runtime/models.py", ".gguf"): "torch and transformers, only when a model is converted",
}


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules that are imported, relative ones with their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "branchwise" and not node.level:
            yield from (f"branchwise.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_layer_imports_only_what_it_may(path: Path) -> None:
    own = path.parts[0]
    for module in imports(parsed(path)):
        if module.startswith("."):
            climbs = len(module) - len(module.lstrip(".")) - 1
            assert climbs < len(path.parts) - 1, f"{path}: {module} leaves {own}/; write branchwise...."
            continue
        top, *rest = module.split(".")
        assert top not in MAY_IMPORT, f"{path}: write branchwise.{module}"
        if top == "branchwise":
            assert rest, f"{path}: import from the layer, not from the public face"
            assert rest[0] in MAY_IMPORT[own], f"{path}: {own}/ may not import from {rest[0]}/"


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "lang"], ids=str)
def test_language_needs_nothing_but_python(path: Path) -> None:
    absolute = {module.split(".")[0] for module in imports(parsed(path)) if not module.startswith(".")}
    assert absolute <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", FILES + FACE, ids=str)
def test_imports_stand_at_the_top(path: Path) -> None:
    functions = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    late = {module for function in functions for module in imports(function)}
    unlisted = {module for module in late if (path.as_posix(), module) not in LATE}
    assert not unlisted, f"{path}: move to the top, or list here with the reason: {sorted(unlisted)}"


def test_every_late_import_that_is_listed_exists() -> None:
    for file, module in LATE:
        assert module in set(imports(parsed(Path(file)))), f"{file} no longer imports {module}"

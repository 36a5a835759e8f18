"""What is built and installed, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import branchwise

ROOT = Path(__file__).parent.parent
LAYERS = ["interpreter", "lang", "runtime"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def python(code: str) -> str:
    """The output of `code` in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def source_files() -> set[str]:
    """Every file that belongs into a wheel, by its name there."""
    face = {path.relative_to(ROOT) for path in (ROOT / "branchwise").glob("*.py")} | {Path("branchwise/py.typed")}
    layers = {Path("branchwise") / path.relative_to(ROOT) for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    return {path.as_posix() for path in face | layers}


def test_listed_packages_are_the_folders() -> None:
    folders = {path.parent.relative_to(ROOT) for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    packages = {"branchwise", *(".".join(("branchwise", *folder.parts)) for folder in folders)}
    assert PROJECT["tool"]["setuptools"]["packages"] == sorted(packages)


def test_every_package_has_an_init_file() -> None:
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), package


@pytest.mark.parametrize("layer", LAYERS)
def test_links_lead_to_the_layers(layer: str) -> None:
    link = ROOT / "branchwise" / layer
    assert link.is_symlink()
    assert link.readlink() == Path("..") / layer
    assert PROJECT["tool"]["setuptools"]["package-dir"][f"branchwise.{layer}"] == layer


def test_every_dependency_is_pinned_for_the_tests() -> None:
    pins = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    wanted += PROJECT["project"]["optional-dependencies"]["docs"]
    names = {re.split(r"[<>=\[]", requirement)[0].replace("_", "-") for requirement in wanted}
    assert names <= pins, names - pins


def test_import_loads_nothing_heavy() -> None:
    """The time of an import is that of the modules it loads, and those are counted, not seconds."""
    loaded = set(python("import sys, branchwise; print(*sys.modules)").split())
    heavy = {"torch", "numpy", "transformers", "tokenizers", "huggingface_hub", "outlines_core", "jinja2", "asyncio"}
    assert not heavy & loaded
    assert "branchwise.runtime" not in loaded


def test_engine_is_loaded_at_its_first_use() -> None:
    assert python("import sys, branchwise; branchwise.Engine; print('torch' in sys.modules)") == "True\n"


def test_public_names_are_sorted_and_there() -> None:
    assert branchwise.__all__ == sorted(branchwise.__all__)
    assert all(hasattr(branchwise, name) for name in branchwise.__all__)
    assert set(branchwise.__all__) <= set(dir(branchwise))


def test_names_of_sglang_say_what_to_write_instead() -> None:
    with pytest.raises(AttributeError, match=r"^module 'branchwise' has no attribute 'Runtime'\. Write Engine\("):
        branchwise.Runtime  # noqa: B018  # reading it is the test
    with pytest.raises(AttributeError, match=r"has no attribute 'image'\. Models here read text only\.$"):
        branchwise.image  # noqa: B018  # reading it is the test
    assert branchwise.greedy_token_selection == "greedy_token_selection"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'branchwise' has no attribute 'nothing'$"):
        branchwise.nothing  # noqa: B018  # reading it is the test


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wheel_and_sdist_hold_the_whole_package_and_no_more(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, capture_output=True, text=True, check=True)  # the wheel is built from the sdist
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"branchwise-{re.escape(branchwise.__version__)}-py3-none-any\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name for name in names if ".dist-info/" not in name} == source_files()
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.removeprefix("branchwise/") for name in source_files() if name.count("/") > 1} <= inside
    assert {"LICENSE", "README.md", "pyproject.toml", "branchwise/py.typed"} <= inside

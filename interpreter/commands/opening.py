"""An engine for a command: what is fetched shows its bar, loading a spinner, both on stderr."""

from __future__ import annotations

from typing import Any, TypeVar

from huggingface_hub.utils.tqdm import disable_progress_bars
from rich.console import Console

from branchwise.runtime.models import resolve

from ..local import Engine

MODEL = "smollm2-135m"


E = TypeVar("E", bound=Engine)


def open_engine(kind: type[E], model: str | None, *, quiet: bool = False, **options: Any) -> E:
    """Load `model`, or the demo model for None, into an engine of this kind."""
    name = model or MODEL
    if quiet:
        disable_progress_bars()
    folder = resolve(name)  # before the spinner: what is fetched draws a bar of its own
    console = Console(stderr=True, quiet=quiet)
    with console.status(f"loading {name} …"):
        engine = kind(folder, **options)
    engine.name = name
    return engine

"""A state that is shown while it grows: one display of the cell, updated in place."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ..changes import blocking
from ..transcript import Transcript
from .page import as_html
from .spans import settled

EVERY_S = 0.1
"""Between two updates. Each replaces the cell's display, so a notebook keeps the last one only."""


def live(transcript: Transcript, ended: Callable[[], bool]) -> None:
    """Show what is written until all of it is done and the program has `ended`; outside of notebooks, print it."""
    notebook = _notebook()
    if notebook is None:
        for piece in blocking(transcript.steps(until_ended=not ended())):
            print(piece, end="", flush=True)
        print()
        return
    shown = as_html(transcript)
    display = notebook.display({"text/html": shown}, raw=True, display_id=True)
    over = False
    while not over:
        over = ended() and settled(transcript)
        if not over:
            time.sleep(EVERY_S)
        now = as_html(transcript)
        if now != shown:
            display.update({"text/html": now}, raw=True)
            shown = now


def _notebook() -> Any:
    """`IPython.display`, if this process runs cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.modules.get("IPython.display") if getattr(shell, "kernel", None) is not None else None

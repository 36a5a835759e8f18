"""How values and names are written in messages: short, and with the name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from .errors import RequestError

MOST_CHARACTERS = 60


def shown(value: object) -> str:
    """`value` as `repr` writes it, cut where it becomes long."""
    return shortened(repr(value))


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the one of `known` most like `name`, or lists them all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(names)}."


def check_name(name: str, known: Iterable[str], *, where: str = "") -> None:
    """Raise `RequestError` unless `name` is one of the `known` options; the message begins with `where`."""
    names = list(known)
    if name not in names:
        raise RequestError(f"{where}there is no option {name}. {nearest(name, names)}")

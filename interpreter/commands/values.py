"""Values of programs as JSON has them: for scripts that read what a command prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum


def plain(value: object) -> object:
    """`value` of dicts, lists, text, numbers, true, false and null; what is none of these as its text."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)  # of Pydantic, which need not be installed
    if callable(dump):
        return plain(dump())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    return str(value)

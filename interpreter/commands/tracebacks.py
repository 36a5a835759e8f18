"""The traceback of a user's error without our frames: the lines that the user can mend."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from branchwise.lang import LangError
from branchwise.runtime import EngineError

from ..errors import RunError
from .errors import Failed, WrongArgument

ERRORS = (EngineError, LangError, RunError)
OURS = [Path(sys.modules[error.__module__].__file__ or "").resolve().parent for error in ERRORS]
"""The folders of our three layers."""


@contextmanager
def of_the_user() -> Iterator[None]:
    """What the block raises that is no error of ours becomes `Failed`."""
    try:
        yield
    except (*ERRORS, WrongArgument):
        raise
    except Exception as error:
        raise Failed(told(error)) from error


def told(error: Exception) -> str:
    """Its traceback, and those of its causes."""
    whole = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = whole
    while one is not None:
        one.stack = traceback.StackSummary.from_list([frame for frame in one.stack if not _ours(frame.filename)])
        one = one.__cause__ or one.__context__
    return "".join(whole.format()).rstrip()


def _ours(filename: str) -> bool:
    path = Path(filename).resolve()
    return filename.startswith("<frozen ") or any(layer in path.parents for layer in OURS)

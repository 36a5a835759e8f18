"""Programs that call a language model in branches, with every shared prefix computed once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from branchwise.interpreter import (
    Branches,
    Cancelled,
    GenerationError,
    NoBackend,
    RunError,
    Scripted,
    State,
    UnknownVariable,
    function,
    set_default_backend,
)
from branchwise.lang import (
    CallError,
    ConstraintError,
    LangError,
    OptionError,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    role,
    select,
    system,
    system_begin,
    system_end,
    text,
    tools,
    user,
    user_begin,
    user_end,
)

__all__ = [
    "Branches",
    "CallError",
    "Cancelled",
    "ConstraintError",
    "Engine",
    "EngineError",
    "GenerationError",
    "LangError",
    "ModelNotFound",
    "NoBackend",
    "OptionError",
    "RunError",
    "Scripted",
    "State",
    "UnknownVariable",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "function",
    "gen",
    "role",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "text",
    "tools",
    "user",
    "user_begin",
    "user_end",
]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from branchwise.interpreter.local import Engine
    from branchwise.runtime import EngineError, ModelNotFound
else:
    # These load torch, so they are loaded when they are first used.
    _LATE = {
        "Engine": "branchwise.interpreter.local",
        "EngineError": "branchwise.runtime",
        "ModelNotFound": "branchwise.runtime",
    }

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LATE[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATE})

"""Programs that call a language model in branches, with every shared prefix computed once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from branchwise.interpreter import (
    AsyncBranches,
    AsyncState,
    Branches,
    Cancelled,
    Completion,
    GenerationError,
    InvalidText,
    NoBackend,
    RunError,
    Scripted,
    Selection,
    State,
    TruncatedText,
    UnknownVariable,
    function,
    set_default_backend,
)
from branchwise.lang import (
    CHOICES_METHODS,
    CallError,
    ConstraintError,
    LangError,
    OptionError,
    Plan,
    Program,
    Trace,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_json,
    gen_string,
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

from . import parallel

__all__ = [
    "AsyncBranches",
    "AsyncState",
    "Branches",
    "CallError",
    "Cancelled",
    "Completion",
    "ConstraintError",
    "Engine",
    "EngineError",
    "GenerationError",
    "InvalidText",
    "LangError",
    "ModelNotFound",
    "NoBackend",
    "OpenAI",
    "OptionError",
    "Plan",
    "Program",
    "RunError",
    "Scripted",
    "Selection",
    "ServerError",
    "State",
    "Trace",
    "TruncatedText",
    "UnknownVariable",
    "Unsupported",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "function",
    "gen",
    "gen_int",
    "gen_json",
    "gen_string",
    "parallel",
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
    from branchwise.interpreter.openai import OpenAI, ServerError, Unsupported
    from branchwise.runtime import EngineError, ModelNotFound
else:
    # These load torch, or the client of OpenAI, so they are loaded when they are first used.
    _LATE = {
        "Engine": "branchwise.interpreter.local",
        "EngineError": "branchwise.runtime",
        "ModelNotFound": "branchwise.runtime",
        "OpenAI": "branchwise.interpreter.openai",
        "ServerError": "branchwise.interpreter.openai",
        "Unsupported": "branchwise.interpreter.openai",
    }

    # What programs for SGLang may say that is spelled otherwise here, or that there is not: see docs/from-sglang.md.
    _INSTEAD = {
        "Runtime": 'Write Engine("a name or a folder"), which is in this process.',
        "RuntimeEndpoint": 'Write Engine("a name or a folder"), which is in this process.',
        "flush_cache": "Write engine.reset_cache().",
        "get_server_info": "Write engine.stats, or repr(engine).",
        "global_config": "Options are given to Engine(...), @function(...) and run(...).",
        "image": "Models here read text only.",
        "video": "Models here read text only.",
        "separate_reasoning": "Give the reasoning a gen of its own, with a stop where it ends.",
        "Anthropic": "It offers neither tokens nor what constraints need.",
        "LiteLLM": "It offers neither tokens nor what constraints need.",
        "VertexAI": "It offers neither tokens nor what constraints need.",
    }

    def __getattr__(name: str) -> object:
        if name in CHOICES_METHODS:
            return name
        if name not in _LATE:
            hint = f". {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        value = globals()[name] = getattr(import_module(_LATE[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATE})

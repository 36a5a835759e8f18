"""Running programs: states, forks and joins, over sessions that a backend opens."""

from .async_branches import AsyncBranches
from .async_state import AsyncState
from .branches import Branches
from .errors import Cancelled, GenerationError, InvalidText, NoBackend, RunError, TruncatedText, UnknownVariable
from .run import Interpreter, function, set_default_backend
from .scripted import Asked, Scripted
from .session import (
    Backend,
    Cancel,
    Completion,
    Delta,
    FinishReason,
    Listener,
    Segment,
    Selection,
    Session,
    Times,
    TokenLogprob,
    Usage,
)
from .state import State

__all__ = [
    "Asked",
    "AsyncBranches",
    "AsyncState",
    "Backend",
    "Branches",
    "Cancel",
    "Cancelled",
    "Completion",
    "Delta",
    "FinishReason",
    "GenerationError",
    "Interpreter",
    "InvalidText",
    "Listener",
    "NoBackend",
    "RunError",
    "Scripted",
    "Segment",
    "Selection",
    "Session",
    "State",
    "Times",
    "TokenLogprob",
    "TruncatedText",
    "UnknownVariable",
    "Usage",
    "function",
    "set_default_backend",
]

"""Computing tokens, sharing prefixes: the engine and what it is made of."""

from .engine import Engine, GenerateParams, Handle
from .errors import (
    ConstraintError,
    EngineClosed,
    EngineError,
    ModelNotFound,
    OutOfSlots,
    RequestError,
    RequestTooLong,
    WeightsError,
)
from .request import Delta, Result
from .stats import Stats

__all__ = [
    "ConstraintError",
    "Delta",
    "Engine",
    "EngineClosed",
    "EngineError",
    "GenerateParams",
    "Handle",
    "ModelNotFound",
    "OutOfSlots",
    "RequestError",
    "RequestTooLong",
    "Result",
    "Stats",
    "WeightsError",
]

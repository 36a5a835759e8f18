"""Computing tokens, sharing prefixes: the engine and what it is made of."""

import os

# Before torch loads its OpenMP library, which reads it once. By default a thread that waits for another spins for
# long: on a busy machine a step then takes four times as long. With this it takes twice, and no longer on an idle one.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from .engine import Engine
from .errors import (
    CacheError,
    ConstraintError,
    EngineClosed,
    EngineError,
    ModelNotFound,
    OutOfSlots,
    RequestError,
    RequestTooLong,
    WeightsError,
)
from .handles import Handle, Pin
from .params import GenerateParams
from .request import Delta, Logprob, Result, Times
from .stats import Stats

__all__ = [
    "CacheError",
    "ConstraintError",
    "Delta",
    "Engine",
    "EngineClosed",
    "EngineError",
    "GenerateParams",
    "Handle",
    "Logprob",
    "ModelNotFound",
    "OutOfSlots",
    "Pin",
    "RequestError",
    "RequestTooLong",
    "Result",
    "Stats",
    "Times",
    "WeightsError",
]

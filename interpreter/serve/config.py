"""How a server is set up: checked once, before any weights are loaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from branchwise.lang import OptionError

VERSION: str = sys.modules["branchwise"].__version__
"""Of the package that this is in, which is loaded by now, also where it is not installed."""

MOST_SAMPLES = 128
"""A request asks for at most so many samples of each of its prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Options of a server.

    api_keys: who has none of these is refused; without any, everybody is served. Each key has a cache of its own: what
        others with other keys said is never found there, so the time of an answer says nothing about them.
    served_name: the model's name in requests; None takes the name that the engine was made with.
    max_requests: texts that are computed or wait at once; what comes beyond them is refused with 429, at once.
    max_body_bytes: larger requests are refused with 413.
    timeout_s: seconds after which a text ends with what it has. A request may ask for less, not for more.
    grace_s: seconds that running requests have at a shutdown.
    tree: whether `/tree` shows the cache, with the texts in it.
    origins: web pages of these origins may ask; "*" is all of them.
    """

    api_keys: tuple[str, ...] = ()
    served_name: str | None = None
    max_requests: int = 2048
    max_body_bytes: int = 16 << 20
    timeout_s: float = 600.0
    grace_s: float = 10.0
    tree: bool = False
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_body_bytes", "timeout_s", "grace_s"):
            if not getattr(self, name) > 0:
                raise OptionError(f"serve: {name} must be above 0, got {getattr(self, name)}.")
        if any(not key.strip() for key in self.api_keys):
            raise OptionError("serve: an API key is empty.")

"""Who comes in: so many texts at once and no more, and nobody when the server is closing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ApiError


class Gate:
    """Counts the texts that are computed or wait. On the event loop's thread only."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.inside = 0
        self.refused = 0
        self.closing = False

    @property
    def is_full(self) -> bool:
        """Whether nobody can come in now."""
        return self.closing or self.inside >= self.most

    def refusal(self) -> ApiError:
        """What is answered to who comes while it is full."""
        if self.closing:
            return ApiError(503, "the server is shutting down", code="shutting_down")
        self.refused += 1
        return ApiError(
            429, f"{self.inside} of {self.most} texts are being computed; try again in a moment",
            kind="rate_limit_error", code="too_many_requests",
        )  # fmt: skip

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """While this lasts, `count` texts are inside.

        Raises:
            ApiError: they would be too many, or the server is closing.
        """
        if count > self.most:
            raise ApiError(400, f"the request asks for {count} texts, and at most {self.most} are computed at once")
        if self.closing or self.inside + count > self.most:
            raise self.refusal()
        self.inside += count
        try:
            yield
        finally:
            self.inside -= count

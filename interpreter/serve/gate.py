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

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """While this lasts, `count` texts are inside.

        Raises:
            ApiError: they would be too many, or the server is closing.
        """
        if self.closing:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self.inside + count > self.most:
            self.refused += 1
            if count > self.most:
                raise ApiError(400, f"the request asks for {count} texts, and at most {self.most} are computed at once")
            raise ApiError(
                429, f"{self.inside} of {self.most} texts are being computed; try again in a moment",
                kind="rate_limit_error", code="too_many_requests",
            )  # fmt: skip
        self.inside += count
        try:
            yield
        finally:
            self.inside -= count

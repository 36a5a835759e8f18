"""What a server across the network can get wrong, and what it cannot be asked."""

from __future__ import annotations

from branchwise.lang import LangError

from ..errors import RunError


class ServerError(RunError):
    """A server refused or failed; `status` is its HTTP status, None where there was no answer or half of one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[ServerError], tuple[str, int | None]]:
        return type(self), (str(self), self.status)


class Unsupported(LangError):
    """A call asks for what the server does not offer. Raised before its request is sent."""

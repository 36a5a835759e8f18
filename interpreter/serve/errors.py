"""What a request is answered when it cannot be done, in the shape of OpenAI's errors."""

from __future__ import annotations

from typing import Any

from branchwise import runtime
from branchwise.lang import LangError

from ..errors import RunError

RETRY_AFTER_S = 1
CLIENT_GONE = 499
"""The status of a request whose client has gone; nobody but the log reads it."""


class ApiError(Exception):
    """A status, and what was wrong. `param` is the field of the request, `code` a word for programs."""

    def __init__(
        self, status: int, message: str, *, kind: str = "", param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        match self.status:
            case 429 | 503:
                return {"Retry-After": str(RETRY_AFTER_S)}
            case 401:
                return {"WWW-Authenticate": "Bearer"}
            case _:
                return {}


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def api_error(error: BaseException) -> ApiError:
    """How `error` is told to a client: what it did wrong in full, what went wrong here without its insides."""
    match error:
        case ApiError():
            return error
        case runtime.RequestTooLong():
            return ApiError(400, str(error), code="context_length_exceeded")
        case runtime.OutOfSlots() | runtime.RequestError() | runtime.ConstraintError() | LangError() | RunError():
            return ApiError(400, str(error))
        case runtime.EngineClosed():
            return ApiError(503, "the server is shutting down", code="shutting_down")
        case _:
            return ApiError(500, "the request failed in the server; its log says how")

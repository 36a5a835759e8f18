"""Requests to a server: over the official client, so many at once at most, and tried again where that helps.

Everything here runs on one event loop. What is asked for is a `Request`; what it means is not known here.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal

from ..session import Usage
from .errors import ServerError

try:
    import httpx2
    import openai
except ImportError as error:
    raise ImportError('OpenAI(...) needs the package openai. Write: pip install "branchwise[openai]"') from error

FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.5, 8.0
MOST_RETRY_AFTER_S = 60.0  # a server that asks for more is not waited for
RETRIED = frozenset({408, 409, 429})  # and 5xx


@dataclass(frozen=True, slots=True)
class Request:
    """One call of an endpoint: the client's arguments, and the fields of the body that it has no arguments for."""

    endpoint: Literal["chat", "completions"]
    arguments: Mapping[str, Any]
    extra: Mapping[str, Any]
    stream: bool = True


@dataclass
class Stats:
    """What a backend did so far. Any thread.

    speculated: calls that were answered by what an earlier request had written on, so without a request.
    missed: requests that wrote on in vain.
    """

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    completion_tokens: int = 0
    speculated: int = 0
    missed: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        """Count more."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def count(self, usage: Usage) -> None:
        """Count the tokens of an answer."""
        self.add(
            prompt_tokens=usage.prompt_tokens,
            hit_tokens=usage.hit_tokens,
            completion_tokens=usage.completion_tokens,
        )


def _nothing() -> None:
    pass


class Client:
    """At most `concurrency` requests at once, each tried `max_retries` times more at most."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None,
        api_key: str | None,
        headers: Mapping[str, str] | None,
        timeout_s: float,
        concurrency: int,
        max_retries: int,
        extra_body: Mapping[str, Any] | None,
        stats: Stats,
    ) -> None:
        if api_key is None and base_url is not None and not os.environ.get("OPENAI_API_KEY"):
            api_key = "none"  # the client insists on one, servers of one's own seldom do
        self._model = model
        self._extra = dict(extra_body or {})
        self._api = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, default_headers=headers, timeout=timeout_s, max_retries=0
        )
        self._secrets = [text for text in (self._api.api_key, *(headers or {}).values()) if len(text) >= 8]
        self._max_retries = max_retries
        self._places = asyncio.Semaphore(concurrency)
        self._stats = stats
        self.base_url = str(self._api.base_url)
        self.close = self._api.close

    async def ask(
        self,
        request: Request,
        take: Callable[[Any], bool],
        *,
        begin: Callable[[], None] = _nothing,
        check: Callable[[], None] = _nothing,
    ) -> None:
        """Give each piece of the answer to `take`, which says whether any of it cannot be taken back by now.

        `begin` is called before each attempt, which starts from nothing, and `check` at its end: it raises a
        `ServerError` for an answer that is not whole.

        Raises:
            ServerError: the last attempt failed, or one of which something was told already.
        """
        async with self._places:
            for attempt in range(self._max_retries + 1):
                begin()
                told = False
                self._stats.add(requests=1)
                try:
                    async for piece in self._pieces(request):
                        told = take(piece) or told
                    check()
                    return
                except (openai.OpenAIError, httpx2.HTTPError, OSError, ValueError, ServerError) as error:
                    delay_s = None if told else _delay_s(error, attempt)
                    if delay_s is None or attempt == self._max_retries:
                        raise self._said(error, attempt + 1) from None  # the client's error may show the key
                self._stats.add(retries=1)
                await asyncio.sleep(delay_s)

    async def _pieces(self, request: Request) -> AsyncIterator[Any]:
        arguments = {**request.arguments, "model": self._model, "extra_body": {**request.extra, **self._extra}}
        resource: Any = self._api.chat.completions if request.endpoint == "chat" else self._api.completions
        if not request.stream:
            yield await resource.create(**arguments)
            return
        answer = await resource.create(**arguments, stream=True, stream_options={"include_usage": True})
        async with answer as stream:  # closes the connection also when this is cancelled
            async for piece in stream:
                yield piece

    def _said(self, error: Exception, attempts: int) -> ServerError:
        status: int | None = getattr(error, "status_code", getattr(error, "status", None))
        match error:
            case openai.APIStatusError():
                message = f"the server answers {status}: {_own_message(error)}"
            case openai.APITimeoutError() | httpx2.TimeoutException():
                message = "the server did not answer in time. Raise timeout_s"
            case openai.APIConnectionError() | httpx2.HTTPError() | OSError():
                why = str(error.__cause__ or error) or type(error).__name__
                message = f"the connection to {self.base_url} failed: {why}"
            case openai.APIError():
                message = f"the server says: {_own_message(error)}"
            case ServerError():
                message = str(error)
            case _:
                message = f"the server's answer cannot be read: {error}"
        if attempts > 1:
            message += f" ({attempts} attempts)"
        for secret in self._secrets:
            message = message.replace(secret, "***")
        return ServerError(message, status)


def _own_message(error: openai.APIError) -> str:
    body = error.body
    said = body.get("message") if isinstance(body, dict) else body
    return str(said or error.message)[:1000]


def _delay_s(error: Exception, attempt: int) -> float | None:
    """How long to wait before another attempt; None: it would fail the same way."""
    if isinstance(error, openai.APIStatusError):
        if error.status_code not in RETRIED and error.status_code < 500:
            return None
        wished = error.response.headers.get("retry-after", "")
        try:
            after_s = float(wished)
        except ValueError:  # none, or a date
            pass
        else:
            return max(0.0, after_s) if after_s <= MOST_RETRY_AFTER_S else None
    elif isinstance(error, ServerError) and error.status is not None:
        return None
    return min(MOST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**attempt) * random.uniform(0.75, 1.0)

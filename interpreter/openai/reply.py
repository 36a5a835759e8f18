"""Answers of a server while they come in, of chats and of completions, as one kind of text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..session import Completion, Delta, FinishReason, Times, TokenLogprob, Usage
from .errors import ServerError

NO_ANSWER = "the stream ended before the text did"


@dataclass(slots=True)
class Sample:
    """One text as it comes in."""

    text: str = ""
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # where each token begins, for completions with logprobs


class Reply:
    """The samples of one request. Pieces of text are told as they come, if somebody listens."""

    def __init__(self, count: int, on_delta: Callable[[Delta], None] | None) -> None:
        self._count = count
        self._on_delta = on_delta
        self._asked_at = time.monotonic()
        self._first_s: float | None = None
        self.begin()

    def begin(self) -> None:
        """Another attempt: forget what came in."""
        self.samples = [Sample() for _ in range(self._count)]
        self.usage = Usage()

    def take(self, piece: Any) -> bool:
        """Take one chunk of a stream, or a whole answer; whether some of its text was told.

        Raises:
            ServerError: it has not the form of an answer.
        """
        choices = getattr(piece, "choices", None)
        if not isinstance(choices, list):
            raise ServerError(f"the server's answer has no choices: {str(piece)[:200]!r}")
        if (usage := getattr(piece, "usage", None)) is not None:
            self.usage = usage_of(usage)
        told = False
        for choice in choices:
            if not 0 <= choice.index < self._count:
                raise ServerError(f"the server answers with sample {choice.index} of {self._count}")
            told = self._take(choice, self.samples[choice.index]) or told
        return told

    def _take(self, choice: Any, sample: Sample) -> bool:
        said = getattr(choice, "delta", None) or getattr(choice, "message", None)
        if said is not None and getattr(said, "tool_calls", None):
            raise ServerError("the model called a tool, which is no text", 200)
        if said is not None and getattr(said, "refusal", None):
            raise ServerError(f"the model refuses: {said.refusal}", 200)
        text = (said.content if said is not None else getattr(choice, "text", None)) or ""
        sample.text += text
        sample.finish = choice.finish_reason or sample.finish
        sample.logprobs += _logprobs(choice.logprobs)
        sample.offsets += getattr(choice.logprobs, "text_offset", None) or []
        if not text:
            return False
        if self._first_s is None:
            self._first_s = time.monotonic() - self._asked_at
        if self._on_delta is not None:
            self._on_delta(Delta(text, choice.index))
        return self._on_delta is not None

    def check(self) -> None:
        """Raise if a text has not come to its end."""
        for sample in self.samples:
            if sample.finish is None:
                raise ServerError(NO_ANSWER)
            if sample.finish not in ("stop", "length"):
                raise ServerError(f"the server ended the text for another reason: {sample.finish}", 200)

    def completion(self, *, constrained: bool, stops: Sequence[str], want_logprobs: bool) -> Completion:
        """All samples as one result."""
        times = Times(first_token_s=self._first_s, total_s=time.monotonic() - self._asked_at)
        results = []
        for sample in self.samples:
            assert sample.finish in ("stop", "length"), "check() was called"
            finish: FinishReason = "stop" if sample.finish == "stop" else "length"
            detail = "max_tokens" if finish == "length" else ("" if stops else "eos")
            if want_logprobs and sample.text and not sample.logprobs:
                raise ServerError("return_logprob was asked for, and the server sends no log-probabilities", 200)
            results.append(
                Completion(
                    sample.text,
                    finish,
                    self.usage,
                    complete=finish == "stop" or not constrained,
                    detail=detail,
                    times=times,
                    logprobs=tuple(sample.logprobs) if want_logprobs else None,
                )
            )
        return replace(results[0], samples=tuple(results)) if len(results) > 1 else results[0]


def usage_of(usage: Any) -> Usage:
    """The tokens that an answer counts; none where it does not."""
    if usage is None:
        return Usage()
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        prompt_tokens=usage.prompt_tokens or 0,
        hit_tokens=getattr(details, "cached_tokens", None) or 0,
        completion_tokens=usage.completion_tokens or 0,
    )


def _logprobs(said: Any) -> list[TokenLogprob]:
    if said is None:
        return []
    if (content := getattr(said, "content", None)) is not None:  # of a chat
        return [
            TokenLogprob(None, at.token, at.logprob, tuple((top.token, top.logprob) for top in at.top_logprobs or ()))
            for at in content
        ]
    tokens, values = getattr(said, "tokens", None) or [], getattr(said, "token_logprobs", None) or []
    tops = getattr(said, "top_logprobs", None) or [None] * len(tokens)
    return [
        TokenLogprob(None, text, value if value is not None else float("nan"), _sorted(top))
        for text, value, top in zip(tokens, values, tops, strict=True)
    ]


def _sorted(top: dict[str, float] | None) -> tuple[tuple[str, float], ...]:
    return tuple(sorted((top or {}).items(), key=lambda item: -item[1]))

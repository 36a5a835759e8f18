"""What is answered, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from branchwise import runtime

from ..session import Completion, TokenLogprob
from .errors import ApiError
from .job import Prompt


def finish_of(result: runtime.Result) -> str:
    """Why a text ended, in OpenAI's words; "abort" is for those that somebody stopped."""
    if result.finish_reason == "cancelled":
        return "length" if result.detail == "timeout" else "abort"
    return result.finish_reason


def usage_of(prompts: Sequence[Prompt], results: Sequence[runtime.Result]) -> dict[str, Any]:
    """Tokens of prompts, each counted once, and of all texts; what of the prompts was in the cache already."""
    firsts, at = [], 0
    for prompt in prompts:
        firsts.append(results[at])
        at += prompt.n
    prompt_tokens = sum(result.prompt_tokens for result in firsts)
    completion_tokens = sum(len(result.tokens) for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(result.hit_tokens for result in firsts)},
        "completion_tokens_details": {"forced_tokens": sum(result.forced_tokens for result in results)},
    }


def checked(result: runtime.Result) -> runtime.Result:
    """`result`, if it is one that may be passed on.

    Raises:
        ApiError: the text was to fulfil a schema that could not be held in full, and does not.
    """
    if result.violation:
        raise ApiError(
            422, f"the text does not fulfil its schema: {result.violation}. It is: {result.text}",
            kind="invalid_output", code="schema_violated",
        )  # fmt: skip
    return result


def chat_logprobs(completion: Completion) -> dict[str, Any] | None:
    """Those of a chat's message."""
    if completion.logprobs is None:
        return None

    def one(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            {**one(at.text, at.logprob), "top_logprobs": [one(text, p) for text, p in at.top]}
            for at in completion.logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(
    completion: Completion, spelled: Sequence[str], offsets: Sequence[int], *, echo: bool
) -> dict[str, Any] | None:
    """Those of a completion's text, with those of its prompt in front if that is echoed.

    Args:
        spelled: what each token says, of the prompt and of the text, as far as they are shown.
        offsets: where it begins in the text that is shown.
    """
    if completion.logprobs is None:
        return None
    known: tuple[TokenLogprob, ...] = completion.logprobs
    if echo:
        known = (completion.prompt_logprobs or ()) + known
    unknown = len(spelled) - len(known)  # the first token of all has none
    return {
        "tokens": list(spelled),
        "token_logprobs": [None] * unknown + [at.logprob for at in known],
        "top_logprobs": [None] * unknown + [dict(at.top) for at in known],
        "text_offset": list(offsets),
    }

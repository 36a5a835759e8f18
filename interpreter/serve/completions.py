"""`/v1/completions`: texts, or token ids, continued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from branchwise import runtime

from ..local import Engine, completion
from ..session import Completion
from .asking import Caller, num_samples, params_of
from .bodies import CompletionBody
from .config import ServeConfig
from .errors import ApiError
from .job import Done, Job, Piece, Prompt
from .shapes import checked, completion_logprobs, finish_of, usage_of

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read: what to compute, and what of it to show."""

    prompts: tuple[Prompt, ...]
    keep: int        # of the samples of each prompt: best_of may ask for more
    echo: bool
    silent: bool     # no text was asked for: one token is computed, and not shown
    logprobs: bool

    @property
    def n(self) -> int:
        return self.prompts[0].n


async def read(body: CompletionBody, engine: Engine, config: ServeConfig, caller: Caller) -> Asked:
    """What `body` asks for."""
    return await asyncio.to_thread(_read, body, engine, config, caller)


def _read(body: CompletionBody, engine: Engine, config: ServeConfig, caller: Caller) -> Asked:
    if body.suffix:
        raise ApiError(400, "suffix is not offered: the model writes from left to right", param="suffix")
    keep = num_samples(body)
    best_of = body.best_of or keep
    if best_of < keep:
        raise ApiError(400, f"best_of ({best_of}) must not be less than n ({keep})", param="best_of")
    if best_of > keep and body.stream:
        raise ApiError(400, "best_of chooses among whole texts, so it cannot be streamed", param="best_of")
    num_samples(body.model_copy(update={"n": best_of}))
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echo, silent = bool(body.echo), max_tokens == 0
    if silent and not echo:
        raise ApiError(400, "max_tokens is 0 and echo is off, which asks for nothing", param="max_tokens")
    more: dict[str, Any] = {"heal": bool(body.heal)}
    if body.logprobs is not None or best_of > keep:
        more |= {"return_logprob": True, "top_logprobs": body.logprobs or 0}
        if echo and body.logprobs is not None:
            more["logprob_start_len"] = 0
    params = params_of(body, engine, config, caller, max_tokens=max(1, max_tokens), **more)
    prompts = tuple(
        Prompt(engine.prompt_tokens(given), params, best_of, text=given if isinstance(given, str) else None)
        for given in _prompts(body.prompt)
    )
    return Asked(prompts, keep, echo, silent, body.logprobs is not None)


def _prompts(given: str | Sequence[Any]) -> Sequence[str | Sequence[int]]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not given:
        raise ApiError(400, "prompt is an empty list", param="prompt")
    return given


def answer(asked: Asked, engine: Engine, results: Sequence[runtime.Result]) -> dict[str, Any]:
    """The choices and the usage of a whole answer."""
    choices: list[dict[str, Any]] = []
    for number, prompt in enumerate(asked.prompts):
        samples = [checked(r) for r in results[number * prompt.n : (number + 1) * prompt.n]]
        if prompt.n > asked.keep:
            samples = sorted(samples, key=_mean_logprob, reverse=True)[: asked.keep]
        for result in samples:
            choices.append({"index": len(choices), **_shown(asked, engine, prompt, result, whole=True)})
    return {"choices": choices, "usage": usage_of(asked.prompts, [_counted(asked, r) for r in results])}


async def chunks(asked: Asked, engine: Engine, gone: Callable[[], Any]) -> AsyncGenerator[dict[str, Any]]:
    """The choices of the chunks of a stream, then one with the usage alone."""

    def chunk(index: int, text: str) -> dict[str, Any]:
        return {"choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]}

    results: dict[int, runtime.Result] = {}
    begun = not asked.echo
    async with Job(engine, asked.prompts, gone) as job:
        async for event in job.events():
            if not begun:
                begun = True
                for index in range(job.count):
                    yield chunk(index, _prompt_text(engine, asked.prompts[index // asked.n]))
            match event:
                case Piece(index, text):
                    if not asked.silent:
                        yield chunk(index, text)
                case Done(index, result):
                    results[index] = checked(result)
                    shown = _shown(asked, engine, asked.prompts[index // asked.n], result, whole=False)
                    yield {"choices": [{"index": index, **shown}]}
    in_order = [_counted(asked, results[index]) for index in range(len(results))]
    yield {"choices": [], "usage": usage_of(asked.prompts, in_order)}


def _shown(
    asked: Asked, engine: Engine, prompt: Prompt, result: runtime.Result, *, whole: bool
) -> dict[str, Any]:
    """One text; not `whole` is the end of one whose text was told already."""
    result = _counted(asked, result)
    told = completion(result, lambda token: engine.tokenizer.decode([token]))
    text = (_prompt_text(engine, prompt) if asked.echo else "") + told.text if whole else ""
    return {
        "text": text,
        "logprobs": _logprobs(asked, engine, prompt, told) if asked.logprobs else None,
        "finish_reason": "length" if asked.silent else finish_of(result),
        "stop_reason": None if asked.silent else result.detail,
    }


def _counted(asked: Asked, result: runtime.Result) -> runtime.Result:
    """`result` without the token that nobody asked for."""
    if not asked.silent:
        return result
    return replace(result, text="", tokens=(), logprobs=() if result.logprobs is not None else None, forced_tokens=0)


def _logprobs(asked: Asked, engine: Engine, prompt: Prompt, told: Completion) -> dict[str, Any] | None:
    tokenizer = engine.tokenizer
    head = list(prompt.tokens)
    lead = bool(head) and head[0] == tokenizer.bos_id and not _spells_bos(engine, prompt)  # it stands in no text
    stream = tokenizer.detokenizer(at_start=True, specials=True)
    offsets, at = [], 0
    for number, token in enumerate((*head, *told.tokens)):
        offsets.append(at)
        at += 0 if lead and not number else len(stream.push(token))
    first = 0 if asked.echo else len(head)
    spelled = [tokenizer.decode([token]) for token in (*head, *told.tokens)[first:]]
    if lead and not first:
        spelled[0] = ""
    return completion_logprobs(told, spelled, offsets[first:], echo=asked.echo)


def _prompt_text(engine: Engine, prompt: Prompt) -> str:
    return engine.tokenizer.decode(prompt.tokens, at_start=True) if prompt.text is None else prompt.text


def _spells_bos(engine: Engine, prompt: Prompt) -> bool:
    return prompt.text is None or prompt.text.startswith(engine.tokenizer.bos_token)


def _mean_logprob(result: runtime.Result) -> float:
    """What `best_of` goes by: the mean log-probability of a token."""
    values = [one.logprob for one in result.logprobs or ()]
    return sum(values) / len(values) if values else float("-inf")


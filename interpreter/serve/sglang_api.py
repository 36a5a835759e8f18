"""SGLang's native wire: `/generate` and what its frontend and its router ask for beside it.

The shapes are those that its documentation gives and that its frontend and its router read. Fields that mean nothing
here are taken and left alone, as routers add their own.
"""

from __future__ import annotations

import ast
import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, ValidationError

from branchwise import runtime
from branchwise.runtime.models import resolve

from ..local import Engine
from .asking import Caller, num_samples, params_of
from .bodies import Count, Ids, Sampling, WellFormed
from .config import VERSION
from .errors import ApiError
from .job import Done, Job, Piece, Prompt
from .server import Server, caller_of, gone, is_large, streamed
from .shapes import checked, finish_of

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""

GEN_FIELDS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "stop", "stop_token_ids", "stop_regex", "ignore_eos", "regex", "logit_bias", "n", "max_new_tokens",
        "min_new_tokens",
    }
)  # fmt: skip
"""Sampling parameters that are named as they are elsewhere."""


class NativeSampling(Sampling):
    """Sampling parameters as this wire has them."""

    max_new_tokens: Count | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: Count | None = None


Option = bool | list[bool] | None
Number = int | list[int] | None


class GenerateBody(WellFormed):
    """A request for `/generate`."""

    model_config = ConfigDict(extra="allow")

    text: str | list[str] | None = None
    input_ids: Ids | list[Ids] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool = False
    return_logprob: Option = None
    logprob_start_len: Number = None
    top_logprobs_num: Number = None
    return_text_in_logprobs: bool = False
    rid: str | list[str] | None = None
    priority: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


class AbortBody(BaseModel):
    """A request for `/abort_request`."""

    model_config = ConfigDict(extra="allow")

    rid: str = ""
    abort_all: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """One text of a request, and what of it is told."""

    prompt: Prompt
    rid: str
    silent: bool                # no token was asked for
    logprobs: bool
    spelled: bool               # tokens are told with their text
    top: bool


def router(server: Server) -> APIRouter:
    """`/generate`, `/abort_request`, `/flush_cache` and what says which model is here."""
    routes = APIRouter()
    engine = server.engine
    running: dict[str, set[Job]] = {}

    def begin(asked: Sequence[Asked], job: Job) -> Callable[[], None]:
        """Let `/abort_request` find the job until what comes back is called."""
        rids = {one.rid for one in asked}
        for rid in rids:
            running.setdefault(rid, set()).add(job)

        def end() -> None:
            for rid in rids:
                running[rid].discard(job)
                if not running[rid]:
                    del running[rid]

        return end

    async def pieces(
        asked: Sequence[Asked], many: bool, client_gone: Callable[[], Any]
    ) -> AsyncGenerator[dict[str, Any]]:
        texts = ["" for one in asked for _ in range(one.prompt.n)]
        whose = [one for one in asked for _ in range(one.prompt.n)]
        async with Job(engine, [one.prompt for one in asked], client_gone) as job:
            end = begin(asked, job)
            try:
                async for event in job.events():
                    index, one = event.index, whose[event.index]
                    number = {"index": index} if many else {}
                    match event:
                        case Piece(_, text):
                            texts[index] += text if not one.silent else ""
                            meta = {"id": one.rid, "finish_reason": None, "prompt_tokens": len(one.prompt.tokens)}
                            yield {"text": texts[index], "meta_info": meta} | number
                        case Done(_, result):
                            server.figures.count(result)
                            yield _told(one, engine, checked(result)) | number
            finally:
                end()

    @routes.post("/generate", response_model=None)
    @routes.put("/generate", response_model=None, include_in_schema=False)
    async def generate(body: GenerateBody, request: Request) -> Any:
        who = caller_of(request)
        large = is_large(request)
        asked = await asyncio.to_thread(_read, body, server, who) if large else _read(body, server, who)
        count = sum(one.prompt.n for one in asked)
        given = body.input_ids if body.text is None else body.text
        many = (isinstance(given, list) and not _is_ids(given)) or count > 1
        if body.stream:
            return await streamed(request, server, count, pieces(asked, many, gone(request)))
        told: dict[int, dict[str, Any]] = {}
        with server.gate.enter(count):
            async for piece in pieces(asked, True, gone(request)):
                told[piece.pop("index")] = piece
        answers = [told[index] for index in range(count)]
        return JSONResponse(answers if many else answers[0])

    @routes.post("/abort_request", response_model=None)
    async def abort_request(body: AbortBody) -> Response:
        for rid, jobs in list(running.items()):
            if body.abort_all or (body.rid and rid.startswith(body.rid)):
                for job in jobs:
                    job.cancel()
        return Response(status_code=200)

    @routes.api_route("/flush_cache", methods=["GET", "POST"], response_class=PlainTextResponse)
    async def flush_cache() -> str:
        freed = await asyncio.to_thread(engine.reset_cache)
        return f"{freed} slots were freed; what is in use stays.\n"

    @routes.get("/health_generate", response_class=PlainTextResponse)
    async def health_generate() -> Response:
        params = runtime.GenerateParams(max_tokens=1, temperature=0, timeout_s=20, cache_salt="branchwise/health")
        async with Job(engine, [Prompt(engine.beginning, params)]) as job:
            (result,) = await job.results()
        return Response(status_code=200 if result.tokens else 503)

    @routes.get("/get_model_info")
    @routes.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": engine.name,
            "tokenizer_path": str(resolve(engine.name)),
            "served_model_name": server.config.served_name or engine.name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }

    @routes.get("/get_server_info")
    @routes.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {
            "version": VERSION,
            "model_path": engine.name,
            "served_model_name": server.config.served_name or engine.name,
            "context_length": engine.context_length,
            "max_total_num_tokens": engine.num_slots,
            "page_size": engine.config.page_size,
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "dp_size": 1,
            "tp_size": 1,
        }

    @routes.get("/get_load")
    async def get_load() -> JSONResponse:
        stats = await asyncio.to_thread(lambda: engine.stats)
        used = stats.num_slots - stats.free_slots - stats.evictable_slots
        return JSONResponse(
            [{"dp_rank": 0, "num_reqs": stats.running + stats.waiting, "num_waiting_reqs": stats.waiting,
              "num_tokens": used}]
        )  # fmt: skip

    return routes


def _read(body: GenerateBody, server: Server, caller: Caller) -> list[Asked]:
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give text or input_ids, one of them")
    given: Any = body.text if body.text is not None else body.input_ids
    prompts = [given] if isinstance(given, str) or _is_ids(given) else given
    if not prompts:
        raise ApiError(400, "text or input_ids is an empty list")
    count = len(prompts)
    sampling = _each(body.sampling_params, count, "sampling_params")
    logprobs = _each(body.return_logprob, count, "return_logprob")
    starts = _each(body.logprob_start_len, count, "logprob_start_len")
    tops = _each(body.top_logprobs_num, count, "top_logprobs_num")
    rids = _each(body.rid, count, "rid")
    asked = []
    for index, prompt in enumerate(prompts):
        asked.append(
            _read_one(body, server, caller, prompt, dict(sampling[index] or {}), logprobs=bool(logprobs[index]),
                      start=starts[index], top=tops[index] or 0, rid=rids[index] or secrets.token_hex(16))
        )  # fmt: skip
    return asked


def _read_one(
    body: GenerateBody, server: Server, caller: Caller, prompt: str | Sequence[int], sampling: dict[str, Any], *,
    logprobs: bool, start: int | None, top: int, rid: str,
) -> Asked:  # fmt: skip
    fields: dict[str, Any] = {name: value for name, value in sampling.items() if name in GEN_FIELDS}
    if sampling.get("ebnf") is not None:
        raise ApiError(400, "ebnf is not taken: write regex or json_schema", param="ebnf")
    if (schema := sampling.get("json_schema")) is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": _json(schema)}}
    if fields.get("top_k", 1) == -1:
        del fields["top_k"]
    fields["seed"] = sampling.get("sampling_seed", sampling.get("seed"))
    try:
        asked = NativeSampling.model_validate(
            {**fields, "priority": body.priority, "cache_salt": body.cache_salt or body.extra_key}
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(["sampling_params", *map(str, first["loc"])])
        raise ApiError(400, f"{name}: {first['msg']}", param=name) from None
    limit, count = asked.max_new_tokens, num_samples(asked)
    more: dict[str, Any] = {"heal": False, "min_tokens": asked.min_new_tokens}
    if logprobs:
        more |= {"return_logprob": True, "top_logprobs": top}
        if start is None and limit == 0:
            start = 0  # nothing else can be meant
        if start is not None and start >= 0:
            more["logprob_start_len"] = start
    engine = server.engine
    tokens = engine.prompt_tokens(prompt)
    engine.check_prompt(tokens)
    wanted = engine.context_length - len(tokens) if limit is None else limit
    params = params_of(asked, engine, server.config, caller, max_tokens=max(1, wanted), **more)
    return Asked(
        Prompt(tokens, params, count), rid, wanted == 0, logprobs, body.return_text_in_logprobs,
        bool(top),
    )  # fmt: skip


def _told(asked: Asked, engine: Engine, result: runtime.Result) -> dict[str, Any]:
    """One text, whole."""
    silent = asked.silent
    tokens = () if silent else result.tokens
    meta: dict[str, Any] = {
        "id": asked.rid,
        "finish_reason": {"type": "length", "length": 0} if silent else _finish(result),
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(tokens),
        "cached_tokens": result.hit_tokens,
        "e2e_latency": result.times.total_s,
        "weight_version": "default",
    }
    if asked.logprobs:

        def text(token: int) -> str | None:
            return engine.tokenizer.decode([token]) if asked.spelled else None

        before, after = result.prompt_logprobs or (), () if silent else result.logprobs or ()
        first = result.prompt_logprobs is not None and asked.prompt.params.logprob_start == 0
        lead = asked.prompt.tokens[0] if first else None  # nothing says how likely that one is
        meta["input_token_logprobs"] = ([] if lead is None else [[None, lead, text(lead)]]) + [
            [one.logprob, one.token, text(one.token)] for one in before
        ]
        meta["output_token_logprobs"] = [[one.logprob, one.token, text(one.token)] for one in after]
        if asked.top:
            for name, some in (("input_top_logprobs", before), ("output_top_logprobs", after)):
                meta[name] = [[[p, token, text(token)] for token, p in one.top] for one in some]
            if lead is not None:
                meta["input_top_logprobs"].insert(0, None)
    return {"text": "" if silent else result.text, "output_ids": list(tokens), "meta_info": meta}


def _finish(result: runtime.Result) -> dict[str, Any]:
    match finish_of(result):
        case "length":
            return {"type": "length", "length": len(result.tokens)}
        case "abort":
            return {"type": "abort", "message": "the request was aborted"}
        case _:
            matched: Any = result.detail
            if result.detail == "eos" and result.tokens:
                matched = result.tokens[-1]
            elif result.detail[:1] in ("'", '"'):
                matched = ast.literal_eval(result.detail)
            return {"type": "stop", "matched": matched}


def _each(value: Any, count: int, name: str) -> list[Any]:
    """`value` for each of `count` texts: one for all, or a list of as many."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ApiError(400, f"{name} has {len(value)} entries for {count} texts", param=name)
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def _json(schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except ValueError as error:
        raise ApiError(400, f"json_schema is not JSON: {error}", param="json_schema") from None

"""`/v1/completions` with the official client and by hand: what comes back is what the engine says."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from .live import Live

PROMPT = "The river runs past the old mill"


def ask(served: Live, **fields: Any) -> dict[str, Any]:
    answer = served.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_the_text_is_the_engines(served: Live) -> None:
    known = served.engine.generate(PROMPT, max_tokens=6, temperature=0, return_logprob=True)
    answer = served.client().completions.create(
        model=served.engine.name, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (known.text, known.finish_reason)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx([one.logprob for one in known.logprobs or ()], abs=1e-4)
    assert len(choice.logprobs.top_logprobs or ()) == len(known.tokens)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == known.prompt_tokens
    assert answer.usage.completion_tokens == len(known.tokens)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == known.prompt_tokens - 1


def test_many_prompts_of_text_or_ids_and_many_samples(served: Live) -> None:
    ids = list(served.engine.prompt_tokens(PROMPT))
    answer = ask(served, prompt=[PROMPT, "yes or no"], n=2, temperature=1, seed=3)
    texts = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == len(ids) + len(served.engine.prompt_tokens("yes or no")), "each once"
    assert [choice["index"] for choice in texts] == [0, 1, 2, 3]
    assert texts[0]["text"] != texts[1]["text"], "samples of one seed are drawn apart"
    again = ask(served, prompt=[ids, list(served.engine.prompt_tokens("yes or no"))], n=2, temperature=1, seed=3)
    assert [choice["text"] for choice in again["choices"]] == [choice["text"] for choice in texts]
    assert ask(served, prompt=ids)["choices"][0]["text"] == ask(served)["choices"][0]["text"]


def test_an_echo_has_the_prompt_and_what_is_known_of_its_tokens(served: Live) -> None:
    alone = served.engine.score(served.engine.prompt_tokens(PROMPT)[:1], [served.engine.prompt_tokens(PROMPT)[1:]])[0]
    for fields in ({"max_tokens": 0}, {"max_tokens": 3}):
        answer = ask(served, echo=True, logprobs=1, **fields)
        (choice,) = answer["choices"]
        told = choice["logprobs"]
        assert choice["text"].startswith(PROMPT)
        assert told["token_logprobs"][0] is None
        assert told["token_logprobs"][1 : 1 + len(alone)] == pytest.approx(alone, abs=1e-4)
        for text, start in zip(told["tokens"], told["text_offset"], strict=True):
            assert choice["text"][start : start + len(text)] == text
    assert ask(served, echo=True, max_tokens=0)["usage"]["completion_tokens"] == 0
    assert ask(served, echo=True, max_tokens=0)["choices"][0]["text"] == PROMPT


def test_best_of_gives_the_likeliest(served: Live) -> None:
    every = ask(served, n=8, temperature=1, seed=5, logprobs=0)["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]) for c in every]
    best = ask(served, n=1, best_of=8, temperature=1, seed=5)
    assert best["choices"][0]["text"] == every[means.index(max(means))]["text"]
    assert best["usage"]["completion_tokens"] == sum(len(c["logprobs"]["tokens"]) for c in every)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"regex": "[0-9]{3}-[0-9]{2}"}, r"\d{3}-\d{2}"),
        ({"choices": ["the old mill", "the bridge"]}, "the old mill|the bridge"),
        ({"grammar": 'start: "<" /[a-z]{3}/ ">"'}, "<[a-z]{3}>"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [12, 13]}}}}, "12|13"),
        ({"response_format": {"type": "json_object"}, "on_truncate": "close"}, r"\{.*\}"),
    ],
)
def test_a_constraint_is_held(served: Live, fields: dict[str, Any], text: str) -> None:
    (choice,) = ask(served, max_tokens=40, **fields)["choices"]
    assert re.fullmatch(text, choice["text"], re.DOTALL)
    assert choice["finish_reason"] == "stop"


def test_a_stream_is_the_same_text_in_pieces(served: Live) -> None:
    whole = ask(served, n=2, temperature=1, seed=1, stop="e", max_tokens=30)
    texts, finishes = ["", ""], ["", ""]
    stream = served.client().completions.create(
        model=served.engine.name, prompt=PROMPT, n=2, temperature=1, seed=1, stop="e", max_tokens=30, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finishes[choice.index] += choice.finish_reason or ""
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert finishes == [choice["finish_reason"] for choice in whole["choices"]]
    assert usage is not None
    assert usage.completion_tokens == whole["usage"]["completion_tokens"]
    assert all("e" not in text for text in texts)


def test_models_are_listed(served: Live) -> None:
    client = served.client()
    (model,) = client.models.list().data
    assert model.id == served.engine.name
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"suffix": "x"}, "suffix", "suffix is not offered"),
        ({"model": "other"}, "model", "there is no model 'other' here"),
        ({"foo": 1}, "foo", "there is no field foo"),
        ({"max_tokens": 0}, "max_tokens", "asks for nothing"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"n": 3, "best_of": 2}, "best_of", "must not be less than n"),
        ({"n": 1000}, "n", "n is at most 128"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"top_p": 3}, None, "top_p must be above 0"),
        ({"regex": "(", "stream": True}, None, "never closed"),
        ({"regex": "a", "choices": ["a"]}, None, "exclude each other"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": ""}, None, "prompt is empty"),
        ({"prompt": [400_000]}, None, "is not a token id of this model"),
        ({"prompt": "yes " * 5000}, None, "Shorten the prompt"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, None, "strin"),
    ],
)
def test_what_cannot_be_done_is_refused_in_openais_shape(
    served: Live, fields: dict[str, Any], param: str | None, message: str
) -> None:
    answer = served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, **fields})
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert error.keys() == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_a_schema_that_is_not_held_and_not_fulfilled_is_an_error_with_the_text(served: Live) -> None:
    never = {"type": "integer", "enum": [7], "not": {"const": 7}}
    schema = {"type": "json_schema", "json_schema": {"schema": never}}
    answer = served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "response_format": schema})
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "schema_violated"
    assert answer.json()["error"]["message"].endswith("It is: 7")

"""SGLang's wire by hand, as its documentation has it; `test_sglang.py` has the real frontend and router."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from .live import Live

PROMPT = "The river runs past the old mill"


def generate(served: Live, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    given = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, **(sampling or {})}
    answer = served.post("/generate", {"text": PROMPT, "sampling_params": given, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_is_the_engines_and_says_what_it_took(served: Live) -> None:
    known = served.engine.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
    told = generate(served, rid="mine", anything_else="a router adds")
    meta = told["meta_info"]
    assert (told["text"], told["output_ids"]) == (known.text, list(known.tokens))
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", known.prompt_tokens, 6)
    assert meta["cached_tokens"] == known.prompt_tokens - 1
    assert meta["finish_reason"] == {"type": "length", "length": 6}


def test_many_texts_or_ids_each_with_its_own_parameters(served: Live) -> None:
    ids = list(served.engine.prompt_tokens(PROMPT))
    both = [{"max_new_tokens": 3, "temperature": 0}, {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}]
    told = served.post("/generate", {"input_ids": [ids, ids], "sampling_params": both}).json()
    assert len(told) == 2
    assert told[1]["output_ids"][: len(told[0]["output_ids"])] == told[0]["output_ids"]
    assert len(told[1]["output_ids"]) == 5
    assert generate(served, text=None, input_ids=ids)["text"] == generate(served)["text"]


def test_a_stream_has_all_of_the_text_each_time(served: Live) -> None:
    whole = generate(served)
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"text": PROMPT, "sampling_params": sampling, "stream": True}
    lines = [line for line in served.post("/generate", body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    texts = [piece["text"] for piece in pieces]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == whole["text"]
    assert [piece["meta_info"]["finish_reason"] is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("start", [0, 3])
def test_log_probabilities_of_prompt_and_text(served: Live, start: int) -> None:
    tokens = served.engine.prompt_tokens(PROMPT)
    known = served.engine.score(tokens[:1], [tokens[1:]])[0]
    fields = {"logprob_start_len": start, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = generate(served, return_logprob=True, **fields)["meta_info"]
    told = meta["input_token_logprobs"]
    assert [token for _, token, _ in told] == list(tokens[start:])
    assert (told[0][0] is None) is (start == 0)
    expected = known if start == 0 else known[start - 1 :]
    assert [logprob for logprob, _, _ in told if logprob is not None] == pytest.approx(expected, abs=1e-4)
    assert "".join(text for _, _, text in told) == served.engine.tokenizer.decode(tokens[start:])
    assert len(meta["output_token_logprobs"]) == 6
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 6


def test_no_token_is_a_score_of_the_prompt(served: Live) -> None:
    told = generate(served, {"max_new_tokens": 0}, return_logprob=True)
    assert (told["text"], told["output_ids"], told["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert len(told["meta_info"]["input_token_logprobs"]) == told["meta_info"]["prompt_tokens"]


def test_what_stopped_it_is_told(served: Live) -> None:
    text = served.engine.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True).text
    told = generate(served, {"max_new_tokens": 12, "stop": [text[2:4]]})
    assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": text[2:4]}
    assert told["text"] == text[: text.index(text[2:4])]
    assert generate(served, {"regex": "[0-9]{3}"})["text"].isdecimal()
    held = generate(served, {"json_schema": '{"enum": [12]}', "max_new_tokens": 9})
    assert held["text"] == "12"


def test_one_that_runs_is_aborted_by_its_id(served: Live, eventually: Callable[[Callable[[], bool]], None]) -> None:
    told: list[Any] = []
    long = {"max_new_tokens": 1500, "temperature": 1}
    thread = threading.Thread(target=lambda: told.append(generate(served, long, rid="abort-me")))
    thread.start()
    eventually(lambda: served.server.gate.inside == 1)
    assert served.post("/abort_request", {"rid": "abort-me"}).status_code == 200
    thread.join(timeout=10)
    assert told[0]["meta_info"]["finish_reason"]["type"] == "abort"
    eventually(lambda: served.is_idle)


def test_who_and_how_it_is(served: Live) -> None:
    assert served.get("/get_model_info").json()["is_generation"] is True
    assert served.get("/server_info").json()["max_total_num_tokens"] == served.engine.num_slots
    assert served.get("/get_load").json()[0]["num_reqs"] == 0
    assert served.get("/health_generate").status_code == 200
    assert served.post("/flush_cache", None).status_code == 200
    assert served.engine.stats.evictable_slots == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "give text or input_ids"),
        ({"text": []}, "empty list"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid has 1 entries for 2 texts"),
        ({"text": "a", "sampling_params": {"ebnf": "x"}}, "ebnf is not taken"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema is not JSON"),
        ({"text": "a", "sampling_params": {"json_schema": 5}}, "sampling_params.response_format"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"text": "a", "sampling_params": {"top_p": 3}}, "top_p"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "many"}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
    ],
)
def test_what_is_wrong_is_said(served: Live, body: dict[str, Any], message: str) -> None:
    answer = served.post("/generate", body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]

"""Theme 13: OpenAI-style servers. Each test is a case, by its number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..interpreter.serve.live import Live, live

HELLO = [{"role": "user", "content": "How deep?"}]


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Live]:
    with live(tiny_model, num_slots=4096, seed=0) as server:
        yield server


def chat(served: Live, **fields: Any) -> Any:
    return served.client().chat.completions.create(model=served.engine.name, messages=HELLO, **fields)


def test_154_chunks_of_a_stream_are_as_clients_expect_them(served: Live) -> None:
    same = {"n": 2, "temperature": 1, "seed": 4, "max_tokens": 5}
    whole = chat(served, **same)
    chunks = list(chat(served, stream=True, stream_options={"include_usage": True}, **same))
    for index in (0, 1):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [c.finish_reason is not None for c in mine] == [False] * (len(mine) - 1) + [True]
        assert "".join(c.delta.content or "" for c in mine) == whole.choices[index].message.content
        assert mine[-1].finish_reason == whole.choices[index].finish_reason
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("usage" not in json.loads(line) for line in raw_lines(served, {**same, "stream": True}))


def raw_lines(served: Live, fields: dict[str, Any]) -> list[str]:
    text = served.post("/v1/chat/completions", {"messages": HELLO, **fields}).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return lines[:-1]


def test_155_malformed_bodies_are_client_errors_and_the_good_ones_between_them_are_served(served: Live) -> None:
    good = {"prompt": "a", "max_tokens": 2}
    bad: list[tuple[str, Any]] = [
        ("completions", b"{"), ("completions", b"\xff\xfe"), ("completions", b"[]"), ("completions", b"null"),
        ("completions", b'{"prompt": 5}'), ("completions", b'{"prompt": {"a": 1}}'), ("completions", b"{}"),
        ("completions", b'{"prompt": ["a", 1]}'), ("completions", b'{"prompt": "a", "max_tokens": -1}'),
        ("completions", b'{"prompt": "a", "temperature": "hot"}'),
        ("completions", b'{"prompt": "a", "temperature": NaN}'),
        ("completions", b'{"prompt": "a", "n": 0}'), ("completions", b'{"prompt": "a", "stop": [1]}'),
        ("completions", b'{"prompt": "a", "logit_bias": {"999999999": 1}}'), ("completions", b'{"prompt": "\\ud800"}'),
        ("completions", b'{"prompt": "a", "regex": "(?=a)b"}'), ("completions", b'{"prompt": [99999999999999999999]}'),
        ("chat/completions", b'{"messages": []}'), ("chat/completions", b'{"messages": [{"content": "a"}]}'),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}'),
        ("chat/completions", b'{"messages": "a"}'),
        ("chat/completions", b'{"messages": [{"role": "user", "content": 5}]}'),
        ("chat/completions", b'{"model": "no", "messages": [{"role": "user", "content": "a"}]}'),
        ("chat/completions", b'{"messages": [{"role": "u", "content": "a"}], "tools": [{"type": "f"}]}'),
        ("completions", b'{"prompt": "' + b"a" * 400_000 + b'"}'), ("completions", b"[" * 100_000),
    ]  # fmt: skip
    with served.http() as client:
        for number, (path, body) in enumerate(bad):
            answer = client.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
            assert 400 <= answer.status_code < 500, (body[:80], answer.text)
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert "Traceback" not in answer.text
            if number % 5 == 0:
                assert client.post("/v1/completions", json=good).status_code == 200

"""What a server must survive: vanishing clients, too many, too large, too slow, wrong keys, and its own end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from branchwise.interpreter.serve.config import ServeConfig
from branchwise.lang import OptionError

from .live import Live, live

Eventually = Callable[[Callable[[], bool]], None]
LONG = {"prompt": "To be, or not to be", "max_tokens": 1500, "ignore_eos": True, "temperature": 1}


def vanish(served: Live, path: str, body: dict[str, Any]) -> None:
    """Ask, read the first bytes if there are any in time, and close the connection."""
    port = int(served.url.rpartition(":")[2])
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
        connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
        connection.settimeout(0.3)
        try:
            connection.recv(100)
        except TimeoutError:  # it is not a stream
            assert not served.is_idle


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG | {"stream": True}),
        ("/v1/completions", LONG),
        ("/v1/completions", LONG | {"n": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}),
        ("/generate", {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}),
    ],
)
def test_a_client_that_vanishes_frees_its_slots(
    served: Live, path: str, body: dict[str, Any], eventually: Eventually
) -> None:
    vanish(served, path, body)
    eventually(lambda: served.is_idle)
    assert served.engine.stats.generated_tokens < 10_000, "nobody went on to the end of all of it"


def test_what_is_too_much_is_refused_at_once_and_the_rest_is_served(tiny_model: Path, eventually: Eventually) -> None:
    with live(tiny_model, ServeConfig(max_requests=4), num_slots=4096) as served:
        body = LONG | {"max_tokens": 100}
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: served.post("/v1/completions", body), range(16)))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 4
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "too_many_requests"
        eventually(lambda: served.is_idle)
        alone = served.post("/v1/completions", body | {"n": 5})
        assert alone.status_code == 400, "it would never fit"
        assert served.post("/v1/completions", body | {"n": 4}).status_code == 200


def test_a_body_that_is_too_large_is_refused_unread(tiny_model: Path) -> None:
    with live(tiny_model, ServeConfig(max_body_bytes=2000), num_slots=512) as served:
        large = {"prompt": "a" * 3000}
        assert served.post("/v1/completions", large).status_code == 413
        with served.http() as client:  # in pieces, without saying how many bytes there are
            parts = (b'{"prompt": "', *[b"a" * 500] * 6, b'"}')
            kind = {"Content-Type": "application/json"}
            assert client.post("/v1/completions", content=iter(parts), headers=kind).status_code == 413
        assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_text_has_so_much_time_and_no_more(tiny_model: Path) -> None:
    with live(tiny_model, ServeConfig(timeout_s=0.2), num_slots=4096) as served:
        for body in (LONG, LONG | {"timeout_s": 100.0}):
            (choice,) = served.post("/v1/completions", body).json()["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) in {("length", "timeout"), ("length", "max_tokens")}


@pytest.fixture(scope="module")
def closed(tiny_model: Path) -> Iterator[Live]:
    """A server that wants a key."""
    with live(tiny_model, ServeConfig(api_keys=("first-key",)), num_slots=512) as served:
        yield served


class TestKeys:
    def test_a_key_opens_and_each_has_a_cache_of_its_own(self, tiny_model: Path) -> None:
        config = ServeConfig(api_keys=("first-key", "second-key"))
        with live(tiny_model, config, num_slots=4096) as served:
            body = {"prompt": "The river runs past the old mill", "max_tokens": 1}

            def hits(key: str, **more: Any) -> int:
                headers = {"Authorization": f"Bearer {key}"}
                answer = served.post("/v1/completions", body | more, headers=headers)
                assert answer.status_code == 200
                found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                return found

            assert hits("first-key") == 0
            assert hits("first-key") > 0
            assert hits("second-key") == 0, "what another key's owner said is not found"
            assert hits("second-key") > 0
            assert hits("second-key", cache_salt="x") == 0
            assert hits("first-key", cache_salt="x") == 0

    @pytest.mark.parametrize("key", [None, "", "Bearer", "Bearer first", "Bearer first-key2", "Bearer first-k\xe9y"])
    def test_no_key_opens_nothing(self, key: str | None, closed: Live) -> None:
        headers = {} if key is None else {"Authorization": key.encode("latin-1")}
        for method, path in [
            ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/generate"), ("GET", "/metrics"),
            ("POST", "/flush_cache"), ("GET", "/server_info"), ("POST", "/abort_request"), ("GET", "/openapi.json"),
        ]:  # fmt: skip
            with closed.http() as client:
                answer = client.request(method, path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert closed.get("/health").status_code == 200

    def test_an_empty_key_is_none(self) -> None:
        with pytest.raises(OptionError, match="an API key is empty"):
            ServeConfig(api_keys=("a", " "))


def test_a_failing_engine_is_an_error_without_its_insides(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(served.engine, "start", fail)
    for body in (LONG, LONG | {"stream": True}):
        answer = served.post("/v1/completions", body)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
        assert "Traceback" not in answer.text


def test_figures_and_ids_and_health(served: Live) -> None:
    answer = served.post("/v1/completions", {"prompt": "a", "max_tokens": 3}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert served.get("/health", headers={"X-Request-Id": "no spaces\tplease"}).headers["x-request-id"].isalnum()
    page = served.get("/metrics").text
    for name in (
        "branchwise_requests_running 0.0", 'branchwise_slots{state="free"}', "branchwise_hit_rate",
        "branchwise_time_to_first_token_seconds_bucket", "branchwise_generated_tokens_total",
        'branchwise_requests_total{path="/v1/completions",status="200"}', "branchwise_step_seconds_total",
    ):  # fmt: skip
        assert name in page
    assert served.get("/tree").status_code == 404, "it shows texts, so only when asked for"
    assert served.get("/nothing").json()["error"]["message"] == "GET /nothing: Not Found"


def test_the_tree_is_shown_if_that_is_wanted(tiny_model: Path) -> None:
    with live(tiny_model, ServeConfig(tree=True), num_slots=512) as served:
        served.post("/v1/completions", {"prompt": "<b>the old mill</b>", "max_tokens": 2})
        tree = served.get("/tree").json()
        assert any("old mill" in box["text"] for box in tree["boxes"])
        page = served.get("/tree?form=html").text
        assert "<svg" in page
        assert "<b>the" not in page


@pytest.fixture
def command(tiny_model: Path) -> Any:
    """The real command, on a free port; a function that starts it with more arguments."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        call = [sys.executable, "-m", "branchwise", "serve", str(tiny_model), "--port", "0", *arguments]
        started.append(
            subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_command_says_what_it_serves_and_ends_in_order(command: Any) -> None:
    process = command("--num-slots", "4096", "--grace", "2")
    line = process.stdout.readline()
    said = r"Engine\(.*float32, cpu.*4096 slots\), page size 1, attention: cpu, at (http://127\.0\.0\.1:\d+)"
    found = re.search(said, line)
    assert found, line
    url = found[1]
    assert httpx2.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    texts: list[str] = []

    def read() -> None:
        with httpx2.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as answer:
            texts.extend(answer.iter_text())

    reader = threading.Thread(target=read)
    reader.start()
    while not texts:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    reader.join(timeout=10)
    assert not reader.is_alive()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "float3"], "dtype must be one of"),
        (["--num-slots", "-4"], "num_slots must be a positive integer"),
        (["--max-requests", "0"], "max_requests must be above 0"),
        (["--api-key-file", "/nowhere"], "/nowhere"),
        (["--port", "99999"], "invalid"),
    ],
)
def test_a_wrong_flag_fails_before_weights_are_loaded(command: Any, arguments: list[str], said: str) -> None:
    process = command(*arguments)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said in errors
    assert "Traceback" not in errors

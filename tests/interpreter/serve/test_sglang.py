"""SGLang's own frontend and its router in front of our servers; each is skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from .live import Live, live

PROGRAMS = Path(__file__).with_name("sglang_programs.py")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def told(demo_model: Path) -> dict[str, Any]:
    """What the programs said on the demo model."""
    with live(demo_model, num_slots=4096) as served:
        done = subprocess.run(
            [sys.executable, str(PROGRAMS), served.url], capture_output=True, text=True, timeout=100, check=False
        )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
@needs("sglang")
class TestFrontend:
    def test_gen_stops_and_streams_the_same(self, told: dict[str, Any]) -> None:
        assert told["answer"].strip()
        assert "\n" not in told["answer"]
        assert len(told["pieces"]) > 1, "text came as it grew"
        assert "".join(told["pieces"]) == told["answer"]
        assert len(told["batch"]) == 8

    def test_select_by_every_method(self, told: dict[str, Any]) -> None:
        assert told["places"] == [" sea and the harbour"] * 3

    def test_forks_are_joined(self, told: dict[str, Any]) -> None:
        assert told["branched"].startswith("Two tips for a good night. ")
        assert told["branched"].endswith(told["end"])

    def test_constraints_hold(self, told: dict[str, Any]) -> None:
        assert 2 <= len(told["number"]) <= 4 and told["number"].isdecimal()
        assert told["truth"] in ("True", "False")
        assert json.loads(told["value"])["a"] in (1, 2)

    def test_scores_have_texts_and_alternatives(self, told: dict[str, Any]) -> None:
        meta = told["meta"]
        assert [text for _, _, text in meta["input_token_logprobs"]] == ["The", " old", " mill"]
        assert meta["input_token_logprobs"][0][0] is None
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 3
        assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
        assert told["info"]["page_size"] == 1


def free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        port: int = any_socket.getsockname()[1]
        return port


@contextmanager
def router(*workers: Live) -> Iterator[str]:
    """SGLang's router in front of `workers`: its URL."""
    port = free_port()
    call = [
        sys.executable, "-m", "sglang_router.launch_router", "--port", str(port), "--policy", "cache_aware",
        "--log-level", "error", "--prometheus-port", str(free_port()),
        "--worker-startup-check-interval", "1", "--worker-urls", *[worker.url for worker in workers],
    ]  # fmt: skip
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < until, "the router did not start"
            try:
                workers_known = httpx2.get(f"http://127.0.0.1:{port}/workers", timeout=5).json()
                if sum(worker["is_healthy"] for worker in workers_known["workers"]) == len(workers):
                    break
            except (httpx2.HTTPError, KeyError, ValueError):
                pass
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.slow
@needs("sglang_router")
def test_the_router_keeps_equal_prefixes_on_one_of_two_servers(tiny_model: Path) -> None:
    with (
        live(tiny_model, num_slots=4096) as one,
        live(tiny_model, num_slots=4096) as other,
        router(one, other) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        name = one.engine.name

        def ask(subject: str) -> None:
            begin = f"{subject} and what everybody says about it, at length and again: " * 3
            for number in range(8):
                if number % 2:
                    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
                    answer = client.post("/generate", json={"text": begin + str(number), "sampling_params": sampling})
                else:
                    fields = {"prompt": begin + str(number), "max_tokens": 20, "ignore_eos": True}
                    answer = client.post("/v1/completions", json={"model": name, **fields})
                assert answer.status_code == 200, answer.text

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, "abcdef"))
        chat = {"model": name, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        with client.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}) as stream:
            assert list(stream.iter_lines())[-2:].count("data: [DONE]") == 1
        assert client.get("/get_model_info").json()["is_generation"] is True
        hit = sum(served.engine.stats.hit_tokens for served in (one, other))
        whole = sum(served.engine.stats.prompt_tokens for served in (one, other))
        assert hit / whole > 0.8, "each of six beginnings was computed on one server only"
        assert all(served.engine.stats.prompt_tokens for served in (one, other)), "both had work"

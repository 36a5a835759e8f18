"""Two replicas of a tiny model on Ray Serve, on this machine: the answers of one engine, whatever happens to either."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from branchwise import Engine
from branchwise.interpreter.serve.config import ServeConfig
from branchwise.lang import OptionError

with warnings.catch_warnings(action="ignore"):  # Ray's own, of what it uses
    from branchwise.interpreter.serve import cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

OPTIONS: dict[str, Any] = {"num_slots": 4096, "seed": 0}
MILL = "the river runs past the old mill and under the bridge, "


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[httpx2.Client]:
    """A client of two replicas."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    root = str(Path(__file__).parents[3])
    os.environ["PYTHONPATH"] = root
    cluster.start(None, host="127.0.0.1", port=port, cpus=2)
    try:
        cluster.deploy(str(tiny_model), OPTIONS, ServeConfig(grace_s=5), replicas=2)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client
    finally:
        cluster.leave(end=True)


def replicas() -> list[int]:
    """The processes of the replicas."""
    found = []
    for process in psutil.process_iter():
        try:
            name = " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            continue
        if "ServeReplica:branchwise:Replica" in name:
            found.append(process.pid)
    return found


def ask(client: httpx2.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 6, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_answers_streams_and_errors_are_those_of_one_server(served: httpx2.Client, tiny_model: Path) -> None:
    with Engine(tiny_model, **OPTIONS) as engine:
        for prompt in ("The river", "To be, or", "12 + 30 ="):
            known = engine.generate(prompt, max_tokens=6, temperature=0).text
            assert ask(served, prompt)["choices"][0]["text"] == known
    with served.stream("POST", "/v1/completions", json={"prompt": "The river", "max_tokens": 6, "stream": True}) as got:
        lines = [line for line in got.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 3
    refused = served.post("/v1/completions", json={"prompt": "a", "foo": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "foo")
    assert served.get("/health").status_code == 200


def test_a_text_goes_where_its_beginning_is_known(served: httpx2.Client) -> None:
    groups = [f"{number} " + MILL * 12 for number in range(12)]
    order = [group for group in groups for _ in range(4)]
    random.Random(0).shuffle(order)
    usages = [ask(served, f"{group} question {number}?")["usage"] for number, group in enumerate(order)]
    found = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    share = found / sum(usage["prompt_tokens"] for usage in usages)
    assert share > 0.7, "at random it would be about 0.5: most groups would be computed twice"


def test_a_client_that_vanishes_frees_its_slots(served: httpx2.Client) -> None:
    long = {"prompt": "To be", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 1}
    with served.stream("POST", "/v1/completions", json=long) as answer:
        next(answer.iter_text())
    until = time.monotonic() + 20
    while sum(served.get("/get_load").json()[0]["num_reqs"] for _ in range(6)):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_killed_replica_loses_no_request(served: httpx2.Client) -> None:
    before = replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(ask, served, f"{n % 6} {MILL * 4}", max_tokens=60) for n in range(24)]
        time.sleep(0.3)
        os.kill(before[0], signal.SIGKILL)
        assert all(answer.result()["choices"][0]["finish_reason"] for answer in answers)
    until = time.monotonic() + 60
    while len(set(replicas()) - {before[0]}) < 2:
        assert time.monotonic() < until, "no other replica was started in its place"
        time.sleep(0.2)


def test_replicas_are_replaced_one_after_the_other_while_they_are_asked(
    served: httpx2.Client, tiny_model: Path
) -> None:
    before, asked, done = set(replicas()), 0, threading.Event()

    def go_on() -> None:
        nonlocal asked
        while not done.is_set():
            ask(served, f"{asked} {MILL}")
            asked += 1

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(go_on)
        try:
            cluster.deploy(str(tiny_model), OPTIONS | {"num_slots": 2048}, ServeConfig(grace_s=5), replicas=2)
            sizes = {served.get("/server_info").json()["max_total_num_tokens"] for _ in range(6)}
        finally:
            done.set()
        going.result()
    assert asked > 0
    assert sizes == {2048}
    assert not before & set(replicas())


def test_more_than_there_is_room_for_is_refused(served: httpx2.Client, tiny_model: Path) -> None:
    with pytest.raises(OptionError, match="replicas with 1 CPU each need 99, and the cluster has 2"):
        cluster.deploy(str(tiny_model), OPTIONS, ServeConfig(), replicas=99)

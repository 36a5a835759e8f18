"""Servers that fail, hang up and are slow; what is cancelled, closed and dropped."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from branchwise import Cancelled, GenerationError, OpenAI, State, assistant, function, gen, user

from .stub import Stub

Make = Callable[..., OpenAI]
Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.interpreter.openai.client.FIRST_BACKOFF_S", 0.001)


@function
def ask(s: State) -> None:
    s += "one" + gen("x")


@pytest.mark.parametrize("order", [429, 500, 503, "hang up", "cut at once", "no json"])
def test_what_may_pass_is_tried_again(stub: Stub, remote: Make, order: int | str) -> None:
    stub.orders = [order, order]
    backend = remote()
    assert ask.run(backend=backend)["x"] == "fine"
    assert (backend.stats.requests, backend.stats.retries) == (3, 2)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (429, r"the server answers 429: as ordered \(3 attempts\)(?m:$)"),
        (500, r"the server answers 500: as ordered \(3 attempts\)(?m:$)"),
        ("hang up", r"the connection to http://127.0.0.1:\d+/v1/ failed: .* \(3 attempts\)(?m:$)"),
        ("no json", r"the server's answer cannot be read: .* \(3 attempts\)(?m:$)"),
    ],
)
def test_what_does_not_pass_says_what_it_is(stub: Stub, remote: Make, order: int | str, message: str) -> None:
    stub.always = order
    with pytest.raises(GenerationError, match=r'^gen\("x"\): ' + message):
        ask.run(backend=remote(max_retries=2))
    assert len(stub.bodies) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_what_is_refused_is_not_tried_again(stub: Stub, remote: Make, status: int) -> None:
    stub.always = status
    with pytest.raises(GenerationError, match=rf'^gen\("x"\): the server answers {status}: as ordered(?m:$)'):
        ask.run(backend=remote())
    assert len(stub.bodies) == 1


def test_a_refused_response_format_is_the_servers_message(stub: Stub, remote: Make) -> None:
    stub.always, stub.message = "no response_format", "response_format is not supported"
    program = function(lambda s: s.__iadd__(user("1") + assistant(gen("x", json_schema={"type": "object"}))))
    with pytest.raises(GenerationError, match=r"answers 400: response_format is not supported(?m:$)"):
        program.run(backend=remote("openai"))


def test_a_server_that_asks_for_more_patience_than_there_is_is_not_waited_for(stub: Stub, remote: Make) -> None:
    stub.always, stub.retry_after = 429, "3600"
    with pytest.raises(GenerationError, match=r"429: as ordered(?m:$)"):
        ask.run(backend=remote())


@pytest.mark.parametrize("order", ["cut", "end early"])
def test_a_stream_that_breaks_off_is_not_begun_again_once_text_was_told(stub: Stub, remote: Make, order: str) -> None:
    stub.text = lambda body: "a wide world"
    stub.always = order
    backend = remote()
    state = ask.run(backend=backend, stream=True)
    told = []
    with pytest.raises(GenerationError, match=r'^gen\("x"\): '):
        for piece in state.text_iter("x"):
            told.append(piece)
    assert told == ["a"]
    assert backend.stats.requests == 1


def test_a_silent_server_is_given_up(stub: Stub, remote: Make) -> None:
    stub.delay_s = 0.5
    with pytest.raises(GenerationError, match=r"did not answer in time\. Raise timeout_s"):
        ask.run(backend=remote(timeout_s=0.05, max_retries=0))


def test_at_most_so_many_requests_run_at_once(stub: Stub, remote: Make) -> None:
    stub.delay_s = 0.03

    @function
    def many(s: State) -> None:
        branches = s.fork(12)
        branches += gen("x")
        branches.join()

    assert many.run(backend=remote(concurrency=3))["x"] == ["fine"] * 12
    assert stub.most_running == 3


def test_many_requests_need_one_thread(stub: Stub, remote: Make) -> None:
    stub.delay_s = 0.1
    seen: list[int] = []

    @function
    def many(s: State) -> None:
        branches = s.fork(24)
        branches += gen("x")
        seen.append(sum(thread.name == "branchwise-openai" for thread in threading.enumerate()))
        branches.join()

    many.run(backend=remote())
    assert seen == [1]


def test_cancelling_closes_the_stream(stub: Stub, remote: Make) -> None:
    stub.text = lambda body: "word " * 2000
    stub.always = "slow"
    state = ask.run(backend=remote(), stream=True, max_tokens=2000)
    assert next(iter(state.text_iter("x"))) == "word"
    state.cancel()
    with pytest.raises(Cancelled):
        state["x"]
    assert stub.gone.wait(5)


def test_a_closed_backend_stops_what_runs_and_takes_nothing_new(stub: Stub, remote: Make) -> None:
    stub.text = lambda body: "word " * 2000
    stub.always = "slow"
    backend = remote()
    with backend:
        state = ask.run(backend=backend, stream=True, max_tokens=2000)
        next(iter(state.text_iter("x")))
    with pytest.raises((Cancelled, GenerationError)):
        state["x"]
    with pytest.raises(GenerationError, match="the backend is closed"):
        ask.run(backend=backend)
    assert not any(thread.name == "branchwise-openai" for thread in threading.enumerate())


def test_a_dropped_backend_leaves_no_thread(stub: Stub, eventually: Eventually) -> None:
    backend: Any = OpenAI("m", base_url=stub.url)
    assert ask.run(backend=backend)["x"] == "fine"
    del backend
    gc.collect()
    eventually(lambda: not any(thread.name == "branchwise-openai" for thread in threading.enumerate()))

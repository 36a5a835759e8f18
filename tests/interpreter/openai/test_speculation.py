"""One request for several calls, and the same answers as without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from branchwise import OpenAI, State, function, gen

from .stub import Body, Stub

Make = Callable[..., OpenAI]
TRUTH = "Name: Ann\nJob: cook\nAge: 7\nEnd"


def goes_on(body: Body) -> str:
    """A model that writes `TRUTH`, from wherever it is asked; elsewhere it says what was asked last."""
    prompt = body["prompt"]
    return TRUTH[len(prompt) :] if TRUTH.startswith(prompt) else f" after{prompt.split()[-1]}\nmore"


@function
def sheet(s: State, second: str = "Job") -> None:
    s += "Name:" + gen("name", stop="\n") + f"\n{second}:" + gen("job", stop="\n") + "\nAge:" + gen("age", stop="\n")


def read(state: State) -> list[str]:
    return [state[name] for name in ("name", "job", "age")]


@pytest.mark.parametrize("second", ["Job", "Pet"])
@pytest.mark.parametrize("tokens", [1, 3, 5, 64])
def test_answers_are_those_without_speculation(stub: Stub, remote: Make, second: str, tokens: int) -> None:
    stub.text = goes_on
    plain, fast = remote(), remote(speculative_tokens=tokens)
    run = partial(sheet.run, second, max_tokens=3)  # so few that what is written ahead ends inside of a call
    assert read(run(backend=fast)) == read(run(backend=plain))


def test_one_request_answers_all_calls_of_a_template_that_matches(stub: Stub, remote: Make) -> None:
    stub.text = goes_on
    backend = remote(speculative_tokens=64)
    state = sheet.run(backend=backend)
    assert (read(state), state.text()) == ([" Ann", " cook", " 7"], TRUTH.removesuffix("\nEnd"))
    assert (backend.stats.requests, backend.stats.speculated) == (1, 2)


def test_a_template_that_says_something_else_is_asked_anew(stub: Stub, remote: Make) -> None:
    stub.text = goes_on
    backend = remote(speculative_tokens=64)
    assert read(sheet.run("Pet", backend=backend)) == [" Ann", " afterPet:", " afterAge:"]
    assert (backend.stats.requests, backend.stats.speculated) == (3, 0)
    assert backend.stats.missed > 0


def test_a_limit_holds_in_what_was_written_ahead(stub: Stub, remote: Make) -> None:
    stub.text = lambda body: " one two three\n"
    state = function(lambda s: s.__iadd__("1" + gen("x", stop="\n", max_tokens=2))).run(
        backend=remote(speculative_tokens=64)
    )
    assert state["x"] == " one two"


def test_other_options_are_asked_anew(stub: Stub, remote: Make) -> None:
    stub.text = goes_on
    backend = remote(speculative_tokens=64)
    write = "Name:" + gen("x", stop="\n") + "\nJob:" + gen("y", stop="\n", temperature=0.1)
    function(lambda s: s.__iadd__(write)).run(backend=backend)
    assert (backend.stats.requests, backend.stats.speculated) == (2, 0)


def test_without_the_tokens_of_the_text_it_is_asked_anew(stub: Stub, remote: Make) -> None:
    stub.text, stub.always = goes_on, "no logprobs"
    backend = remote(speculative_tokens=64)
    assert read(sheet.run(backend=backend)) == [" Ann", " cook", " 7"]
    assert backend.stats.speculated == 0

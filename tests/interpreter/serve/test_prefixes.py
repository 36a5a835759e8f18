"""Who gets a text: who has its beginning, unless too much runs there already."""

from __future__ import annotations

import json

import pytest

from branchwise.interpreter.serve.prefixes import BLOCK, Prefixes, text_of

LONG = "The river runs past the old mill. " * 20


def test_who_has_the_longest_beginning_is_first() -> None:
    prefixes: Prefixes[str] = Prefixes()
    prefixes.add(LONG, "a")
    prefixes.add(LONG[: 2 * BLOCK] + "another end " * 50, "b")
    idle = {"a": 0, "b": 0, "c": 0}
    assert prefixes.ranked(LONG + "and more", idle, 4)[0] == "a"
    assert prefixes.ranked(LONG[: 2 * BLOCK] + "another end " * 50 + "x", idle, 4)[0] == "b"
    assert prefixes.seen(LONG) == {"a": len(LONG) // BLOCK, "b": 2}
    assert prefixes.seen("Something else " * 40) == {}


def test_too_much_work_counts_for_more_than_what_is_known() -> None:
    prefixes: Prefixes[str] = Prefixes()
    prefixes.add(LONG, "a")
    assert prefixes.ranked(LONG, {"a": 4, "b": 0}, 4) == ["a", "b"]
    assert prefixes.ranked(LONG, {"a": 5, "b": 0}, 4) == ["b", "a"]


def test_what_nobody_knows_goes_to_who_has_least() -> None:
    prefixes: Prefixes[str] = Prefixes()
    prefixes.add(LONG, "a")
    assert prefixes.ranked("new " * 100, {"a": 0, "b": 0, "c": 1}, 4) == ["b", "a", "c"]


def test_what_is_not_used_is_forgotten_first_and_no_more_is_kept_than_is_allowed() -> None:
    prefixes: Prefixes[str] = Prefixes(most_blocks=8)
    prefixes.add("a" * BLOCK * 4, "a")
    prefixes.add("b" * BLOCK * 4, "b")
    prefixes.add("a" * BLOCK * 4, "a")
    prefixes.add("c" * BLOCK * 4, "c")
    assert prefixes.seen("b" * BLOCK * 4) == {}
    assert prefixes.seen("a" * BLOCK * 4) == {"a": 4}
    assert (prefixes.size("a"), prefixes.size("b"), prefixes.size("c")) == (4, 0, 4)
    prefixes.forget("a")
    assert prefixes.seen("a" * BLOCK * 4) == {}
    assert prefixes.size("a") == 0


def test_a_short_text_is_known_whole() -> None:
    prefixes: Prefixes[str] = Prefixes()
    prefixes.add("short", "a")
    assert prefixes.seen("short") == {"a": 1}
    assert prefixes.seen("shorter") == {}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"prompt": LONG + "1"}, {"prompt": LONG + "2"}, True),
        ({"prompt": [LONG, "x"]}, {"prompt": [LONG, "y"]}, True),
        ({"prompt": list(range(300))}, {"prompt": [*range(300), 7]}, True),
        ({"text": LONG}, {"text": LONG, "sampling_params": {}}, True),
        ({"prompt": LONG, "cache_salt": "a"}, {"prompt": LONG, "cache_salt": "b"}, False),
        ({"messages": [{"role": "user", "content": LONG}]}, {"messages": [{"role": "system", "content": LONG}]}, False),
        (
            {"messages": [{"role": "user", "content": LONG}]},
            {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": "a"}]},
            True,
        ),
    ],
)
def test_requests_that_begin_alike_have_texts_that_do(one: object, other: object, same: bool) -> None:
    prefixes: Prefixes[str] = Prefixes()
    prefixes.add(text_of(json.dumps(one).encode()), "a")
    assert bool(prefixes.seen(text_of(json.dumps(other).encode()))) is same


@pytest.mark.parametrize("body", ["", "{", "[]", "5", '{"messages": 5}', '{"a": 1}'])
def test_what_is_no_request_has_no_text(body: str) -> None:
    assert text_of(body.encode()) == ""


@pytest.mark.parametrize("body", ['{"messages": [5]}', '{"prompt": null}', '{"prompt": [[]]}', '{"text": {"a": 1}}'])
def test_a_strange_request_is_no_error_here(body: str) -> None:
    assert text_of(body.encode())

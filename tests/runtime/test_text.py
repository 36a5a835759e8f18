"""Streams of text, however they are cut, against the whole text decoded or searched at once."""

from __future__ import annotations

import time
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchwise.runtime.errors import RequestError
from branchwise.runtime.text import Detokenizer, StopMatcher

BYTES = [bytes([byte]) for byte in range(256)]


def cut(data: str, places: list[int]) -> list[str]:
    """`data` in pieces, cut at `places`."""
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(ends)]


# ------------------------------------------------------------------------------------------- detokenizing


@given(st.binary(max_size=30))
def test_streamed_bytes_join_to_the_text_decoded_at_once(data: bytes) -> None:
    stream = Detokenizer(BYTES)
    assert "".join([*map(stream.push, data), stream.flush()]) == data.decode("utf-8", "replace")


@given(st.text(max_size=12))
def test_no_piece_holds_half_a_character(text: str) -> None:
    stream = Detokenizer(BYTES)
    shown = ""
    for count, byte in enumerate(text.encode("utf-8", "replace"), start=1):
        shown += stream.push(byte)
        whole = text.encode("utf-8", "replace")[:count].decode("utf-8", "ignore")
        assert shown == whole, "everything that is complete is shown, and nothing else"


def test_every_byte_that_cannot_be_a_character_is_shown_at_once() -> None:
    stream = Detokenizer(BYTES)
    assert [stream.push(byte) for byte in b"\x80\x80a\xf0\x9f"] == ["\ufffd", "\ufffd", "a", "", ""]
    assert stream.flush() == "\ufffd"


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    stream = Detokenizer(BYTES)

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            stream.push(0x80)
        return time.perf_counter() - start

    timed(1_000)
    early = min(timed(1_000) for _ in range(5))
    timed(100_000)
    assert min(timed(1_000) for _ in range(5)) < 10 * early


def test_special_token_shows_only_where_asked_and_ends_a_character() -> None:
    table = [b"\xe6", b"", b"a"]
    plain, spelled = Detokenizer(table), Detokenizer(table, specials={1: "<end>"})
    assert "".join(map(plain.push, [0, 1, 2])) == "\ufffda"
    assert "".join(map(spelled.push, [0, 1, 2])) == "\ufffd<end>a"


def test_only_the_very_first_space_is_dropped() -> None:
    table = [b" to", b" be", b""]
    stream = Detokenizer(table, drop_first_space=True)
    assert [stream.push(token) for token in (2, 0, 1, 0)] == ["", "to", " be", " to"]


def test_copies_of_a_detokenizer_part_in_the_middle_of_a_character() -> None:
    first = Detokenizer(BYTES)
    first.push(0xC3)
    second = first.copy()
    assert (first.push(0xA9), second.push(0xA8), first.flush(), second.flush()) == ("é", "è", "", "")


# ------------------------------------------------------------------------------------------ stop strings

TEXTS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop that starts first, and the stop: the plain way, with all of the text in hand."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


@given(TEXTS, STOPS, st.lists(st.integers(0, 24)))
def test_stop_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join([*map(matcher.push, cut(text, places)), matcher.flush()])
    assert (shown, matcher.matched) == first_stop(text, stops)


@given(TEXTS, STOPS.filter(bool), st.lists(st.integers(0, 24)))
def test_text_is_held_exactly_while_a_stop_may_begin_in_it(text: str, stops: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stops)
    arrived = shown = ""
    for piece in cut(text, places):
        arrived += piece
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return
        starts = [i for i in range(len(arrived)) if any(s != arrived[i:] and s.startswith(arrived[i:]) for s in stops)]
        assert shown == arrived[: min(starts, default=len(arrived))]


@given(TEXTS, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True))
def test_order_of_stops_does_not_matter(text: str, stops: list[str]) -> None:
    results = set()
    for order in permutations(stops):
        matcher = StopMatcher(order)
        results.add((matcher.push(text) + matcher.flush(), matcher.matched))
    assert len(results) == 1


def test_no_part_of_a_stop_is_shown() -> None:
    matcher = StopMatcher(["lima mike nov"])
    assert [matcher.push(piece) for piece in ("kilo ", "lima", " mike", " nov", "ember")] == ["kilo ", "", "", "", ""]
    assert (matcher.flush(), matcher.matched) == ("", "lima mike nov")


def test_held_newlines_come_out_when_the_stop_does_not() -> None:
    matcher = StopMatcher(["\n<|fin|>"])
    assert [matcher.push(piece) for piece in ("a\n", "b\n", "c\n")] == ["a", "\nb", "\nc"]
    assert (matcher.flush(), matcher.matched) == ("\n", None)


def test_complete_stop_waits_for_one_that_began_before_it() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert (matcher.push("xabc"), matcher.matched) == ("x", None)
    ended, goes_on, other = matcher.copy(), matcher.copy(), matcher.copy()
    assert (ended.flush(), ended.matched) == ("a", "bc")
    assert (goes_on.push("d"), goes_on.matched) == ("", "abcd")
    assert (other.push("e"), other.matched) == ("a", "bc")


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher()
    assert (matcher.push("any\n"), matcher.flush(), matcher.matched) == ("any\n", "", None)


def test_empty_stop_and_lone_string_are_refused() -> None:
    with pytest.raises(RequestError, match=r"^stop: an empty string is found in every text; leave it out of \[.*\]\.$"):
        StopMatcher(["x", ""])
    with pytest.raises(RequestError, match=r"^stop must be a sequence of strings here, got the string 'wor'\.$"):
        StopMatcher("wor")

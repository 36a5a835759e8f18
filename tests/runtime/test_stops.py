"""Where a text stops, however it is cut, against the whole text searched at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import pairwise, permutations
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchwise.runtime.errors import ConstraintError, RequestError
from branchwise.runtime.stops import StopMatcher


def cut(data: str, places: list[int]) -> list[str]:
    """`data` in pieces, cut at `places`."""
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(ends)]


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


# ---------------------------------------------------------------------------------------------- patterns

ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", "ab", "(?:)", "b?"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda items: f"(?:{'|'.join(items)})"),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "{0}"])),
    ),
    max_leaves=5,
).filter(lambda pattern: not re.fullmatch(pattern, ""))


def first_match(text: str, stops: list[str], patterns: list[str]) -> str | None:
    """The text before the stop or match that begins first, the plain way; None if there is none."""
    every = [*map(re.escape, stops), *patterns]
    for start in range(len(text)):
        if any(re.fullmatch(one, text[start:end]) for one in every for end in range(start + 1, len(text) + 1)):
            return text[:start]
    return None


@given(st.text("abc\n", max_size=12), STOPS, st.lists(PATTERNS, min_size=1, max_size=2), st.lists(st.integers(0, 12)))
def test_patterns_and_strings_stop_at_what_begins_first(
    text: str, stops: list[str], patterns: list[str], places: list[int]
) -> None:
    matcher = StopMatcher(stops, patterns)
    shown = "".join([*map(matcher.push, cut(text, places)), matcher.flush()])
    before = first_match(text, stops, patterns)
    assert (shown, matcher.matched is None) == (text if before is None else before, before is None)
    assert matcher.matched is None or matcher.matched in (*stops, *patterns)


def test_a_pattern_holds_text_back_only_while_it_may_still_match() -> None:
    matcher = StopMatcher([], [r"\n(Q|Question) ?\d*:"])
    shown = [matcher.push(piece) for piece in ("42\n", "Quest", "s are 7", "\nQ", " 1", "2", ":", " no")]
    assert shown == ["42", "", "\nQuests are 7", "", "", "", "", ""]
    assert matcher.matched == r"\n(Q|Question) ?\d*:"


def test_a_copy_of_a_matcher_goes_on_alone() -> None:
    matcher = StopMatcher(["ab"], ["c+d"])
    matcher.push("xcc")
    other = matcher.copy()
    assert (matcher.push("d"), matcher.matched) == ("", "c+d")
    assert (other.push("x"), other.matched) == ("ccx", None)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a*", r"^stop_regex: 'a\*' matches the empty text, which is found in every text\.$"),
        ("(a{200}){200}", r"^stop_regex: .* has more than 20,000 steps from character to character\. Repeat less"),
        ("a(?=b)", r"^the group at position 1 of the pattern is not supported\.$"),
    ],
)
def test_patterns_that_cannot_be_looked_for_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        StopMatcher([], [pattern])


# ------------------------------------------------------------------------------------------------ what it costs


def work(run: Callable[[], object]) -> int:
    """Lines of this package that `run` executes."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line" and "runtime" in frame.f_code.co_filename
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return lines


MANY = [f"<stop number {number}>" for number in range(2000)]


@pytest.mark.parametrize(
    "matcher",
    [StopMatcher(["a" * 500 + "b"]), StopMatcher(MANY), StopMatcher([], ["a.*b", "[ab]{3}c"])],
    ids=["long", "many", "patterns"],
)
def test_what_a_character_costs_does_not_grow_with_the_text(matcher: StopMatcher) -> None:
    text = "aaaa<sto"
    early = work(lambda: [matcher.push(text) for _ in range(100)])
    matcher.push(text * 10_000)
    assert work(lambda: [matcher.push(text) for _ in range(100)]) <= 1.1 * early


def test_what_a_character_costs_does_not_grow_with_the_number_of_stops() -> None:
    text = "one <stop number 17 <stop number 170"
    few, many = StopMatcher(MANY[:2]), StopMatcher(MANY)
    assert work(lambda: many.push(text)) <= 1.5 * work(lambda: few.push(text))

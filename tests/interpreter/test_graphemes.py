from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from branchwise.interpreter import Scripted, State, function
from branchwise.interpreter.graphemes import LONGEST, whole_graphemes
from branchwise.lang import CallError, gen

PARTS = ["a", " ", "\r", "\n", "é", "e\u0301", "👩\u200d👩\u200d👧", "👍🏽", "🇩🇪", "🇫", "각", "\u1100", "\u1161", "क्ष"]
PARTS += ["\u200d", "\ufe0f"]
FAMILY = "👩\u200d👩\u200d👧"


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.lists(st.integers(0, 40), max_size=8))
def test_pieces_end_where_clusters_do_however_the_text_came(text: str, places: list[int]) -> None:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    pieces = list(whole_graphemes(text[start:end] for start, end in pairwise(ends)))
    assert "".join(pieces) == text
    assert all(pieces)
    clusters = [cluster for piece in pieces for cluster in regex.findall(r"\X", piece)]
    assert clusters == regex.findall(r"\X", text)


def test_only_the_last_cluster_waits() -> None:
    assert list(whole_graphemes(["ab", "c", "👩", "\u200d👧", "!"])) == ["a", "b", "c", "👩\u200d👧", "!"]


def test_a_cluster_without_end_is_not_waited_for() -> None:
    pieces = list(whole_graphemes(["a", *["\u0301"] * 1000]))
    assert "".join(pieces) == "a" + "\u0301" * 1000
    assert max(map(len, pieces)) == LONGEST + 1


def test_what_is_held_back_comes_before_a_failure() -> None:
    def pieces() -> Iterator[str]:
        yield "ab"
        raise ValueError("mine")

    shown = []
    with pytest.raises(ValueError, match="mine"):
        shown.extend(whole_graphemes(pieces()))
    assert shown == ["a", "b"]


@pytest.mark.parametrize("name", ["x", None])
def test_a_state_gives_whole_graphemes_on_request(scripted: Callable[..., Scripted], name: str | None) -> None:
    @function
    def family(s: State) -> None:
        s += gen("x")

    state = family.run(backend=scripted({"x": f"a{FAMILY}b"}, piece_len=1))
    assert list(state.text_iter(name, graphemes=True)) == ["a", FAMILY, "b"]
    assert FAMILY not in list(state.text_iter(name))
    with pytest.raises(CallError, match=r"^text_iter\(\): there is no option grapheme\."):
        state.text_iter(name, grapheme=True)  # type: ignore[arg-type]  # wrong on purpose

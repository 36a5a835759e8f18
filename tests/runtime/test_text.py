"""Streams of text, however they are cut, against the whole text decoded at once."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from branchwise.runtime.text import Detokenizer

BYTES = [bytes([byte]) for byte in range(256)]

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

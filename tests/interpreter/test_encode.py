"""A conversation as tokens, over a vocabulary of single characters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from branchwise.interpreter.encode import CUT, ESCAPE, PART_LEN, PLAIN, Encoder, TokenStream, parts, protect, unescape
from branchwise.interpreter.memo import Memo

CONTROL = {"<end>": 1, "<|x|>": 2, ">en<": 3, "|": 4, "漢": 5}
BOS = 0


class Characters:
    """Each character is its code point + 10, each control token an id below 10."""

    special_texts: Mapping[int, str] = {token: spelled for spelled, token in CONTROL.items()}
    parts_at_words = True

    def encode(self, text: str, *, at_start: bool, control: bool, bos: bool = True) -> list[int]:
        tokens = [BOS] if at_start and bos else []
        while text:
            spelled = next((s for s in CONTROL if control and text.startswith(s)), None)
            tokens.append(CONTROL[spelled] if spelled else ord(text[0]) + 10)
            text = text[len(spelled or text[0]) :]
        return tokens


ENCODER = Encoder(Characters())
first, second = itemgetter(0), itemgetter(1)


def plain(text: str) -> list[int]:
    return [ord(character) + 10 for character in text]


TEXT = st.lists(
    st.sampled_from(["<end>", "<|x|>", "<", "|", "漢", "end>", ">en<end>", ESCAPE, CUT, *PLAIN, "a", "😀"]), max_size=12
).map("".join)


@given(TEXT)
def test_escaping_comes_off_again_and_leaves_no_control_token(text: str) -> None:
    escaped = ENCODER.escape(text)
    assert unescape(escaped) == text
    assert not any(spelling in escaped for spelling in CONTROL)
    assert CUT not in escaped


@given(TEXT)
def test_escaped_text_becomes_plain_tokens_alone(text: str) -> None:
    assert ENCODER.encode(ENCODER.escape(text), at_start=False, bos=False) == plain(text)


@given(TEXT)
def test_text_that_is_not_escaped_reaches_the_tokenizer_as_it_is(text: str) -> None:
    assert ENCODER.encode(protect(text), at_start=False, bos=False) == Characters().encode(
        text, at_start=False, control=True
    )


@given(TEXT, st.lists(st.integers(0, 60), max_size=6))
def test_plain_text_in_pieces_is_the_plain_text(text: str, cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(text)]
    written = ""
    for start, end in pairwise(ends):
        written += ENCODER.follow(written, ENCODER.escape(text[start:end]))
    assert not any(spelling in written for spelling in CONTROL)
    assert ENCODER.encode(written, at_start=False, bos=False) == plain(text)


PIECES = st.lists(st.tuples(st.text("<|x>end", max_size=4), st.booleans()), max_size=6)


@given(PIECES)
def test_a_control_token_lies_whole_in_text_that_is_not_plain(pieces: list[tuple[str, bool]]) -> None:
    written, before_is_plain = "", False
    for text, is_plain in pieces:
        more = ENCODER.escape(text) if is_plain else protect(text)
        written += ENCODER.follow(written, more) if is_plain or before_is_plain else more
        before_is_plain = is_plain if text else before_is_plain
    runs = ["".join(text for text, _ in run) for kind, run in groupby(filter(first, pieces), second) if not kind]
    allowed = sum(token < 10 for run in runs for token in Characters().encode(run, at_start=False, control=True))
    tokens = ENCODER.encode(written, at_start=False, bos=False)
    assert sum(token < 10 for token in tokens) == allowed
    assert unescape(written) == "".join(text for text, _ in pieces)


def test_control_tokens_beside_escaped_text_are_themselves() -> None:
    text = "<|x|>" + ENCODER.escape("a<end>") + "<end>"
    assert ENCODER.encode(text, at_start=True, bos=True) == [BOS, 2, *plain("a<end>"), 1]


def test_constant_text_is_encoded_in_one_go_and_generated_tokens_are_kept() -> None:
    stream = TokenStream().reach("ab", ENCODER, bos=True).add([99, 98], "xyz").reach("abxyzcd", ENCODER, bos=True)
    assert list(stream.tokens) == [BOS, *plain("ab"), 99, 98, *plain("cd")]


def test_a_rewritten_text_goes_back_to_the_last_place_both_agree_on() -> None:
    before = TokenStream().reach("ab", ENCODER, bos=False).add([99], " x").reach("ab x<end>", ENCODER, bos=False)
    after = before.reach("abx<end>", ENCODER, bos=False)  # a template that strips what was generated
    assert list(after.tokens) == [*plain("abx"), 1]
    assert list(before.tokens) == [*plain("ab"), 99, 1]


def test_an_unchanged_text_is_the_same_stream() -> None:
    stream = TokenStream().reach("ab", ENCODER, bos=False)
    assert stream.reach("ab", ENCODER, bos=False) is stream


class Counting(Characters):
    """Keeps what it is asked to encode."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, text: str, *, at_start: bool, control: bool, bos: bool = True) -> list[int]:
        self.asked.append(text)
        return super().encode(text, at_start=at_start, control=control, bos=bos)


WORDS = st.lists(st.sampled_from(["a", " a", " ", "<end>", "漢", "bc d", ESCAPE]), max_size=30).map("".join)


@given(WORDS, st.booleans(), st.booleans())
def test_parts_are_the_text_and_give_its_tokens(text: str, at_start: bool, bos: bool) -> None:
    with mock.patch("branchwise.interpreter.encode.PART_LEN", 3):
        assert "".join(parts(text)) == text
        escaped = ENCODER.escape(text)
        assert Encoder(Characters()).encode(escaped, at_start=at_start, bos=bos) == (
            [BOS] * (at_start and bos) + plain(text)
        )


def test_the_beginning_that_two_texts_share_is_encoded_once() -> None:
    vocabulary = Counting()
    encoder = Encoder(vocabulary)
    shared = " ".join(f"the river runs past mill {i} and" for i in range(40)) + " on: "
    for question in ("How deep?", "How wide?", "How deep?"):
        tokens = encoder.encode(shared + question, at_start=True, bos=True)
        assert tokens == [BOS, *plain(shared + question)]
    encoded = sum(map(len, vocabulary.asked))
    assert len(shared) + 2 * len("How deep?") <= encoded <= len(shared) + 2 * (PART_LEN + 40)


def test_a_vocabulary_that_cannot_be_cut_gets_texts_whole() -> None:
    vocabulary = Counting()
    vocabulary.parts_at_words = False
    text = "the river runs past the mill " * 40
    Encoder(vocabulary).encode(text, at_start=True, bos=True)
    assert vocabulary.asked == [text]


def test_what_was_not_asked_for_the_longest_is_forgotten_first() -> None:
    made: list[str] = []

    def make(text: str) -> list[int]:
        made.append(text)
        return [len(text)]

    memo = Memo(max_characters=8)
    for text in ("abcd", "efgh", "abcd", "ijkl", "abcd", "efgh", "far too long"):
        assert memo.tokens(text, None, partial(make, text)) == [len(text)]
    assert made == ["abcd", "efgh", "ijkl", "efgh", "far too long"]

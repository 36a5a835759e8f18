"""A conversation as tokens, over a vocabulary of single characters."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from branchwise.interpreter.encode import ESCAPE, Encoder, TokenStream, unescape

CONTROL = {"<end>": 1, "<|x|>": 2}
BOS = 0


class Characters:
    """Each character is its code point + 10, each control token an id below 10."""

    special_texts: Iterable[str] = tuple(CONTROL)

    def encode(self, text: str, *, at_start: bool, control: bool, bos: bool = True) -> list[int]:
        tokens = [BOS] if at_start and bos else []
        while text:
            spelled = next((s for s in CONTROL if control and text.startswith(s)), None)
            tokens.append(CONTROL[spelled] if spelled else ord(text[0]) + 10)
            text = text[len(spelled or text[0]) :]
        return tokens


ENCODER = Encoder(Characters())


def plain(text: str) -> list[int]:
    return [ord(character) + 10 for character in text]


TEXT = st.lists(st.sampled_from(["<end>", "<|x|>", "<", "end>", ESCAPE, "a", "😀"]), max_size=12).map("".join)


@given(TEXT)
def test_escaping_comes_off_again_and_leaves_no_control_token(text: str) -> None:
    escaped = ENCODER.escape(text)
    assert unescape(escaped) == text
    assert not any(spelling in escaped for spelling in CONTROL)


@given(TEXT)
def test_escaped_text_becomes_plain_tokens_alone(text: str) -> None:
    assert ENCODER.encode(ENCODER.escape(text), at_start=False, bos=False) == plain(text)


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

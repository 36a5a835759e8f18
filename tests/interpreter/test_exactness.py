"""The text of a conversation is what was written and generated, in every vocabulary, however it came and wherever it
stopped."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from branchwise import runtime
from branchwise.interpreter.chat import ChatTemplate
from branchwise.interpreter.encode import Encoder, TokenStream, unescape
from branchwise.interpreter.local import LocalSession
from branchwise.lang import Text
from branchwise.runtime.request import Request
from branchwise.runtime.stops import StopMatcher
from branchwise.runtime.tokenizer import Tokenizer

from .. import vocabularies


@pytest.fixture(scope="module", params=[vocabularies.byte_level, vocabularies.unigram, vocabularies.prepending])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make: Callable[[], Backend] = request.param
    return Tokenizer(vocabularies.save(make(), tmp_path_factory.mktemp("vocabulary")))


def session_of(tokenizer: Tokenizer) -> LocalSession:
    chat = ChatTemplate(None, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    engine: Any = SimpleNamespace(encoder=Encoder(tokenizer), template=chat, tokenizer=tokenizer)
    return LocalSession(engine, (), TokenStream(), (), plain=False)


def text_of(tokens: array[int], tokenizer: Tokenizer) -> str:
    """The text that the tokens of a conversation spell."""
    kept = [token for token in tokens if token != tokenizer.bos_id]
    return tokenizer.decode(kept, at_start=True)


def read_as(text: str) -> tuple[str, str]:
    """A space before the first word is the mark of that word to some models' tokenizers, which then add none."""
    return text, text.removeprefix(" ")


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(ends)]


def tokens_of(text: str, places: list[int], tokenizer: Tokenizer) -> list[int]:
    """Tokens that spell `text`, hardly ever those that the tokenizer would choose."""
    return [
        token for piece in cut(text, places) for token in tokenizer.encode(piece, at_start=False, control=False)
    ]


SPELLINGS = ["<s>", "</s>", "<0x41>", "to be", " ", "  ", "\n", "é", "e\u0301", "漢", "👩\u200d👧", "\ufffd"]
CHARACTERS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=12)
TEXT = CHARACTERS | st.lists(st.sampled_from(SPELLINGS), max_size=6).map("".join)
PLACES = st.lists(st.integers(0, 40), max_size=5)


@given(text=TEXT, places=PLACES)
def test_pieces_of_text_make_no_difference(tokenizer: Tokenizer, text: str, places: list[int]) -> None:
    session = session_of(tokenizer)
    for piece in cut(text, places):
        session.append(Text(piece, control=False))
    whole = session_of(tokenizer)
    whole.append(Text(text, control=False))
    assert session.prompt() == whole.prompt()
    assert text_of(session.prompt(), tokenizer) in read_as(text)
    bos = tokenizer.encode("", at_start=True, control=False)
    assert tokenizer.special_ids.isdisjoint(session.prompt()[len(bos) :])


@given(parts=st.lists(st.tuples(TEXT, PLACES, st.booleans()), max_size=5))
def test_a_conversation_spells_what_was_written_and_generated(
    tokenizer: Tokenizer, parts: list[tuple[str, list[int], bool]]
) -> None:
    session = session_of(tokenizer)
    generated = []
    for text, places, constant in parts:
        if constant:
            session.append(Text(text, control=False))
            continue
        session.prompt()
        generated.append(tokens_of(text, places, tokenizer))
        result = runtime.Result(text, tuple(generated[-1]), len(generated[-1]), "", "stop", "eos", True, 0, 0)
        session._completed(session.prompt(), [result])
    tokens = list(session.prompt())
    assert unescape(session._stream.text) == "".join(text for text, _, _ in parts)
    starts_generated = bool(parts) and not parts[0][2]  # then no word of the program's is the first
    text = "".join(text for text, _, _ in parts)
    assert spelled(tokens, tokenizer, starts_generated=starts_generated) in read_as(text)
    assert tokens.count(tokenizer.bos_id or 0) == len(tokenizer.encode("", at_start=True, control=False))
    at = 0
    for tokens_kept in generated:  # in order, each as it was generated
        at = next(i for i in range(at, len(tokens) + 1) if tokens[i : i + len(tokens_kept)] == tokens_kept)
        at += len(tokens_kept)


def spelled(tokens: list[int], tokenizer: Tokenizer, *, starts_generated: bool) -> str:
    kept = [token for token in tokens if token != tokenizer.bos_id]
    return tokenizer.decode(kept, at_start=not starts_generated)


PARTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), max_size=3)


@given(text=TEXT, places=PLACES, stops=PARTS, other=TEXT)
def test_a_generation_ends_before_its_first_stop_and_its_state_with_it(
    tokenizer: Tokenizer, text: str, places: list[int], stops: list[tuple[int, int]], other: str
) -> None:
    """Stops are pieces of the text, wherever they lie in its tokens, and one that may not be in it."""
    strings = [text[at % (len(text) + 1) :][:length] for at, length in stops] + [other]
    strings = [stop for stop in strings if stop]
    session = session_of(tokenizer)
    session.append(Text("to be ", control=False))
    prompt = array("i", session.prompt())
    request = Request(
        tokens=array("i", prompt),
        num_prompt=len(prompt),
        on_done=lambda result: None,
        detokenizer=tokenizer.detokenizer(),
        stops=StopMatcher(strings),
    )
    shown = []
    for token in tokens_of(text, places, tokenizer):
        request.tokens.append(token)
        shown.append(request.take(token))
        if request.stops.matched is not None:
            break
    shown.append(request.take_rest())
    found = min(((text.find(stop), len(stop), stop) for stop in strings if stop in text), default=None)
    before = text if found is None else text[: found[0]]
    assert "".join(shown) == before
    assert all(before.startswith(sofar) for sofar in accumulate(shown))
    assert request.stops.matched == (found[2] if found else None)

    def lies_in(text: str, tokens: tuple[int, ...]) -> bool:
        said = b"".join(tokenizer.token_bytes[token] for token in tokens)
        return text.encode().startswith(said) and said.decode("utf-8", "ignore").encode() == said

    result = request.result("stop", "")
    counts = range(len(result.tokens) + 1)
    assert result.kept == max(count for count in counts if lies_in(before, result.tokens[:count]))
    session._completed(session.prompt(), [result])
    assert list(session.prompt())[: len(prompt) + result.kept] == [*prompt, *result.tokens[: result.kept]]
    assert text_of(session.prompt(), tokenizer) == "to be " + before


def test_an_empty_conversation_is_a_bos_where_there_is_one(tokenizer: Tokenizer) -> None:
    session = session_of(tokenizer)
    bos = tokenizer.encode("", at_start=True, control=True)
    assert list(session.prompt()) == bos
    session.append(Text("to be"))
    assert list(session.prompt()) == tokenizer.encode("to be", at_start=True, control=True)

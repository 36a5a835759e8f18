"""Theme 1: stop strings and streaming. Each test is a case, by its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from branchwise import Engine, OptionError, State, function, gen
from branchwise.runtime.stops import StopMatcher
from branchwise.runtime.text import Detokenizer
from tests.told import completion_of

from .. import vocabularies
from ..conftest import SIZES
from .conftest import Streamed, forced


def test_001_no_part_of_a_stop_string_is_streamed(streamed: Streamed) -> None:
    state, pieces = streamed("kilo lima mike november", stop="lima mike nov")
    assert "".join(pieces) == "kilo "
    assert completion_of(state).finish_reason == "stop"
    assert completion_of(state).detail == "'lima mike nov'"


def test_002_a_long_stop_that_never_comes_holds_nothing_back(streamed: Streamed, engine: Engine) -> None:
    text = "one two three four"
    state, pieces = streamed(text, stop="<|a-very-long-marker-that-never-comes|>")
    assert state["x"] == text
    completion = completion_of(state)
    assert len(pieces) == completion.usage.completion_tokens, "each token's text came at once"


@pytest.mark.parametrize("stop", ["", ["\n", ""]])
def test_004_an_empty_stop_is_refused_where_it_is_written(stop: Any) -> None:
    with pytest.raises(OptionError, match=r'^gen\("x"\): stop holds an empty string'):
        gen("x", stop=stop)
    assert issubclass(OptionError, ValueError)


@pytest.mark.parametrize("stop", [[], None])
def test_004_no_stop_is_no_stop(engine: Engine, stop: None) -> None:
    @function
    def program(s: State) -> None:
        s += "a" + gen("z", stop=stop, max_tokens=4, ignore_eos=True)

    assert program.run(backend=engine).meta("z").usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("stop", "value"),
    [("wor", "hello "), (("lo", "wor"), "hel"), (["wor", "lo"], "hel"), (["l", "lo"], "he"), (["lo", "l"], "he")],
)
def test_005_one_string_is_one_stop_and_the_earliest_of_several_counts(
    streamed: Streamed, stop: object, value: str
) -> None:
    assert streamed("hello world", stop=stop)[0]["x"] == value


def test_007_newlines_that_may_begin_a_stop_come_out_when_they_do_not(streamed: Streamed) -> None:
    assert streamed("a\nb\nc\n", stop=["\n<|fin|>"])[0]["x"] == "a\nb\nc\n"


def test_008_characters_of_several_tokens_are_streamed_whole(streamed: Streamed) -> None:
    text = "Ok 😀 漢字 ñ 👩\u200d👩\u200d👧 end"
    state, pieces = streamed(text)
    assert state["x"] == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece in ("😀", "漢", "字", "👩", "👧", " 😀")]) >= 4
    assert "👩\u200d👩\u200d👧" in list(state.text_iter("x", graphemes=True))


def test_010_bytes_that_never_become_a_character_are_shown_at_once() -> None:
    detokenizer, stops = Detokenizer([bytes([byte]) for byte in range(256)]), StopMatcher(["\ufffd stop"])
    pieces = [stops.push(detokenizer.push(0x80)) for _ in range(2000)]
    assert "".join(pieces) + stops.push(detokenizer.flush()) + stops.flush() == "\ufffd" * 2000
    assert pieces[1:] == ["\ufffd"] * 1999, "one waits for the stop that it may begin"


def test_011_a_prompt_that_ends_inside_a_character_is_not_repeated(engine: Engine) -> None:
    spelled = engine.tokenizer.token_bytes
    prompt = [*engine.prompt_tokens("Good day "), *(spelled.index(bytes([byte])) for byte in "🧭".encode()[:2])]
    result = engine.generate(prompt, max_tokens=3, temperature=0, ignore_eos=True)
    said = b"".join(spelled[token] for token in result.tokens)
    assert "Good" not in result.text
    assert said.decode("utf-8", "replace").startswith(result.text.rstrip("\ufffd"))


@pytest.mark.parametrize("make", [vocabularies.unigram, vocabularies.prepending])
def test_013_words_of_sentencepiece_vocabularies_keep_their_spaces(
    streamed: Streamed, tmp_path: Path, make: object
) -> None:
    assert callable(make)
    backend = make()
    vocabularies.save(backend, tmp_path)
    config = LlamaConfig(**SIZES, vocab_size=backend.get_vocab_size(), bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with Engine(tmp_path, num_slots=512) as engine:
        for text in ("to be or not to be", " to be  or", "漢字 é"):
            assert streamed(text, backend=engine)[0]["x"] == text


def test_014_no_piece_is_lost_when_many_stream(engine: Engine) -> None:
    @function
    def program(s: State, i: int) -> None:
        s += f"{i}:" + gen("x", max_tokens=40, ignore_eos=True)

    states = [program.run(i, backend=engine, stream=True) for i in range(32)]
    for state in states:
        assert "".join(state.text_iter("x")) == state["x"]
        completion = completion_of(state)
        assert completion.usage.completion_tokens == 40


def test_a_pattern_stops_too_and_cuts_a_token_where_it_begins(streamed: Streamed, engine: Engine) -> None:
    state, pieces = streamed("Tip 1: sleep\nTip 22: eat", stop_regex=[r"\nTip \d+:", "eat"])
    assert state["x"] == "Tip 1: sleep"
    assert completion_of(state).detail == repr("\\nTip \\d+:")
    assert "\n" not in "".join(pieces)

    @function
    def goes_on(s: State) -> None:
        s += "Say: " + forced("one two", stop_regex="[wx]o") + "!" + gen("y", max_tokens=1)

    state = goes_on.run(backend=engine)
    assert state.text() == "Say: one t!" + state["y"]

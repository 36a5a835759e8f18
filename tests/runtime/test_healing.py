"""The seam between prompt and generation: what is held back, what may replace it, and that the text stays exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from branchwise.runtime import Engine, Result
from branchwise.runtime.constrain import Choices, Compiler, Regex, Vocab
from branchwise.runtime.healing import MOST_HELD, Healer

from ..conftest import MakeTiny

WORDS = [b"", b"h", b"t", b"p", b":", b"/", b" ", b"ht", b"http", b"://", b":/", b" a", b"a", b"th", b"pp", b"e", b"1"]
VOCAB = Vocab(WORDS, special_ids=[0], eos_ids=[0])
ID = {spelled: token for token, spelled in enumerate(WORDS)}


def tokens(*spelled: str) -> list[int]:
    return [ID[one.encode()] for one in spelled]


def may_stand(mask: torch.Tensor) -> set[str]:
    return {WORDS[token].decode() for token in mask.nonzero()[:, 0].tolist()}


def test_what_could_be_the_beginning_of_a_longer_token_is_held_back() -> None:
    held = Healer(VOCAB).hold_back(tokens("a", "http", ":"), 100)
    assert held is not None
    assert held.tokens == tuple(tokens(":"))
    assert may_stand(held.masks[0]) == {":", ":/", "://"}


def test_several_tokens_are_held_back_if_one_begins_with_them_all() -> None:
    held = Healer(VOCAB).hold_back(tokens("a", "h", "t", "t"), 100)
    assert held is not None
    assert held.tokens == tuple(tokens("h", "t", "t"))
    assert [may_stand(mask) for mask in held.masks] == [{"h", "http"}, {"t"}, {"t", "th"}]


@pytest.mark.parametrize(
    ("prompt", "most_bytes"),
    [
        (tokens("a", "e"), 100),        # no longer token begins with it
        (tokens(":"), 100),             # nothing comes before it
        (tokens("a", ":"), 0),          # it is not the program's text
        ([*tokens("a"), 0], 100),       # a control token
    ],
)
def test_what_must_stay_stays(prompt: list[int], most_bytes: int) -> None:
    assert Healer(VOCAB).hold_back(prompt, most_bytes) is None


def test_a_constraint_is_on_what_follows_the_prompt() -> None:
    with_constraint = Compiler(VOCAB)
    state = with_constraint.compile(Regex("a|/h")).result().start()
    held = Healer(VOCAB).hold_back(tokens("e", " "), 100, state)
    assert held is not None
    assert may_stand(held.masks[0]) == {" ", " a"}
    held = Healer(VOCAB).hold_back(tokens("e", ":"), 100, state)
    assert held is not None
    assert may_stand(held.masks[0]) == {":", ":/"}  # not ://, whose second slash the pattern does not allow
    assert held.advance(state, ID[b":/"])
    assert state.advance(ID[b"h"])
    assert state.is_complete
    choices = with_constraint.compile(Choices(("//", "/p"))).result().start()
    held = Healer(VOCAB).hold_back(tokens("e", ":"), 100, choices)
    assert held is not None
    assert may_stand(held.masks[0]) == {":", ":/", "://"}
    with_constraint.close()


# ------------------------------------------------------------------------------------------------------ with a model


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, make_tiny: MakeTiny) -> Iterator[Engine]:
    with Engine(make_tiny("llama"), num_slots=2048, seed=0) as engine:
        yield engine
        engine.check()


TEXTS = ["The river runs", "past", " the", "old mil", "1", "2 +", " yes", "\n", "ü", "漢", "?", "how", ":", " "]
PIECES = st.lists(st.sampled_from(TEXTS), min_size=2)


def text_of(engine: Engine, prompt: str, result: Result) -> str:
    """The text of all tokens that were kept, without control tokens."""
    ids = engine.prompt_tokens(prompt)
    stream = engine.tokenizer.detokenizer(at_start=True)
    kept = [*ids[: len(ids) - result.healed], *result.tokens[: result.kept]]
    return "".join(map(stream.push, kept)) + result.tail


@given(pieces=PIECES, seed=st.integers(0, 5), stop=st.sampled_from([(), ("e",), ("r", " ")]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_text_of_the_prompt_stays_whatever_its_tokens_become(
    engine: Engine, pieces: list[str], seed: int, stop: tuple[str, ...]
) -> None:
    prompt = "".join(pieces)
    result = engine.generate(prompt, max_tokens=4, seed=seed, temperature=1.5, heal=True, stop=stop)
    assert text_of(engine, prompt, result) == prompt + result.text
    assert result.prompt_tokens == len(engine.prompt_tokens(prompt))


def test_each_held_token_is_the_likeliest_of_those_that_may_stand_there(engine: Engine, make_tiny: MakeTiny) -> None:
    """Against transformers, one pass a token."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny("llama"), dtype=torch.float32)
    healed = 0
    for prompt in ["The capital of Fran", "past the ol", "12 + 3", "how de", "Tip 1, ti", "nobody kno", "The r"]:
        ids = list(engine.prompt_tokens(prompt))
        held = engine._healer.hold_back(ids, 100)
        expected = ids
        while held is not None:
            before = expected[: len(expected) - len(held.tokens)]
            with torch.no_grad():
                logits = model(torch.tensor([before])).logits[0, -1]
            best = int(logits.masked_fill(~held.masks[0], -torch.inf).argmax())
            if best != held.tokens[0]:
                expected = [*before, best]
                healed += 1
                break
            held = held.rest()
        count = 5 - (len(expected) != len(ids) or expected != ids)
        for _ in range(count):
            with torch.no_grad():
                expected = [*expected, int(model(torch.tensor([expected])).logits[0, -1].argmax())]
        result = engine.generate(prompt, max_tokens=5, temperature=0, heal=True, ignore_eos=True)
        assert [*ids[: len(ids) - result.healed], *result.tokens] == expected
    assert healed > 1


def test_what_stays_costs_a_row_and_no_step(engine: Engine) -> None:
    prompt = next(
        prompt
        for prompt in ["how deep", "the old mill", "The capital of", "To be, or not", "is Paris, of"]
        if engine._healer.hold_back(list(engine.prompt_tokens(prompt)), 100)
        and not engine.generate(prompt, max_tokens=1, temperature=0, heal=True).healed
    )
    steps = []
    for heal in (False, True):
        engine.reset_cache()
        before = engine.stats
        result = engine.generate(prompt, max_tokens=4, temperature=0, heal=heal, ignore_eos=True)
        steps.append((engine.stats.since(before).steps, engine.stats.since(before).computed_tokens, result.tokens))
    assert steps[0] == steps[1]


def test_samples_of_one_prompt_heal_each_for_itself(engine: Engine) -> None:
    results = engine.generate("Tip 1, ti", n=12, max_tokens=3, temperature=3.0, seed=1, heal=True)
    assert len({result.healed for result in results}) > 1
    for result in results:
        assert text_of(engine, "Tip 1, ti", result) == "Tip 1, ti" + result.text


def test_no_more_than_a_few_tokens_are_held_back() -> None:
    long = Vocab([b"", b"a", b"a" * 50], special_ids=[0], eos_ids=[0])
    held = Healer(long).hold_back([1] * 30, 100)
    assert held is not None
    assert len(held.tokens) == MOST_HELD


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "goes_on"),
    [
        ("The address of the page is http:", "//www.example.com"),
        ("She is ", "a teacher"),
        ("The program is in /usr/lo", "cal/bin"),
        ("The United St", "ates of America"),
    ],
)
def test_the_demo_model_thinks_the_healed_tokens_of_a_text_far_likelier(
    demo_model: Path, prompt: str, goes_on: str
) -> None:
    with Engine(demo_model, num_slots=1024) as engine:
        cut = [*engine.prompt_tokens(prompt), *engine.continuation_tokens(goes_on)]
        whole = list(engine.prompt_tokens(prompt + goes_on))
        same = next(i for i, (a, b) in enumerate(zip(cut, whole, strict=False)) if a != b)
        as_cut, as_one = (sum(row) for row in engine.score(whole[:same], [cut[same:], whole[same:]]))
        assert as_one > as_cut + 3  # 20 times as likely, in nats
        result = engine.generate(prompt, max_tokens=3, temperature=0, heal=True)
        assert result.healed == 1
        kept = [*engine.prompt_tokens(prompt)[: -result.healed], *result.tokens[: result.kept]]
        assert kept == list(engine.prompt_tokens(prompt + result.text))


def test_a_number_that_the_tokenizer_writes_digit_by_digit_needs_no_healing(demo_model: Path) -> None:
    with Engine(demo_model, num_slots=256) as engine:
        result = engine.generate("He was born in 19", max_tokens=2, temperature=0, heal=True)
        assert (result.healed, len(result.text)) == (0, 2)

"""Theme 10: sampling. Each test is a case, by its number."""

from __future__ import annotations

import math
import warnings

import pytest

from branchwise import Engine, GenerationError, OptionError, State, function, gen


@function
def draws(s: State, seed: int | None) -> None:
    s += "To be, or" + gen("x", max_tokens=24, temperature=0.8, seed=seed, ignore_eos=True)


@pytest.mark.parametrize("others", [0, 1, 7])
def test_127_a_seed_decides_whoever_else_is_in_the_batch(engine: Engine, others: int) -> None:
    alone = draws.run(42, backend=engine)["x"]
    for place in {0, others // 2, others}:
        batch = [{"seed": None}] * others
        batch.insert(place, {"seed": 42})
        assert draws.run_batch(batch, backend=engine)[place]["x"] == alone


def test_127_equal_seeds_are_equal_and_different_or_none_are_not(engine: Engine) -> None:
    states = draws.run_batch([{"seed": 1}, {"seed": 1}, *[{"seed": seed} for seed in range(2, 6)]], backend=engine)
    texts = [state["x"] for state in states]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1
    assert len({draws.run(None, backend=engine)["x"] for _ in range(5)}) > 1


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-4, 0.01, 100])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 1.0])
def test_128_extreme_temperatures_keep_the_constraint(engine: Engine, temperature: float, top_p: float) -> None:
    @function
    def program(s: State, temperature: float, top_p: float) -> None:
        s += "a" + gen("x", regex="[a-z]{5}", temperature=temperature, top_p=top_p, seed=1, max_tokens=8)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = program.run(temperature, top_p, backend=engine)["x"]
    assert len(value) == 5
    assert value.isalpha()
    if temperature <= 1e-4 or top_p <= 1e-6:
        assert value == program.run(0, 1.0, backend=engine)["x"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("temperature", value) for value in (math.nan, -1, "0.5", math.inf)),
        *(("top_p", value) for value in (math.nan, -0.1, 0, 1.1)),
        *(("top_k", value) for value in (0, -2, 1.5)),
        *(("max_tokens", value) for value in (0, -1, 1.5)),
        ("n", 0),
    ],
)
def test_130_values_that_make_no_sense_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=f'^gen\\("x"\\): {option} must be ') as caught:
        gen("x", **{option: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_130_none_is_not_given_and_a_large_top_k_is_all(engine: Engine) -> None:
    assert gen("x", temperature=None, max_tokens=None) == gen("x")

    @function
    def program(s: State) -> None:
        s += "a" + gen("x", top_k=10**9, max_tokens=2)

    program.run(backend=engine).sync()


def test_131_a_bias_bars_a_token_and_asks_for_one(engine: Engine) -> None:
    @function
    def program(s: State, **options: object) -> None:
        s += "a" + gen("x", max_tokens=6, temperature=0, heal=False, ignore_eos=True, **options)  # type: ignore[arg-type]

    first = program.run(backend=engine).meta("x").tokens[0]  # type: ignore[union-attr]
    assert first not in program.run(logit_bias={first: -100.0}, backend=engine).meta("x").tokens  # type: ignore[union-attr]
    assert set(program.run(logit_bias={"7": 100.0}, backend=engine).meta("x").tokens) == {7}  # type: ignore[union-attr]
    with pytest.raises(GenerationError, match="vocabulary has 400 tokens, and no 100000"):
        program.run(logit_bias={100_000: 1.0}, backend=engine)


def test_131_a_token_that_stops_is_not_in_the_text(engine: Engine) -> None:
    @function
    def program(s: State, **options: object) -> None:
        s += "a" + gen("x", max_tokens=12, temperature=0, ignore_eos=True, **options)  # type: ignore[arg-type]

    whole = program.run(backend=engine).meta("x")
    stop = whole.tokens[4]  # type: ignore[union-attr]
    for stops in (stop, [stop]):
        meta = program.run(stop_token_ids=stops, backend=engine).meta("x")
        assert meta.tokens == whole.tokens[: whole.tokens.index(stop)]  # type: ignore[union-attr]
        assert (meta.finish_reason, meta.detail) == ("stop", f"token {stop}")  # type: ignore[union-attr]


def test_133_log_probabilities_come_with_the_texts_of_tokens(engine: Engine) -> None:
    @function
    def program(s: State) -> None:
        s += "a few words" + gen("x", max_tokens=5, top_logprobs=2, logprob_start_len=1, temperature=0, heal=False)

    meta = program.run(backend=engine).meta("x")
    assert [one.token for one in meta.logprobs] == list(meta.tokens)  # type: ignore[union-attr]
    for one in meta.logprobs:  # type: ignore[union-attr]
        assert one.text == engine.tokenizer.decode([one.token])
        assert one.top[0] == (one.text, one.logprob)  # it was the likeliest
    assert len(meta.prompt_logprobs) > 0  # type: ignore[union-attr]


def test_134_penalties_keep_a_model_from_saying_it_again(engine: Engine) -> None:
    @function
    def program(s: State, **options: object) -> None:
        s += "a" + gen("x", max_tokens=30, temperature=0, ignore_eos=True, **options)  # type: ignore[arg-type]

    def most(**options: object) -> int:
        tokens = program.run(backend=engine, **options).meta("x").tokens  # type: ignore[union-attr]
        return max(tokens.count(token) for token in tokens)

    assert most() > 1
    for penalty in ({"frequency_penalty": 100.0}, {"presence_penalty": 100.0}, {"repetition_penalty": 1e6}):
        assert most(**penalty) == 1


def test_136_ignoring_the_end_ignores_every_end_and_no_stop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is an end here: whichever is likely, it would end the text."""
    monkeypatch.setattr(engine._loop, "_eos_ids", frozenset(range(400)))

    @function
    def program(s: State, **options: object) -> None:
        s += "a" + gen("x", ignore_eos=True, max_tokens=64, **options)  # type: ignore[arg-type]

    whole = program.run(backend=engine)
    assert whole.meta("x").usage.completion_tokens == 64
    letter = next(character for character in whole["x"] if character.isascii())
    stopped = program.run(stop=letter, backend=engine)
    assert stopped["x"] == whole["x"][: whole["x"].index(letter)]
    assert stopped.meta("x").finish_reason == "stop"  # type: ignore[union-attr]

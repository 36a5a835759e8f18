"""Theme 4: select and choices. Each test is a case, by its number."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from branchwise import Engine, GenerationError, OptionError, State, assistant, function, gen, select, user
from branchwise.interpreter import Selection
from branchwise.lang import CHOICES_METHODS, ChoicesMethod, Gen
from branchwise.lang.choices import score

Oracle = Callable[[list[int], Sequence[int]], list[float]]


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    """The log-probability of each token of a continuation, by transformers."""
    return oracle_of(tiny_model)


def oracle_of(folder: Path) -> Oracle:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def logprobs(prompt: list[int], tokens: Sequence[int]) -> list[float]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return [float(row[token]) for row, token in zip(logits, tokens, strict=True)]

    return logprobs


def selected(
    engine: Engine, prompt: str, choices: Sequence[str], method: ChoicesMethod = "token_length_normalized"
) -> Selection:
    @function
    def program(s: State) -> None:
        s += prompt + select("x", choices, choices_method=method, heal=False)

    result = program.run(backend=engine).meta("x")
    assert isinstance(result, Selection)
    assert result.choice == choices[result.index]
    return result


def expected(engine: Engine, oracle: Oracle, prompt: str, choices: Sequence[str], method: ChoicesMethod) -> list[float]:
    """The scores as the rule says, of log-probabilities that transformers computed."""
    begins = [list(engine.prompt_tokens(prompt)), list(engine.beginning)]
    rows = [[oracle(before, engine.continuation_tokens(choice)) for choice in choices] for before in begins]
    return list(score(method, *rows))


@pytest.mark.parametrize("method", CHOICES_METHODS)
@pytest.mark.parametrize("prompt", ["Name the capital city of Japan: ", "Route to: @@", "12 + 30 = "])
def test_064_scores_are_those_of_the_rule(engine: Engine, oracle: Oracle, prompt: str, method: ChoicesMethod) -> None:
    choices = ["Tokyo", "Honorificabilitudinitatibus", "the old mill", "42"]
    result = selected(engine, prompt, choices, method)
    scores = expected(engine, oracle, prompt, choices, method)
    assert result.scores == pytest.approx(scores, abs=1e-3)
    assert result.index == scores.index(max(scores))


@pytest.mark.slow
def test_064_the_demo_model_knows_the_capital_of_japan(demo_model: Path) -> None:
    @function
    def capital(s: State, method: ChoicesMethod) -> None:
        s += user("Name the capital city of Japan.")
        s += assistant(select("a", ["Tokyo", "Honorificabilitudinitatibus"], choices_method=method))

    with Engine(demo_model, num_slots=1024) as engine:
        answers = {method: capital.run(method, backend=engine) for method in CHOICES_METHODS}
        scores = answers["token_length_normalized"].meta("a").scores  # type: ignore[union-attr]
    assert answers["greedy_token_selection"]["a"] == "Tokyo"
    # A long word whose end is certain once it has begun: its mean is the better one, which is the rule, and documented.
    assert scores.index(max(scores)) == ["Tokyo", "Honorificabilitudinitatibus"].index(
        answers["token_length_normalized"]["a"]
    )


@pytest.mark.parametrize(
    "choices", [["x", "xx"], ["Ann", "Ann Lee"], ["1", "10", "100"], ["no", "no thanks"]], ids=lambda c: c[0]
)
def test_065_of_choices_that_begin_each_other_each_can_win(
    engine: Engine, oracle: Oracle, choices: list[str]
) -> None:
    won = set()
    for number in range(60):
        prompt = f"{number} The word is: {choices[number % len(choices)]}. I repeat: "
        result = selected(engine, prompt, choices)
        scores = expected(engine, oracle, prompt, choices, "token_length_normalized")
        assert result.scores == pytest.approx(scores, abs=1e-3)
        won.add(result.choice)
        if len(won) == len(choices):
            break
    assert won == set(choices)


def test_067_only_the_tokens_of_the_choice_are_scored_with_a_warm_cache_and_a_cold_one(
    engine: Engine, oracle: Oracle
) -> None:
    prompt, choices = "Route to: @@", ["everyone", "mailer", "clock"]
    tokens = [engine.continuation_tokens(choice) for choice in choices]
    assert [engine.tokenizer.decode(row) for row in tokens] == choices
    engine.reset_cache()
    cold, warm = (engine.score(prompt, choices) for _ in range(2))
    before = list(engine.prompt_tokens(prompt))
    for row, row_of_tokens in zip(cold, tokens, strict=True):
        assert row == pytest.approx(oracle(before, row_of_tokens), abs=1e-3)
    assert warm == [pytest.approx(row, abs=1e-5) for row in cold]
    assert selected(engine, prompt, choices).scores == pytest.approx(
        [sum(row) / len(row) for row in cold], abs=1e-4
    )


def test_068_with_nothing_before_it_there_is_an_error_or_the_token_that_begins_a_text(
    engine: Engine, oracle: Oracle
) -> None:
    with pytest.raises(GenerationError, match=r'^select\("x"\): the prompt is empty; write some text first\.'):
        selected(engine, "", ["a", "b"])  # this tokenizer begins no text with a token of its own
    begin = "<|im_start|>"
    assert selected(engine, begin, ["a", "b"]).scores == pytest.approx(
        expected(engine, oracle, begin, ["a", "b"], "token_length_normalized"), abs=1e-3
    )


def test_070_token_by_token_and_whole_choices_are_two_methods(engine: Engine, oracle: Oracle) -> None:
    choices = ["snout", "snow leopard", "glacier", "the river"]
    differ = 0
    for number in range(20):
        prompt = f"A word close to snow, number {number}: "
        whole = selected(engine, prompt, choices)
        greedy = selected(engine, prompt, choices, "greedy_token_selection")
        before = list(engine.prompt_tokens(prompt))
        rows = [oracle(before, engine.continuation_tokens(choice)) for choice in choices]
        means = [sum(row) / len(row) for row in rows]
        assert whole.index == means.index(max(means))
        assert greedy.index == walk([list(engine.continuation_tokens(choice)) for choice in choices], rows)
        differ += whole.index != greedy.index
    assert differ, "the methods never differed: this says nothing"


def walk(tokens: list[list[int]], rows: list[list[float]]) -> int:
    """What writing the likeliest allowed token, again and again, ends in; no choice here begins another."""
    left = list(range(len(tokens)))
    position = 0
    while len(left) > 1:
        best = max(left, key=lambda index: rows[index][position])
        left = [index for index in left if tokens[index][position] == tokens[best][position]]
        position += 1
    return left[0]


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {}, {"stream": True}])
def test_071_choices_need_no_temperature_and_no_stream(engine: Engine, options: dict[str, float]) -> None:
    @function
    def program(s: State) -> None:
        s += "It is a " + gen("h", choices=["violin", "drum"]) + "."

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = program.run(backend=engine, **options)
        assert state["h"] == selected(engine, "It is a ", ["violin", "drum"]).choice
        assert "".join(state.text_iter("h")) == state["h"]


def test_073_one_choice_needs_no_luck(engine: Engine) -> None:
    assert selected(engine, "So: ", ["only"]).choice == "only"


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ([], "choices must hold at least one string, got none"),
        (["", "b"], "choices holds an empty string, which has no token to compare"),
        ([1, 10], r"choices\[0\] must be a string, got 1 \(int\)"),
        ([None], r"choices\[0\] must be a string, got None"),
        ("ab", "choices must be a list of strings, got the string 'ab'"),
        (7, "choices must be a list of strings, got 7"),
    ],
)
def test_073_what_is_no_list_of_texts_is_refused_where_it_is_written(choices: object, said: str) -> None:
    assert issubclass(OptionError, ValueError)
    for call in (gen, select):
        with pytest.raises(OptionError, match=said):
            call("x", choices=choices)  # type: ignore[arg-type]


def test_073_equal_choices_count_once_and_a_tuple_is_a_list(engine: Engine) -> None:
    for choices in (["a", "a"], ("a", "b"), iter(["a", "b"])):
        op = select("x", choices)
        assert op.choices in (("a",), ("a", "b"))
    assert isinstance(gen("x", choices=("a", "b"), temperature=1), Gen)


def test_073_a_thousand_choices_share_their_prompt_and_what_they_begin_with(engine: Engine) -> None:
    prompt = "The river runs past the old mill. " * 10
    choices = [f"item number {i} of the catalogue" for i in range(1000)]
    engine.reset_cache()
    before = engine.stats
    result = selected(engine, prompt, choices)
    assert result.choice in choices
    assert len(result.scores) == 1000
    done = engine.stats.since(before)
    prompt_len = len(engine.prompt_tokens(prompt))
    assert done.hit_tokens >= 999 * (prompt_len - 1), "the prompt is computed once"
    assert done.computed_tokens < 10_000 < done.prompt_tokens

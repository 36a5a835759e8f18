"""What a constraint forces is taken without a pass for each token, and what it makes likely is drafted."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from branchwise.runtime import Engine
from branchwise.runtime.constrain import Choices, Compiler, Grammar, JsonSchema, Regex, Spec, Vocab
from branchwise.runtime.tokenizer import Tokenizer

SPECS: list[Spec] = [
    Choices(("the old mill is under the bridge", "the river runs", "To be, or not to be")),
    Regex(r'\{"name": "[a-z]{1,8}", "born": [0-9]{4}, "poet": (true|false)\}'),
    Regex("abc"),
    Regex("(ab)*"),
    JsonSchema(
        '{"properties": {"river": {"enum": ["deep", "wide"]}, "n": {"type": "integer"}}, "required": ["river"]}'
    ),
    Grammar('start: "the river " ("runs" | "rises") " past the old mill"'),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_is_forced_is_allowed_and_looking_changes_nothing(tiny_model: Path, spec: Spec) -> None:
    tokenizer = Tokenizer(tiny_model)
    encode = partial(tokenizer.encode, at_start=False, control=False)
    vocab = Vocab(tokenizer.token_bytes, tokenizer.special_ids, tokenizer.eos_ids, encode=encode)
    compiler = Compiler(vocab)
    state = compiler.compile(spec).result().start()
    forced = 0
    while not state.is_finished:
        ahead = state.forced_tokens()
        assert state.forced_tokens() == ahead
        along = state.fork()
        for token in ahead.certain:
            assert along.mask().nonzero().flatten().tolist() == [token]
            assert along.advance(token)
        for token in ahead.draft:
            first = {vocab.token_bytes[t][:1] for t in along.mask().nonzero().flatten().tolist()}
            assert first == {vocab.token_bytes[token][:1]}
            assert along.advance(token)
        forced += len(ahead.certain) + len(ahead.draft)
        assert state.advance(int(state.mask().nonzero()[-1]))
        if forced > 200:  # (ab)* has no end of its own
            break
    assert forced > 0
    compiler.close()


PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Ann"]}, "born": {"type": "integer"}, "poet": {"type": "boolean"}},
        "required": ["name", "born", "poet"],
        "additionalProperties": False,
    }
)


def answers(model: Path, jump_forward: bool, **options: Any) -> tuple[list[tuple[int, ...]], int, int]:
    """The tokens of some constrained answers, and the steps and forced tokens that they took."""
    with Engine(model, num_slots=2048, seed=0, jump_forward=jump_forward) as engine:
        tokens = [
            engine.generate("What is it? ", max_tokens=60, **given, **options).tokens
            for given in (
                {"choices": ["the old mill is under the bridge", "the river runs past", "To be, or not to be"]},
                {"regex": r'\{"name": "[a-z]{1,8}", "born": 18[0-9]{2}, "poet": (true|false)\}'},
                {"regex": "A helpful assistant[.!]"},
                {"json_schema": PERSON},
                {"grammar": 'start: "the river " ("runs" | "rises") " past the old mill"'},
            )
        ]
        engine.check()
        assert engine.stats.held_slots == 0
        return tokens, engine.stats.steps, engine.stats.forced_tokens


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3}, {"temperature": 0, "heal": True}], ids=str)
def test_it_saves_steps_and_changes_no_token(tiny_model: Path, options: dict[str, Any]) -> None:
    jumping, few, _ = answers(tiny_model, True, **options)
    stepping, many, _ = answers(tiny_model, False, **options)
    assert jumping == stepping
    assert few < 0.8 * many


def test_a_text_with_no_choice_at_all_needs_no_step(tiny_model: Path) -> None:
    vocab = Tokenizer(tiny_model)
    only = next(
        data.decode() for data in vocab.token_bytes if data.isalpha() and len(data) == 1 and data.isascii()
    )
    with Engine(tiny_model, num_slots=256) as engine:
        result = engine.generate("To be", choices=[only], max_tokens=5)
        assert (result.text, result.complete, result.detail) == (only, True, "constraint")
        assert result.forced_tokens == 1
        assert engine.stats.steps == 0


def test_a_constraint_that_shall_not_be_cut_off_is_closed_in_time(tiny_model: Path) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 2})
    with Engine(tiny_model, num_slots=2048, seed=0) as engine:
        for most in range(6, 30):
            for seed in range(3):
                result = engine.generate(
                    "A list: ", json_schema=schema, on_truncate="close", max_tokens=most, temperature=1.5, seed=seed
                )
                assert result.complete, result
                assert len(json.loads(result.text)) >= 2
                assert len(result.tokens) <= most
        kept = engine.generate("A list: ", json_schema=schema, max_tokens=6, temperature=1.5, seed=0)
        assert (kept.complete, kept.finish_reason) == (False, "length")
        engine.check()


def test_stops_and_limits_hold_for_forced_tokens(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=256) as engine:
        cut = engine.generate("To be", regex="abcdefgh[x]{40}", max_tokens=3, temperature=0)
        assert (cut.finish_reason, cut.complete, len(cut.tokens)) == ("length", False, 3)
        stopped = engine.generate("To be", regex="q{1,2}wxyz!{9}", stop="z", max_tokens=30, temperature=0)
        assert stopped.text in ("qwxy", "qqwxy")
        assert stopped.finish_reason == "stop"
        engine.check()

"""The engine that follows a text: the same languages as the one that compiles, schemas, grammars, any vocabulary."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer as Backend

from branchwise.runtime.constrain import Budget, Compiler, Constraint, Grammar, JsonSchema, Regex, Spec, State, Vocab
from branchwise.runtime.constrain.guidance import GuidanceConstraint, tokenizer_of
from branchwise.runtime.constrain.outlines import compile_regex
from branchwise.runtime.errors import ConstraintError
from branchwise.runtime.tokenizer import Tokenizer

from .. import vocabularies

DATA = Path(__file__).parents[1] / "data"
LARGE = Budget(max_seconds=60)


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").split("\n") if line]


REGEXES, MODELS = read("regexes.jsonl"), read("pyd20.jsonl")

END, CONTROL = 256, 257
BYTE_VOCAB = Vocab([*(bytes([byte]) for byte in range(256)), b"</s>", b"<|im_end|>"], [CONTROL], [END], size=260)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Callable[[Spec], Constraint]]:
    compiler = Compiler(BYTE_VOCAB)
    yield lambda spec: compiler.compile(spec).result(timeout=60)
    compiler.close()


def schema(value: object) -> JsonSchema:
    return JsonSchema(json.dumps(value, ensure_ascii=False))


def followed(pattern: str, vocab: Vocab) -> GuidanceConstraint:
    matcher = LLMatcher(tokenizer_of(vocab), LLMatcher.grammar_from_regex(pattern), log_level=0)
    return GuidanceConstraint(matcher, len(pattern), vocab)


def after(constraint: Constraint, text: str) -> State | None:
    state = constraint.start()
    return state if all(state.advance(byte) for byte in text.encode()) else None


def takes(constraint: Constraint, text: str) -> bool:
    state = after(constraint, text)
    return state is not None and state.is_complete


def allowed(state: State) -> set[int]:
    """The bytes that `advance` takes here."""
    return {byte for byte in range(256) if state.fork().advance(byte)}


@pytest.mark.parametrize("entry", REGEXES, ids=lambda entry: str(entry["id"]))
def test_both_engines_hold_the_same_language(entry: dict[str, Any]) -> None:
    """Every string over the pattern's own letters to a depth, and random walks in which either leads."""
    pattern = entry["regex"]
    one = followed(pattern, BYTE_VOCAB)
    for test in entry["tests"]:
        assert takes(one, test["text"]) == test["valid"], test
    other = compile_regex(pattern, BYTE_VOCAB, LARGE)
    rng = random.Random(0)
    letters = sorted({char for test in entry["tests"] if test["valid"] for char in test["text"] if char.isascii()})
    for length in range(4):
        for chosen in itertools.product(rng.sample(letters, min(4, len(letters))) or ["a"], repeat=length):
            text = "".join(chosen)
            assert takes(one, text) == takes(other, text), text
    for walk in range(12):
        here, there = one.start(), other.start()
        said = b""
        for _ in range(25):
            assert here.is_complete == there.is_complete, said
            may = allowed(here)
            assert may - {0xF4} == allowed(there), said  # the fence of the other takes the last plane's first byte
            if not may - {0xF4}:
                break
            byte = rng.choice(sorted(may - {0xF4}) if walk % 2 else sorted(b for b in may if b < 128) or sorted(may))
            said += bytes([byte])
            assert here.advance(byte)
            assert there.advance(byte)


def test_a_regex_is_compiled_whole_only_if_that_is_quick(compiled: Callable[[Spec], Constraint]) -> None:
    assert not isinstance(compiled(Regex("[0-9]{4}-[0-9]{2}")), GuidanceConstraint)
    for pattern in ("(a|b)*a(a|b){25}", "((x{1,200}){1,200}){1,200}", ".{0,5000}"):
        assert isinstance(compiled(Regex(pattern)), GuidanceConstraint)
    assert takes(compiled(Regex("(a|b)*a(a|b){25}")), "bba" + "ab" * 12 + "b")
    assert not takes(compiled(Regex("(a|b)*a(a|b){25}")), "bbb" + "ab" * 12 + "b")


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: str(entry["id"]))
def test_a_schema_of_pydantic_takes_what_is_valid_and_nothing_else(
    entry: dict[str, Any], compiled: Callable[[Spec], Constraint]
) -> None:
    constraint = compiled(schema(entry["schema"]))
    assert constraint.exact
    for test in entry["tests"]:
        assert takes(constraint, json.dumps(test["data"], ensure_ascii=False)) == test["valid"], test


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "strin"}, "the schema cannot be compiled: Invalid type: strin"),
        ({"properties": {"w": 5}}, "the schema cannot be compiled: schema must be an object or boolean"),
        ({"$ref": "#/$defs/Gone"}, "the schema cannot be compiled: Pointer '/$defs/Gone' does not exist"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems (3) is greater than maxItems (1)"),
        ({"type": "string", "pattern": "("}, "the schema cannot be compiled: regex parse error"),
    ],
)
def test_what_is_no_schema_is_refused_in_words(
    given: object, message: str, compiled: Callable[[Spec], Constraint]
) -> None:
    with pytest.raises(ConstraintError) as raised:
        compiled(schema(given))
    assert message in str(raised.value)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "must be a JSON object, true or false")])
def test_what_is_no_json_is_refused(text: str, message: str, compiled: Callable[[Spec], Constraint]) -> None:
    with pytest.raises(ConstraintError, match=message):
        compiled(JsonSchema(text))


@pytest.mark.parametrize(
    ("given", "good", "bad", "warning"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 2]", "[1, 1]", "uniqueItems"),
        ({"type": "integer", "not": {"const": 7}}, "8", "7", "not"),
        ({"oneOf": [{"minimum": 3, "type": "integer"}, {"maximum": 5, "type": "integer"}]}, "9", "4", "oneOf"),
        ({"type": "string", "pattern": "^(?=.*a)[ab]+$"}, '"ab"', '"bb"', "look-around"),
    ],
)
def test_what_cannot_be_held_is_named_and_found_at_the_end(
    given: object, good: str, bad: str, warning: str, compiled: Callable[[Spec], Constraint]
) -> None:
    constraint = compiled(schema(given))
    assert not constraint.exact
    assert any(warning in said for said in constraint.warnings), constraint.warnings
    assert takes(constraint, good)
    assert constraint.violation(good) == ""
    assert takes(constraint, bad)
    assert constraint.violation(bad)


def test_an_unknown_format_is_a_note(compiled: Callable[[Spec], Constraint]) -> None:
    constraint = compiled(schema({"type": "object", "properties": {"format": {"type": "string", "format": "colour"}}}))
    assert constraint.exact
    assert constraint.warnings == ('the format "colour" is unknown and not held',)
    assert takes(constraint, '{"format": "red"}')
    assert not takes(constraint, '{"format": 3}')


def test_what_stands_beside_a_circular_reference_is_a_note_in_old_drafts(
    compiled: Callable[[Spec], Constraint],
) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/definitions/n", "minProperties": 1, "title": "t"}}}
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/n", "definitions": {"n": node}}
    assert compiled(schema(old)).exact
    new = compiled(schema({**old, "$schema": "https://json-schema.org/draft/2020-12/schema"}))
    assert not new.exact
    assert new.warnings == ("not held while it is written: minProperties beside a circular $ref",)


def test_a_grammar_in_larks_syntax(compiled: Callable[[Spec], Constraint]) -> None:
    sums = compiled(Grammar('start: sum\nsum: product ("+" product)*\nproduct: "(" sum ")" | /[0-9]+/'))
    assert takes(sums, "1+(2+33)+4")
    assert not takes(sums, "1+(2+33+4")
    with pytest.raises(ConstraintError, match='unknown name: "foo"'):
        compiled(Grammar('start: "a" foo'))
    with pytest.raises(ConstraintError, match="a control token"):
        compiled(Grammar('start: "a" <|im_end|>'))


def test_a_refused_token_changes_nothing(compiled: Callable[[Spec], Constraint]) -> None:
    state = compiled(Grammar('start: "ab"')).start()
    for token in (-1, ord("b"), CONTROL, END, 258, 259, 260, 10**6):
        assert not state.advance(token)
    assert state.advance(ord("a"))
    fork = state.fork()
    assert fork.advance(ord("b"))
    assert (fork.is_complete, fork.is_finished, state.is_complete) == (True, True, False)
    assert fork.mask().nonzero().flatten().tolist() == [END]
    assert fork.advance(END)
    assert not fork.advance(ord("b"))
    assert fork.forced_tokens().certain == ()


def test_a_mask_is_of_the_models_size_and_holds_no_control_token(compiled: Callable[[Spec], Constraint]) -> None:
    mask = compiled(schema({"type": "string"})).start().mask()
    assert (mask.shape, mask.dtype) == ((260,), torch.bool)
    inside = after(compiled(schema({"type": "string"})), '"')
    assert inside is not None
    assert not inside.mask()[[END, CONTROL, 258, 259]].any()
    assert not inside.mask()[ord("\n")]


@pytest.mark.parametrize("make", [vocabularies.byte_level, vocabularies.unigram, vocabularies.prepending])
def test_any_kind_of_vocabulary_spells_json(make: Callable[[], Backend], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = Tokenizer(vocabularies.save(make(), tmp_path))
    encode = partial(tokenizer.encode, at_start=False, control=False)
    vocab = Vocab(
        tokenizer.token_bytes, tokenizer.special_ids, tokenizer.eos_ids, size=tokenizer.vocab_size + 7, encode=encode
    )
    compiler = Compiler(vocab)
    wanted = {"type": "object", "properties": {"to be": {"type": "string"}, "n": {"type": "integer"}}}
    constraint = compiler.compile(schema({**wanted, "required": ["to be", "n"]})).result(timeout=60)
    text = '{"to be": "or not Ü 🦊", "n": 12}'
    state, forced = constraint.start(), 0
    tokens = encode(text)
    while tokens:
        for token in state.forced_tokens().certain:
            assert token == tokens[0], "what is forced is what the tokenizer says"
            forced += 1
            assert state.mask()[token]
            assert state.advance(tokens.pop(0))
        if tokens:
            assert state.mask()[tokens[0]]
            assert state.advance(tokens.pop(0))
    assert state.is_finished
    assert forced >= 4
    compiler.close()


def test_what_opens_behind_forced_text_is_guessed_and_is_no_more_than_a_guess() -> None:
    """A token may hold the sure text and the next piece: the likeliest is a draft, and the model may take another."""
    pieces = {256: b' {"', 257: b' ["', 258: b' "', 259: b" ", 260: b" {"}
    spellings = sorted(((data, token) for token, data in pieces.items()), key=lambda pair: -len(pair[0]))

    def encode(text: str) -> list[int]:
        data, tokens = text.encode(), []
        while data:
            piece, token = next((p for p in spellings if data.startswith(p[0])), (data[:1], data[0]))
            tokens.append(token)
            data = data[len(piece) :]
        return tokens

    vocab = Vocab([*(bytes([b]) for b in range(256)), *pieces.values(), b"</s>"], [], [261], size=262, encode=encode)
    compiler = Compiler(vocab)
    for value, guess, other in [
        ({"type": "object"}, b' {"', b" {}"),
        ({"type": "array", "items": {"type": "string"}}, b' ["', b" []"),
        ({"type": "integer"}, b" ", b" 7"),
        ({}, b' "', b" null"),
    ]:
        constraint = compiler.compile(schema({"properties": {"a": value}, "required": ["a"]})).result(timeout=60)
        state = constraint.start()
        assert all(state.advance(token) for token in b'{"a":')
        forced = state.forced_tokens()
        assert vocab.spelled(forced.certain + forced.draft) == guess
        assert all(state.advance(token) for token in other)
    compiler.close()


def test_a_tokenizer_that_changes_letters_is_not_asked() -> None:
    vocab = Vocab([*BYTE_VOCAB.token_bytes], [CONTROL], [END], encode=lambda text: list(text.lower().encode()))
    compiler = Compiler(vocab)
    state = compiler.compile(Grammar('start: "AbC"')).result(timeout=60).start()
    assert bytes(state.forced_tokens().certain) == b"AbC"
    compiler.close()


@pytest.mark.parametrize(
    ("spec", "begun"),
    [
        (schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}), '{"a": "xyz'),
        (schema({"type": "array", "items": {"type": "integer"}, "minItems": 3}), "[12, 3"),
        (Regex("(ab){2,}c"), "ab"),
        (Regex("([^\\n]{1,200}\\n){3}"), "abc"),
    ],
    ids=str,
)
def test_a_way_to_the_end_is_found_from_the_middle(
    spec: Spec, begun: str, compiled: Callable[[Spec], Constraint]
) -> None:
    state = after(compiled(spec), begun)
    assert state is not None
    way = state.closing(40)
    assert way is not None
    assert not state.is_complete, "looking changes nothing"
    assert state.closing(len(way) - 1) is None
    assert all(state.advance(token) for token in way)
    assert state.is_complete
    assert state.closing(0) == ()


def test_an_enormous_schema_is_compiled_or_refused(compiled: Callable[[Spec], Constraint]) -> None:
    many = {"enum": [f"value number {number} of many" for number in range(20_000)]}
    assert takes(compiled(schema(many)), '"value number 19999 of many"')
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ConstraintError, match="recursion limit exceeded"):
        compiled(schema(deep))
    with pytest.raises(ConstraintError, match="the schema is too large: "):
        compiled(JsonSchema('{"title": "' + "x" * 4_000_000 + '"}'))

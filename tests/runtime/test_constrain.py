"""Constraints: exactly the texts of the language, over any spelling the vocabulary has, within a budget."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
import string
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from branchwise.runtime.constrain import Budget, Choices, Compiler, Constraint, JsonSchema, Regex, Spec, Vocab, schema
from branchwise.runtime.constrain.estimate import estimate
from branchwise.runtime.constrain.outlines import OutlinesConstraint, compile_regex
from branchwise.runtime.constrain.pattern import parse
from branchwise.runtime.errors import ConstraintError, EngineClosed

ROOT = Path(__file__).parents[2]
REGEXES = [
    json.loads(line) for line in (ROOT / "tests" / "data" / "regexes.jsonl").read_text(encoding="utf-8").splitlines()
]

# A byte vocabulary: token b is the byte b; then two end tokens and a control token, then ids without a spelling.
END, OTHER_END, CONTROL = 256, 257, 258
BYTES = [*(bytes([byte]) for byte in range(256)), b"</s>", b"<|im_end|>", b"<|im_start|>"]
BYTE_VOCAB = Vocab(BYTES, [CONTROL], [END, OTHER_END], size=264)


def compiled(spec: Spec | str, vocab: Vocab = BYTE_VOCAB) -> Constraint:
    compiler = Compiler(vocab)
    try:
        return compiler.compile(Regex(spec) if isinstance(spec, str) else spec).result(timeout=60)
    finally:
        compiler.close()


def takes(constraint: Constraint, tokens: Iterable[int], end: int = END) -> bool:
    """Walk `tokens` and end the text; every mask on the way must agree with `advance`.

    Where an engine leaves one text only, its mask may leave out all but one way to spell it.
    """
    state = constraint.start()
    for token in tokens:
        allowed = bool(state.mask()[token])
        is_forced = bool(state.forced_tokens().certain)
        taken = state.advance(token)
        assert taken == allowed or (taken and is_forced)
        if not taken:
            return False
    assert bool(state.mask()[end]) == state.is_complete
    return state.is_complete and state.fork().advance(end)


def spelled_in_bytes(constraint: Constraint, text: str) -> bool:
    return takes(constraint, text.encode())


def language(constraint: Constraint, limit: int = 12) -> set[str]:
    """All texts of at most `limit` bytes."""
    found, waiting = set(), [(b"", constraint.start())]
    while waiting:
        text, state = waiting.pop()
        if state.is_complete:
            found.add(text.decode())
        for token in state.mask().nonzero().flatten().tolist() if len(text) < limit else ():
            if token < 256:
                following = state.fork()
                assert following.advance(token)
                waiting.append((text + bytes([token]), following))
    return found


@pytest.fixture(scope="module")
def bpe() -> tuple[Tokenizer, Vocab]:
    """A byte-level BPE with tokens of several words, of parts of characters, and two ids of one spelling."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["</s>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=200,
        show_progress=False,
    )
    texts = [test["text"] for entry in REGEXES for test in entry["tests"]]
    corpus = [*texts, *(entry["regex"] for entry in REGEXES), "Zoë Müller 🦊🦀 北京上海 Übung. $1,234.50 3.14"]
    tokenizer.train_from_iterator(corpus * 3, trainer)
    to_byte = _byte_of_letter()
    names = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
    spelled = [b"", b"", *(bytes(to_byte[letter] for letter in name or "") for name in names[2:])]
    spelled.append(b"New")
    return tokenizer, Vocab(spelled, [1], [0], size=len(spelled) + 5)


def _byte_of_letter() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


@pytest.mark.parametrize("entry", REGEXES, ids=lambda entry: str(entry["id"]))
def test_a_regex_takes_its_language_and_nothing_else(entry: dict[str, Any], bpe: tuple[Tokenizer, Vocab]) -> None:
    tokenizer, vocab = bpe
    in_bytes, in_tokens = compiled(entry["regex"]), compiled(entry["regex"], vocab)
    single = {spelled[0]: token for token, spelled in enumerate(vocab.token_bytes) if len(spelled) == 1}
    for text, valid in ((test["text"], test["valid"]) for test in entry["tests"]):
        assert spelled_in_bytes(in_bytes, text) == valid, text
        assert takes(in_tokens, (single[byte] for byte in text.encode()), end=0) == valid, text
        tokens = tokenizer.encode(text).ids
        assert len(tokens) < len(text.encode()) or len(text) < 10
        assert takes(in_tokens, tokens, end=0) == valid, text


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("", {""}),
        ("()", {""}),
        ("(yes|no)?", {"", "yes", "no"}),
        ("yes|no", {"yes", "no"}),
        ("a|ab|abc", {"a", "ab", "abc"}),
        ("7{1,4}", {"7", "77", "777", "7777"}),
        ("a{2,3}?", {"aa", "aaa"}),
        ("(a|)(b|)", {"", "a", "b", "ab"}),
        ("(?i)hm|(?-i:No)", {"hm", "Hm", "hM", "HM", "No"}),
        ("(?i:K)", {"k", "K", "\N{KELVIN SIGN}"}),
        ("(?i:a)b", {"ab", "Ab"}),
        ("[🦀-🦁]|ß", {"🦀", "🦁", "ß"}),
        ("(北京|上海|深圳)", {"北京", "上海", "深圳"}),
        ("[[a-e]--[b-d]]|[a-c&&b-d]", {"a", "e", "b", "c"}),
        ("[^\\x00-\\x60\\x{63}-\\x{10FFFF}]", {"a", "b"}),
        (r"[]^-]|\x41|\u{42}|\U00000043", {"]", "^", "-", "A", "B", "C"}),
        ("(a?){2}", {"", "a", "aa"}),
    ],
)
def test_the_whole_language_can_be_produced(pattern: str, texts: set[str]) -> None:
    assert language(compiled(pattern)) == texts


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"[0-9]+(\.[0-9]+)?", "3.14"),
        ("(ab)+", "ababab"),
        ("a( a)*", "a a a"),
        ("The river.*", "The river runs, and runs on 🦊"),
        ("[🦀-🦊]{2}", "🦊🦀"),
        (r"[A-ZÄÖÜ][a-zäöüß]*\.", "Übung."),
        (r"[A-Z,'-_]+", "(X)"),
        (r"\d+", "٣4"),
        (r"(?s).*", "a\nb"),
        (r"(?s:.)\P{Lu}\S\W[[:^digit:]]", "\naé-x"),
    ],
)
def test_an_optional_ending_never_hides_what_follows(pattern: str, text: str, bpe: tuple[Tokenizer, Vocab]) -> None:
    tokenizer, vocab = bpe
    assert spelled_in_bytes(compiled(pattern), text)
    assert takes(compiled(pattern, vocab), tokenizer.encode(text).ids, end=0)


@pytest.mark.parametrize(
    ("pattern", "text"), [(r"[A-Z,'\-_]+", "(X)"), (".*", "a\nb"), ("[🦀-🦊]", "🦋"), ("a|b", "ab")]
)
def test_what_is_outside_the_language_is_refused(pattern: str, text: str) -> None:
    assert not spelled_in_bytes(compiled(pattern), text)


def test_a_character_never_begins_with_a_continuation_byte() -> None:
    mask = compiled(r"(?s).+").start().mask()
    assert not mask[0x80:0xC2].any()
    assert mask[0xC2:0xF4].all()


def test_a_fence_character_is_never_allowed() -> None:
    for pattern in (r"(?s).", r"\D", r"[^a]", r"\W", r"\P{L}", r"\p{Cn}", r"[^\d]"):
        mask = compiled(pattern).start().mask()
        assert not mask[0xF4], pattern
        assert mask.shape == (264,)


@pytest.mark.parametrize("texts", list(itertools.permutations(["Ann", "Ann Lee", "Ann Lee Smith", "Bo"])))
def test_choices_may_begin_with_each_other_in_any_order(texts: tuple[str, ...]) -> None:
    assert language(compiled(Choices(texts)), limit=20) == set(texts)


@given(st.lists(st.text(alphabet=string.printable + "é🦊\x85", min_size=0, max_size=6), min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_choices_are_plain_text(texts: list[str]) -> None:
    constraint = compiled(Choices(tuple(texts)))
    assert language(constraint, limit=24) == set(texts)


@given(st.lists(st.text(alphabet="abcd", max_size=6), min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_choices_never_lead_to_where_the_vocabulary_cannot_spell_on(texts: list[str]) -> None:
    vocab = Vocab([b"a", b"b", b"ab", b"bc", b"cd", b"dd", b""], [], [6])
    if not all(vocab.can_spell(text) for text in texts):
        with pytest.raises(ConstraintError, match=r"^this vocabulary cannot spell the choice"):
            compiled(Choices(tuple(texts)), vocab)
        return
    constraint, found = compiled(Choices(tuple(texts)), vocab), set()
    waiting = [(b"", constraint.start())]
    while waiting:
        text, state = waiting.pop()
        allowed = state.mask().nonzero().flatten().tolist()
        assert allowed, f"no way on after {text!r}"
        found |= {text.decode()} if state.is_complete else set()
        for token in set(allowed) - {6}:
            following = state.fork()
            assert following.advance(token)
            waiting.append((text + vocab.token_bytes[token], following))
    assert found == set(texts)


@pytest.mark.parametrize("kind", ["numbered", "words"])
def test_choices_may_be_thousands(kind: str) -> None:
    rng = random.Random(0)
    texts = {
        "numbered": [f"item number {i} of the catalogue" for i in range(1000)],
        "words": ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 12))) for _ in range(3600)],
    }[kind]
    large = Vocab([*BYTES, *(b" %d" % number for number in range(50_000)), b"item", b" of the"], [CONTROL], [END])
    constraint = compiled(Choices(tuple(texts)), large)
    assert takes(constraint, texts[700].encode())
    assert not takes(constraint, texts[700].encode() + b"x")
    assert constraint.start().mask()[len(BYTES) + 50_000] == (kind == "numbered")


def test_choices_that_are_too_many_are_refused_in_words_of_their_own() -> None:
    with pytest.raises(ConstraintError) as raised:
        compiled(Choices(tuple(f"{number}" + "x" * 500 for number in range(1000))))
    assert str(raised.value) == (
        "the 1000 choices are too large: they have more than 200000 bytes, shared beginnings counted once. "
        "Give fewer or shorter ones, or compare them in groups with select(), or score()."
    )


def test_rows_of_choices_are_made_again_when_there_were_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.runtime.constrain.choices.MAX_ROWS_BYTES", 3 * BYTE_VOCAB.size)
    assert language(compiled(Choices(("abcdefgh", "xyz")))) == {"abcdefgh", "xyz"}


def test_every_id_of_one_spelling_is_allowed(bpe: tuple[Tokenizer, Vocab]) -> None:
    _, vocab = bpe
    mask = compiled("New York", vocab).start().mask()
    assert {vocab.token_bytes[token] for token in mask.nonzero().flatten().tolist()} >= {b"New"}
    assert mask[len(vocab.token_bytes) - 6]
    assert mask.shape == (vocab.size,)


def test_end_tokens_are_allowed_exactly_where_the_text_is_complete() -> None:
    state = compiled("ab?").start()
    assert not state.mask()[[END, OTHER_END]].any()
    assert not state.advance(END)
    assert state.advance(ord("a"))
    assert (state.is_complete, state.is_finished) == (True, False)
    assert state.mask().nonzero().flatten().tolist() == [ord("b"), END, OTHER_END]
    assert state.advance(ord("b"))
    assert (state.is_complete, state.is_finished) == (True, True)
    assert state.mask().nonzero().flatten().tolist() == [END, OTHER_END]


def test_an_ended_text_takes_nothing_but_the_end() -> None:
    state = compiled("a*").start()
    assert state.advance(OTHER_END)
    assert (state.is_complete, state.is_finished) == (True, True)
    assert not state.advance(ord("a"))
    assert state.advance(END)
    assert state.mask().nonzero().flatten().tolist() == [END, OTHER_END]


def test_four_sevens_are_the_most() -> None:
    state = compiled("7{1,4}").start()
    assert [state.advance(ord("7")) for _ in range(5)] == [True, True, True, True, False]
    assert state.is_finished
    assert state.advance(END)


def test_an_empty_pattern_is_finished_at_once() -> None:
    state = compiled("").start()
    assert state.is_finished
    assert state.mask().nonzero().flatten().tolist() == [END, OTHER_END]


def test_a_refused_token_changes_nothing() -> None:
    state = compiled("ab").start()
    for token in (-1, ord("b"), CONTROL, 259, BYTE_VOCAB.opening, BYTE_VOCAB.closing, 10**6):
        assert not state.advance(token)
    assert state.advance(ord("a"))


def test_forks_go_their_own_ways() -> None:
    state = compiled("a(b|c)").start()
    state.advance(ord("a"))
    fork = state.fork()
    assert state.advance(ord("b"))
    assert (state.is_finished, fork.is_complete) == (True, False)
    assert fork.advance(ord("c"))


def test_control_tokens_never_spell_their_names() -> None:
    constraint = compiled(r"[a-z]{2}<\|im_end\|>|<\|im_start\|>")
    assert spelled_in_bytes(constraint, "ab<|im_end|>")
    assert not constraint.start().mask()[[END, OTHER_END, CONTROL]].any()


def test_masks_of_equal_content_are_one_tensor() -> None:
    constraint = compiled("[a-z]{1,50}")
    state, masks = constraint.start(), set()
    for _ in range(50):
        masks.add(state.mask().data_ptr())
        state.advance(ord("x"))
    assert len(masks) == 2
    assert state.mask().dtype == torch.bool


def test_rows_are_made_again_when_there_were_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.runtime.constrain.outlines.MAX_ROWS_BYTES", 3 * BYTE_VOCAB.size)
    assert language(compiled("abcdefgh|xyz")) == {"abcdefgh", "xyz"}


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)*a(a|b){25}",
        "((x{1,200}){1,200}){1,200}",
        ".{0,5000}",
        r"[\p{L} ]{1,4000}",
        r"(\w{1,60}|\d{1,60}x){1,60}",
        "(a{0,99}b?){0,99}c",
        "|".join(rf"\p{{L}}{number}" for number in range(5000)),
    ],
)
def test_a_constraint_over_budget_is_refused_in_no_time(pattern: str) -> None:
    large = Vocab([*BYTES, *(b" %d" % number for number in range(50_000))], [CONTROL], [END])
    with pytest.raises(ConstraintError, match=r"^the constraint is too large: "):
        compile_regex(pattern, large, Budget())


def test_the_refusal_says_how_large_and_what_to_do() -> None:
    with pytest.raises(ConstraintError) as raised:
        compile_regex("((x{1,200}){1,200}){1,200}", BYTE_VOCAB, Budget())
    assert str(raised.value) == (
        "the constraint is too large: with its repeats written out it has 8000000 places, "
        "at most 20000 can be compiled. Shorten its bounded repeats."
    )
    with pytest.raises(ConstraintError) as raised:
        compile_regex("[ab]{1,9}", BYTE_VOCAB, Budget(max_seconds=264 * 10e-9 * 5))
    assert str(raised.value) == (
        "the constraint is too large: more than 5 states over a vocabulary of 264 tokens would pass "
        "1.32e-05 s or 1024 MiB to compile. Shorten its bounded repeats, or use narrower classes in them."
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Regex("("), "the pattern '(' cannot be read: the group opened at position 0 is never closed."),
        (Regex("["), "the pattern '[' cannot be read: the class opened at position 0 is never closed."),
        (Regex("a)"), "the pattern 'a)' cannot be read: the ) at position 1 closes no group."),
        (Regex("^a"), "the anchor at position 0 of the pattern is not supported."),
        (Regex("(?=a)"), "the group at position 0 of the pattern is not supported."),
        (
            Regex("[z-a]"),
            "the pattern '[z-a]' cannot be read: "
            "the range that ends at position 4 is not between two characters in order.",
        ),
        (Regex(r"\p{Greek}"), r"the property \p{Greek} at position 0 of the pattern is not supported."),
        (
            Regex("\U0010ffff"),
            r"the pattern '\U0010ffff' cannot be read: "
            "no text can hold the character U+10FFFF, which ends at position 1.",
        ),
        (
            Regex(r"[^\s\S]"),
            r"the pattern '[^\\s\\S]' cannot be read: no character is in the class that ends at position 7.",
        ),
        (
            Regex("(" * 101 + ")" * 101),
            f"the pattern '{'(' * 56}... cannot be read: "
            "there are more than 100 groups or classes inside each other at position 101.",
        ),
        (Regex("a|*"), "the pattern 'a|*' cannot be read: the * at position 2 has nothing to repeat."),
        (Regex("[a"), "the pattern '[a' cannot be read: the class opened at position 0 is never closed."),
        (
            Regex("x" * 4000 + "[" + "y" * 4000),
            f"the pattern '{'x' * 56}... cannot be read: the class opened at position 4000 is never closed.",
        ),
        (
            Regex(rf"\p{{{'G' * 4000}}}"),
            rf"the property \p{{{'G' * 41}... at position 0 of the pattern is not supported.",
        ),
        (Choices(("\ud800" + "a" * 99,)), rf"this vocabulary cannot spell the choice '\ud800{'a' * 50}...."),
        (Choices(()), "there are no choices to choose from."),
        (
            Regex("\ud800"),
            r"the pattern '\ud800' cannot be read: no text can hold the character U+D800, which ends at position 1.",
        ),
        (Choices(("\ud800",)), r"this vocabulary cannot spell the choice '\ud800'."),
        (Choices(("yes", "\U0010ffff")), r"this vocabulary cannot spell the choice '\U0010ffff'."),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_words(spec: Spec, message: str) -> None:
    with pytest.raises(ConstraintError) as raised:
        compiled(spec)
    assert str(raised.value) == message


def test_what_the_vocabulary_cannot_spell_is_refused() -> None:
    vocab = Vocab([b"a", b"b", b"cd", b""], [], [3])
    with pytest.raises(ConstraintError, match=r"^this vocabulary cannot spell the choice 'abc'\.$"):
        compiled(Choices(("ab", "abc")), vocab)
    with pytest.raises(ConstraintError, match=r"^this vocabulary cannot spell the pattern: somewhere"):
        compiled("a(b|c)c", vocab)
    assert takes(compiled("a(b|c)(cd)?", vocab), [0, 1, 2], end=3)


def test_one_specification_is_compiled_once_for_all_who_wait() -> None:
    compiler = Compiler(BYTE_VOCAB)
    futures = [compiler.compile(Regex("[a-z]{1,100}")) for _ in range(5)]
    assert len({id(future.result(timeout=60)) for future in futures}) == 1
    assert not futures[0].cancel()
    with pytest.raises(ConstraintError):
        compiler.compile(Regex("(")).result(timeout=60)
    assert compiler.compile(Regex("(")).exception(timeout=60) is compiler.compile(Regex("(")).exception(timeout=60)
    assert spelled_in_bytes(compiler.compile(Regex("ok")).result(timeout=60), "ok")
    compiler.close()


def test_the_least_recently_asked_for_is_dropped_first() -> None:
    compiler = Compiler(BYTE_VOCAB, max_bytes=3 * BYTE_VOCAB.size)
    first = compiler.compile(Regex("a")).result(timeout=60)
    assert compiler.compile(Regex("b")).result(timeout=60)
    assert compiler.compile(Regex("a")).result(timeout=60) is first
    third = compiler.compile(Regex("[c-z]{1,30}")).result(timeout=60)
    assert third.nbytes > 3 * BYTE_VOCAB.size
    assert compiler.compile(Regex("d")).result(timeout=60)
    assert compiler.compile(Regex("a")).result(timeout=60) is not first
    assert takes(first, b"a")
    compiler.close()


def test_a_callback_may_ask_for_another_constraint() -> None:
    compiler, done, inner = Compiler(BYTE_VOCAB), threading.Event(), []

    def ask_again(_: Future[Constraint]) -> None:
        inner.append(compiler.compile(Regex("b")))
        done.set()

    compiler.compile(Regex("a")).add_done_callback(ask_again)
    assert done.wait(timeout=60)
    assert spelled_in_bytes(inner[0].result(timeout=60), "b")
    compiler.close()


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[str]]]:
    """Schemas are large, and none is compiled before the event is set; which ones were begun."""
    may_go_on, begun = threading.Event(), list[str]()

    def prepare(text: str, tokenizer: LLTokenizer) -> schema.Prepared:
        begun.append(text)
        assert may_go_on.wait(timeout=60)
        return schema.prepare(text, tokenizer)

    monkeypatch.setattr("branchwise.runtime.constrain.prepare", prepare)
    monkeypatch.setattr("branchwise.runtime.constrain.LARGE_CHARACTERS", 1)
    yield may_go_on, begun
    may_go_on.set()


def test_a_small_constraint_does_not_wait_behind_large_ones(stalled: tuple[threading.Event, list[str]]) -> None:
    may_go_on, begun = stalled
    compiler = Compiler(BYTE_VOCAB)
    large = [compiler.compile(JsonSchema(f'{{"const": {number}}}')) for number in range(3)]
    assert compiler.compile(Regex("a")).result(timeout=60)
    assert compiler.compile(Choices(("yes", "no"))).result(timeout=60)
    assert not any(future.done() for future in large)
    assert compiler.compile(JsonSchema('{"const": 0}')) is large[0]
    may_go_on.set()
    assert all(future.result(timeout=60) for future in large)
    assert len(begun) == 3  # each of them once
    compiler.close()


def test_closing_answers_those_whose_constraint_is_large(stalled: tuple[threading.Event, list[str]]) -> None:
    may_go_on, _ = stalled
    compiler = Compiler(BYTE_VOCAB)
    futures = [compiler.compile(JsonSchema(f'{{"const": {number}}}')) for number in range(3)]
    compiler.close()
    may_go_on.set()
    for future in futures:
        with pytest.raises(EngineClosed, match=r"^the compiler was closed before the constraint was compiled\.$"):
            future.result(timeout=60)


def test_closing_answers_those_who_still_wait() -> None:
    compiler = Compiler(BYTE_VOCAB)
    futures = [compiler.compile(Regex(f"[a-z]{{1,{count}}}")) for count in range(200, 260)]
    compiler.close()
    with pytest.raises(EngineClosed, match=r"^the compiler was closed before the constraint was compiled\.$"):
        futures[-1].result(timeout=60)
    with pytest.raises(EngineClosed, match=r"^the compiler is closed; it takes no more constraints\.$"):
        compiler.compile(Regex("a"))
    compiler.close()


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "ab", "[ab]", "", "."]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{0,2}", "{2}", "{1,}", "*?", "??"])).map(
            lambda p: f"({p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)
SHORT_TEXTS = ["".join(letters) for length in range(5) for letters in itertools.product("ab", repeat=length)]
PAIRS = Vocab([b"a", b"b", b"ab", b"ba", b"aab", b""], [], [5])


@given(PATTERNS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_small_pattern_agrees_with_python(pattern: str) -> None:
    constraint = compile_regex(pattern, PAIRS, Budget())
    for text in SHORT_TEXTS:
        expected = re.fullmatch(pattern, text) is not None
        for tokens in spellings(text):
            assert takes(constraint, tokens, end=5) == expected, (pattern, text, tokens)


def spellings(text: str) -> Iterator[list[int]]:
    """All ways to write `text` in tokens of PAIRS."""
    if not text:
        yield []
    for token, spelled in enumerate(PAIRS.token_bytes):
        if spelled and text.startswith(spelled.decode()):
            yield from ([token, *rest] for rest in spellings(text[len(spelled) :]))


@given(PATTERNS)
@settings(max_examples=100, deadline=None)
def test_the_estimate_counts_the_states_that_are_built(pattern: str) -> None:
    constraint = compile_regex(pattern, PAIRS, Budget())
    parsed = parse(pattern)
    assert parsed.fenced.startswith("\U0010fffe(?:")
    # Branches that end alike are counted once; the library keeps some of them apart: (b|(a[ab]|a[ab])).
    assert len(reachable(constraint)) <= 2 * states_estimated(pattern)


def reachable(constraint: OutlinesConstraint) -> set[int]:
    waiting = [constraint.start()._place]
    seen = set(waiting)
    while waiting:
        place = waiting.pop()
        following = {constraint.next(place, token) for token in range(PAIRS.size)} - {None} - seen
        seen |= {place for place in following if place is not None}
        waiting += [place for place in following if place is not None]
    return seen


def states_estimated(pattern: str) -> int:
    return estimate(parse(pattern).tree, PAIRS, Budget()).states


@given(st.text(max_size=8).filter(lambda text: all(char < "\U00100000" for char in text)))
@settings(max_examples=50, deadline=None)
def test_an_escaped_text_is_the_only_text(text: str) -> None:
    constraint = compiled(re.escape(text))
    assert spelled_in_bytes(constraint, text)
    assert not spelled_in_bytes(constraint, text + "x")


def test_vocabularies_differ_in_their_fingerprints() -> None:
    vocabs = [
        Vocab([b"a", b"b", b""], [], [2]),
        Vocab([b"a", b"b", b""], [1], [2]),
        Vocab([b"a", b"b", b""], [], [1]),
        Vocab([b"a", b"b", b""], [], [2], size=5),
        Vocab([b"ab", b"", b""], [], [2]),
    ]
    assert len({vocab.fingerprint for vocab in vocabs}) == len(vocabs)
    assert Vocab([b"a", b"b", b"x"], [], [2]).fingerprint == vocabs[0].fingerprint


def test_no_pattern_is_compiled_without_its_fence() -> None:
    calls = [
        (path.relative_to(ROOT).as_posix(), ast.unparse(call.args[0]))
        for folder in ("lang", "interpreter", "runtime", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "constraint_peers.py"  # what others do
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "Index"
    ]
    assert calls == [("runtime/constrain/outlines.py", "fenced")]

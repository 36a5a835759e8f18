"""The dialect of constraints: what is accepted, what is respelled, and what is refused in which words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchwise.lang.errors import ConstraintError
from branchwise.lang.regex import normalize

DATA = Path(__file__).parents[1] / "data" / "regexes.jsonl"
REGEXES = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("entry", REGEXES, ids=lambda entry: str(entry["id"]))
def test_everyday_patterns_pass_unchanged(entry: dict[str, str]) -> None:
    assert normalize(entry["regex"]) == entry["regex"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^abc$", "abc"),
        (r"^(yes|no)$", "(yes|no)"),
        (r"^yes|no$", "yes|no"),
        (r"\Aabc\Z", "abc"),
        (r"\Aabc\z", "abc"),
        (r"(^a|b$)", "(a|b)"),
        (r"(^a)?b", "(a)?b"),
        (r"(|(?i))^a", "(|(?i))a"),
        (r"^^a$$", "a"),
        (r"^$", ""),
    ],
)
def test_anchors_that_always_hold_are_dropped(pattern: str, expected: str) -> None:
    assert normalize(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("x{,3}", "x{0,3}"),
        ("x{,}", "x{0,}"),
        ('{"age": [0-9]+}', r'\{"age": [0-9]+}'),
        ("a{1,b}", r"a\{1,b}"),
        ("a{}", r"a\{}"),
        (r"[\b]", r"[\x08]"),
        ("a+?b*?c??d{2,3}?", "a+b*c?d{2,3}"),
        ("(?P<year>[0-9]{4})-(?<month>[0-9]{2})", "([0-9]{4})-([0-9]{2})"),
    ],
)
def test_spellings_with_an_exact_twin_are_translated(pattern: str, expected: str) -> None:
    assert normalize(pattern) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "a|",
        "()",
        "[]a]",
        "[^]a]",
        "[--a]",
        "[a-]",
        "[a-z--m]",
        "[+--]",
        "[[:alpha:]_]",
        r"[\w&&[^\d]]",
        r"[\p{Greek}\PL]",
        r"\p{Lu}\pL",
        r"\x41\u0041\U0001F98A\x{1F98A}\u{41}",
        "(?i)yes|(?s-i:no)",
        "🦊|漢字",
        "}]",
    ],
)
def test_the_rest_of_the_dialect_is_left_alone(pattern: str) -> None:
    assert normalize(pattern) == pattern


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"(\d{4}", "the group opened at position 0 is never closed."),
        ("a(b(c)", "the group opened at position 1 is never closed."),
        ("x[", r"the class opened at position 1 is never closed; inside a class write \[ for the character."),
        ("[[]", r"the class opened at position 1 is never closed; inside a class write \[ for the character."),
        ("a)", r"the ) at position 1 closes no group; write \) for the character."),
        ("*a", "the quantifier * at position 0 repeats nothing."),
        ("a|{2}", "the quantifier {2} at position 2 repeats nothing."),
        ("(+)", "the quantifier + at position 1 repeats nothing."),
        ("^*", "the quantifier * at position 1 repeats nothing."),
        ("a**", "the quantifier * at position 2 follows another one; put what it repeats in a group."),
        ("a++", "the possessive quantifier ++ at position 1 is not supported in a constraint."),
        ("a{3,1}", "the repeat {3,1} at position 1 has its bounds reversed."),
        ("a{9999999999}", "the repeat {9999999999} at position 1 is larger than 2147483647."),
        ("[z-a]", "the range z-a at position 1 is reversed."),
        (r"[a-\d]", r"the range at position 1 ends with a set; write \- for the character."),
        (r"[\d-a]", r"the range at position 1 begins with a set; write \- for the character."),
        ("(?=a)", "look-ahead (?= at position 0 is not supported in a constraint."),
        ("a(?<!b)", "look-behind (?<! at position 1 is not supported in a constraint."),
        ("(?>a)", "an atomic group (?> at position 0 is not supported in a constraint."),
        (r"(a)\1", r"the back-reference \1 at position 3 is not supported in a constraint."),
        ("(?P<n>a)(?P=n)", "a back-reference (?P= at position 8 is not supported in a constraint."),
        (r"\bword", r"the word boundary \b at position 0 is not supported in a constraint."),
        ("(?m)a", "the flag m in (?m) at position 0 is not supported in a constraint."),
        ("(?-u:a)", "switching Unicode off in (?-u: at position 0 is not supported in a constraint."),
        ("(?%a)", "the group (?% at position 0 is not supported in a constraint."),
        ("a\\", r"the backslash at position 1 escapes nothing; write \\ for the character."),
        (r"\q", r"the escape \q at position 0 is unknown."),
        (r"\0", r"the escape \0 at position 0 is unknown."),
        (r"\u12", r"the escape at position 0 is incomplete; write \x41, \u0041 or \x{41}."),
        (r"\x{110000}", r"the escape \x{110000} at position 0 is no character."),
        (r"\ud800", r"the escape \ud800 at position 0 is no character."),
        ("\ud800", "the character at position 0 is half of a surrogate pair."),
        (r"\p", r"the escape at position 0 names no property; write \p{L}."),
        ("(" * 101 + ")" * 101, "the group opened at position 100 is more than 100 groups deep."),
        ("a^b", "the anchor ^ at position 1 can never hold: text always stands before it."),
        (r"\Za", r"the anchor \Z at position 0 can never hold: text always stands after it."),
        (
            "a*^b",
            "the anchor ^ at position 2 holds only where nothing stands before it; "
            "a pattern describes the whole text, so leave the anchor out.",
        ),
        (
            "(a$)+",
            "the anchor $ at position 2 holds only where nothing stands after it; "
            "a pattern describes the whole text, so leave the anchor out.",
        ),
    ],
)
def test_what_is_not_of_the_dialect_is_refused_by_name_and_position(pattern: str, message: str) -> None:
    with pytest.raises(ConstraintError) as raised:
        normalize(pattern)
    assert str(raised.value) == message


@given(st.text())
def test_an_escaped_text_is_always_a_pattern(text: str) -> None:
    assert normalize(re.escape(text)) == re.escape(text)


@given(st.text(alphabet=r"ab(|)[]^$*+?{},01-\dpx", max_size=12))
def test_any_text_is_a_pattern_or_refused(pattern: str) -> None:
    try:
        normal = normalize(pattern)
    except ConstraintError:
        return
    assert normalize(normal) == normal

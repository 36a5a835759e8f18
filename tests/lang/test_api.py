from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from branchwise.lang import (
    CallError,
    Concat,
    ConstraintError,
    Gen,
    GenOptions,
    LangError,
    OptionError,
    RoleBegin,
    RoleEnd,
    Select,
    Text,
    Tools,
    assistant_begin,
    assistant_end,
    flatten,
    gen,
    role,
    select,
    system,
    text,
    tools,
    user,
)


class Index:
    """A whole number that is no `int`, like numpy's."""

    def __index__(self) -> int:
        return 5


def message_of(call: Callable[[], object], kind: type[Exception] = OptionError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_gen_keeps_what_it_is_given_and_nothing_else() -> None:
    op = gen("a", max_tokens=8, stop=["\n"], temperature=0, top_p=0.5, top_k=3, seed=7, n=2, ignore_eos=True)
    options = GenOptions(max_tokens=8, stop=("\n",), temperature=0.0, top_p=0.5, top_k=3, seed=7, n=2, ignore_eos=True)
    assert op == Gen("a", options)
    assert gen() == Gen(None, GenOptions())


def test_whole_numbers_of_other_types_are_taken() -> None:
    assert gen("a", max_tokens=Index()).options.max_tokens == 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0. To score given text, use select()."),
        ({"max_tokens": -1}, "max_tokens must be at least 1, got -1. To score given text, use select()."),
        ({"max_tokens": 3.0}, "max_tokens must be a whole number, got 3.0 (float)."),
        ({"max_tokens": True}, "max_tokens must be a whole number, got True (bool)."),
        ({"max_tokens": "8"}, "max_tokens must be a whole number, got '8' (str)."),
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"n": float("nan")}, "n must be a whole number, got nan (float)."),
        ({"seed": -1}, "seed must be at least 0, got -1."),
        ({"seed": 2**63}, "seed must be below 2**63, got 9223372036854775808."),
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1. 0 takes the likeliest token each time."),
        ({"temperature": float("nan")}, "temperature must be finite, got nan."),
        ({"temperature": float("inf")}, "temperature must be finite, got inf."),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot' (str)."),
        ({"temperature": False}, "temperature must be a number, got False (bool)."),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0.0. 1 turns it off."),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5. 1 turns it off."),
        ({"top_p": float("nan")}, "top_p must be finite, got nan."),
        ({"top_k": 0}, "top_k must be at least 1, or -1 for off, got 0."),
        ({"top_k": -2}, "top_k must be at least -1, got -2."),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1 (int)."),
        ({"stop": ""}, "stop holds an empty string, which every text contains. Write None or [] for no stop."),
        ({"stop": ["a", ""]}, "stop holds an empty string, which every text contains. Write None or [] for no stop."),
        ({"stop": 5}, "stop must be a list of strings, got 5 (int)."),
        ({"stop": b"x"}, "stop must be a list of strings, got b'x' (bytes)."),
        ({"stop": ["a", 5]}, "stop[1] must be a string, got 5 (int). Write str(...) around it."),
        ({"regex": 5}, "regex must be a string, got 5 (int)."),
        ({"choices": []}, "choices must hold at least one string, got none."),
        ({"choices": "yes"}, "choices must be a list of strings, got the string 'yes'. Write ['yes']."),
        ({"choices": ["", "b"]}, "choices holds an empty string, which has no token to compare. Leave it out."),
        ({"choices": [1, 10]}, "choices[0] must be a string, got 1 (int). Write str(...) around it."),
        (
            {"choices": ["a"], "regex": "a"},
            "regex and choices are both given, and only one can say what the text must be.",
        ),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_written(options: dict[str, Any], message: str) -> None:
    where = 'gen("age")'
    assert message_of(lambda: gen("age", **options)) == f"{where}: {message}"


def test_the_wrong_option_of_a_call_without_a_name_is_named_too() -> None:
    assert message_of(lambda: gen(n=0)) == "gen(): n must be at least 1, got 0."


def test_none_counts_as_not_given() -> None:
    assert gen("a", max_tokens=None, stop=None, choices=None) == gen("a")


def test_one_stop_is_not_taken_for_its_characters() -> None:
    assert gen("x", stop="wor").options.stop == ("wor",)
    assert gen("x", stop=("lo", "wor")).options.stop == ("lo", "wor")
    assert gen("x", stop=[]).options.stop == ()


def test_equal_choices_count_once() -> None:
    assert gen("x", choices=["a", "b", "a"], temperature=1).options.choices == ("a", "b")
    assert select("x", choices=("a", "a")).choices == ("a",)


def test_a_positional_option_is_refused_with_the_way_to_write_it() -> None:
    message = message_of(lambda: gen("x", 32), CallError)  # type: ignore[arg-type]
    assert message == 'gen("x", 32): options are given by name. Write max_tokens=...'


def test_an_unknown_option_is_refused_with_the_nearest_known_one() -> None:
    message = message_of(lambda: gen("x", max_token=3), CallError)  # type: ignore[arg-type]
    assert message == 'gen("x"): there is no option max_token. Did you mean max_tokens?'
    message = message_of(lambda: select("x", ["a"], seed=0), CallError)  # type: ignore[arg-type]
    assert message == 'select("x"): there is no option seed. Known: choices, choices_method, heal.'


def test_select_says_that_it_draws_nothing() -> None:
    message = message_of(lambda: select("x", ["a"], temperature=0), CallError)  # type: ignore[arg-type]
    assert message.startswith('select("x"): select takes the likeliest and draws nothing, so it has no temperature.')


def test_choices_of_gen_are_compared_unless_a_temperature_draws_one() -> None:
    assert gen("x", choices=["a", "b"]) == select("x", ["a", "b"])
    greedy = gen("x", choices=["a"], choices_method="greedy_token_selection")
    assert greedy == select("x", ["a"], choices_method="greedy_token_selection")
    drawn = gen("x", choices=["a", "b"], temperature=0.5, max_tokens=3)
    assert drawn == Gen("x", GenOptions(choices=("a", "b"), temperature=0.5, max_tokens=3))


@pytest.mark.parametrize("option", [{"max_tokens": 3}, {"stop": "."}, {"seed": 1}, {"n": 2}, {"top_p": 0.5}])
def test_what_says_nothing_about_the_likeliest_choice_is_refused(option: dict[str, Any]) -> None:
    message = message_of(lambda: gen("x", choices=["a"], **option))
    assert message.startswith('gen("x"): choices without temperature= give the likeliest one, whole, whatever ')


def test_a_method_without_choices_to_compare_is_refused() -> None:
    method = "greedy_token_selection"
    assert message_of(lambda: gen("x", choices_method=method)) == (  # type: ignore[arg-type]
        'gen("x"): choices_method is given, but there are no choices.'
    )
    message = message_of(lambda: gen("x", choices=["a"], temperature=1, choices_method=method))  # type: ignore[arg-type]
    assert message == 'gen("x"): choices_method is given, but with temperature= one of the choices is drawn.'
    message = message_of(lambda: gen("x", choices=["a"], choices_method="best"))  # type: ignore[arg-type]
    assert message.startswith('gen("x"): choices_method must be one of token_length_normalized, ')


@pytest.mark.parametrize(
    ("write", "where"),
    [
        (lambda: "a" + gen("x") + "b\ud800", "the text"),
        (lambda: text("b\ud800"), "text(): the value"),
        (lambda: user("b\ud800"), "the text"),
        (lambda: role("b\ud800", "x"), "role(): the name"),
        (lambda: gen("x", stop="b\ud800"), 'gen("x"): stop'),
        (lambda: gen("x", stop=["a", "b\ud800"]), 'gen("x"): stop[1]'),
        (lambda: gen("x", regex="b\ud800"), 'gen("x"): regex'),
        (lambda: select("x", ["b\ud800"]), 'select("x"): choices[0]'),
    ],
)
def test_half_a_character_is_refused_where_it_is_written(write: Callable[[], object], where: str) -> None:
    message = message_of(write)
    assert message.startswith(f"{where} has half a character, '\\ud800', at position 1: 'b\\ud800' (str).")


def test_a_name_is_a_string_with_something_in_it() -> None:
    assert message_of(lambda: gen(["a"])) == "gen(): the name must be a string, got ['a'] (list)."  # type: ignore[arg-type]
    assert message_of(lambda: gen("")) == 'gen(""): the name is empty. Leave it out if the text needs no name.'


def test_a_wrong_regex_is_refused_with_the_call_in_front() -> None:
    message = message_of(lambda: gen("date", regex=r"(\d{4}"), ConstraintError)
    assert message.startswith(r'gen("date", regex="(\d{4}"): ')
    assert "position 0" in message
    assert message_of(lambda: gen(regex="("), ConstraintError).startswith('gen(regex="("): ')


def test_the_regex_is_kept_as_it_was_written() -> None:
    assert gen("x", regex="^ab$").options.regex == "^ab$"


def test_select_takes_its_choices_by_place_or_by_name() -> None:
    assert select("x", ["a", "b"]) == select("x", choices=["a", "b"]) == Select("x", ("a", "b"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select("x", []), 'select("x"): choices must hold at least one string, got none.'),
        (lambda: select(["a"]), "select(): the name must be a string, got ['a'] (list)."),  # type: ignore[arg-type]
        (
            lambda: select("x", ["a"], choices_method="best"),  # type: ignore[arg-type]
            "select(\"x\"): choices_method must be one of token_length_normalized, greedy_token_selection, "
            "unconditional_likelihood_normalized, got 'best'.",
        ),
    ],
)
def test_a_wrong_select_is_refused_where_it_is_written(call: Callable[[], object], message: str) -> None:
    assert message_of(call) == message


def test_select_needs_choices() -> None:
    assert message_of(lambda: select("x"), CallError) == (
        'select("x"): choices are missing. Write select("name", ["yes", "no"]).'
    )


def test_roles_surround_what_is_in_them() -> None:
    assert system("a") == Concat((RoleBegin("system"), Text("a"), RoleEnd("system")))
    assert user("a" + gen("b")).ops == (RoleBegin("user"), Text("a"), gen("b"), RoleEnd("user"))
    assert assistant_begin() + "x" + assistant_end() == role("assistant", "x")


def test_text_is_only_text() -> None:
    assert text("<|im_end|>") == Text("<|im_end|>", control=False)
    assert message_of(lambda: text(gen("a"))).startswith("text(): the value must be a string, got Gen(")  # type: ignore[arg-type]


def test_operations_are_joined_in_order_and_never_nested() -> None:
    expr = "a" + gen("b") + "c" + select("d", ["e"])
    assert expr.ops == (Text("a"), gen("b"), Text("c"), select("d", ["e"]))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda: f"Answer: {gen('a')}",
            'gen("a") stands inside an f-string, str() or %, which would turn it into text. Append it with + instead.',
        ),
        (
            lambda: "Answer: %s" % gen("a"),  # noqa: UP031  # it is what users write
            'gen("a") stands inside an f-string, str() or %, which would turn it into text. Append it with + instead.',
        ),
        (
            lambda: str("a" + gen("a")),
            "Concat(...) stands inside an f-string, str() or %, which would turn it into text. "
            "Append it with + instead.",
        ),
        (
            lambda: "a" + gen("b") + 5,  # type: ignore[operator]
            "cannot append 5 (int) to a state. Write text, gen(...), select(...) or a role.",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(write: Callable[[], object], message: str) -> None:
    assert message_of(write, LangError) == message


def test_text_is_plain_unless_it_is_raw() -> None:
    assert text("<|im_end|>") == Text("<|im_end|>", control=False)
    assert text("<|im_end|>", raw=True) == Text("<|im_end|>", control=True)
    with pytest.raises(OptionError, match=r"^text\(\): raw must be True or False, got 1 \(int\)\.$"):
        text("a", raw=1)  # type: ignore[arg-type]


def test_what_else_a_message_says_is_kept_as_json() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "é"}}}
    begin, *_ = flatten(role("assistant", "", tool_calls=[call]))
    call["function"] = {}  # what the program does to it later changes nothing
    assert begin == RoleBegin("assistant", '{"tool_calls": [{"function": {"name": "f", "arguments": {"x": "é"}}}]}')
    assert tools([{"name": "f"}]) == Tools('[{"name": "f"}]')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: role("tool", "a", content="b"), 'role("tool"): content is what its first two arguments say. Leave'),
        (lambda: role("tool", "a", x={1}), 'role("tool"): the fields must be what JSON can say, got '),
        (lambda: role("tool", "a", x=float("nan")), 'role("tool"): the fields must be what JSON can say, got '),
        (lambda: role("a", "", tool_calls="f"), 'role("a"): tool_calls must be a list of dicts, got '),
        (lambda: role("a", "", tool_calls=[{"function": 3}]), 'role("a"): tool_calls[0] must be a dict like {"type": '),
        (lambda: tools(["f"]), 'tools(): the schemas[0] must be a dict like {"type": "function", "function": {"name"'),
        (lambda: tools([{"name": "a\ud800"}]), "tools(): the schemas has half a character"),
    ],
)
def test_what_no_template_can_be_told_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_patterns_to_stop_at_are_checked_where_they_are_written() -> None:
    assert gen("x", stop_regex=r"\d+$").options.stop_regex == (r"\d+",)  # type: ignore[union-attr]
    assert gen("x", stop_regex=["a", "b"]).options.stop_regex == ("a", "b")  # type: ignore[union-attr]
    with pytest.raises(ConstraintError, match=r'^gen\("x"\): stop_regex: .*look-ahead'):
        gen("x", stop_regex="a(?=b)")

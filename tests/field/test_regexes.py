"""Theme 2: regex-constrained decoding. Each test is a case, by its number.

16, 17, 19, 20 and 29 are also in `tests/runtime/test_constrain.py`, over whole languages.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from branchwise import ConstraintError, Engine, GenerationError, State, function, gen
from branchwise.interpreter import Completion

from .constraints import BYTES, END, constraint_of, ok


def run(engine: Engine, prompt: str = "Say: ", **options: Any) -> State:
    @function
    def program(s: State) -> None:
        s += prompt + gen("x", **options)

    return program.run(backend=engine)


def told(state: State) -> Completion:
    completion = state.meta("x")
    assert isinstance(completion, Completion)
    return completion


def test_016_an_empty_regex_is_the_empty_text(engine: Engine) -> None:
    assert run(engine, "Sum: ", regex="")["x"] == ""
    assert run(engine, regex="a")["x"] == "a"


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [(r"^abc$", ["abc"]), (r"^(yes|no)$", ["yes", "no"]), (r"^yes|no$", ["yes", "no"]), (r"\Aabc\Z", ["abc"])],
)
def test_017_outer_anchors_say_what_holds_anyway(pattern: str, texts: list[str]) -> None:
    constraint = constraint_of(regex=pattern)
    assert all(ok(constraint, text) for text in texts)
    assert not any(ok(constraint, text + "x") for text in texts)
    with pytest.raises(ConstraintError, match=r"the anchor \^ at position 1 can never hold"):
        gen("x", regex="a^b")


@pytest.mark.parametrize(
    ("pattern", "text"), [("🦊", "🦊"), ("[🦀-🦊]{2}", "🦊🦀"), ("[A-ZÄÖÜ][a-zäöüß]*\\.", "Übung.")]
)
def test_019_characters_of_several_tokens_can_be_written(pattern: str, text: str, engine: Engine) -> None:
    constraint = constraint_of(regex=pattern)
    assert ok(constraint, text)
    assert not constraint.start().mask()[0x80:0xC0].any(), "no continuation byte comes first"
    assert run(engine, regex=re.escape(text), max_tokens=20)["x"] == text


def test_020_literals_in_any_script(engine: Engine) -> None:
    assert run(engine, "城市:", regex="(北京|上海|深圳)", max_tokens=20)["x"] in ("北京", "上海", "深圳")


@pytest.mark.parametrize(("pattern", "most"), [(r"([^\n]*\n){6}", 5), (r"([0-9]{1,3}\.){3}[0-9]{1,3}", 4)])
def test_022_a_text_that_was_cut_off_says_so(pattern: str, most: int, engine: Engine) -> None:
    completion = told(run(engine, regex=pattern, max_tokens=most))
    assert (completion.finish_reason, completion.detail, completion.complete) == ("length", "max_tokens", False)
    assert completion.usage.completion_tokens <= most
    state = constraint_of(regex=pattern).start()
    assert all(state.advance(byte) for byte in completion.text.encode())
    assert not state.is_complete


def test_023_an_open_tail_goes_on_where_the_end_is_not_wanted(engine: Engine) -> None:
    completion = told(run(engine, regex="The river.*", max_tokens=30, ignore_eos=True))
    assert (completion.usage.completion_tokens, completion.finish_reason) == (30, "length")
    assert completion.complete


def test_025_an_end_that_only_the_tokenizer_names_ends_a_constraint(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    with Engine(tiny_model, num_slots=64) as engine:
        named = next(iter(engine.tokenizer.eos_ids))
        other = next(token for token in sorted(engine.tokenizer.special_ids) if token != named)
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": other}))
    with Engine(folder, num_slots=512) as engine:
        assert {named, other} <= set(engine.tokenizer.eos_ids)
        state = run(engine, regex="[a-z]+", max_tokens=200, logit_bias={named: 100.0}, temperature=0, heal=False)
        assert told(state).finish_reason == "stop"
        assert len(told(state).tokens) == 1  # it is barred until there is a letter
        assert state["x"].isalpha()



def test_028_the_last_of_several_endings_is_reached(engine: Engine) -> None:
    @function
    def program(s: State, i: int) -> None:
        s += f"{i}: " + gen("x", regex="7{1,4}", ignore_eos=True, max_tokens=10)

    states = program.run_batch([{"i": i} for i in range(8)], backend=engine)
    assert [state["x"] for state in states] == ["7777"] * 8
    state = constraint_of(regex="7{1,4}").start()
    assert not state.mask()[END]
    assert state.advance(ord("7"))
    assert state.mask()[END]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"[0-9]+(\.[0-9]+)?", "3.5"), (r"(ab)+", "abab"), (r"a( a)*", "a a a"), (r"(yes|no)?", "yes")],
)
def test_029_what_may_end_may_also_go_on(pattern: str, text: str) -> None:
    assert ok(constraint_of(regex=pattern), text)


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){25}", "((x{1,200}){1,200}){1,200}", ".{0,5000}"])
def test_031_an_enormous_regex_holds_nobody_up(pattern: str, engine: Engine) -> None:
    @function
    def other(s: State) -> None:
        s += "On and on: " + gen("y", max_tokens=60, ignore_eos=True)

    beside = other.run(backend=engine, stream=True)
    start = time.thread_time()
    assert told(run(engine, regex=pattern, max_tokens=8, ignore_eos=True)).usage.completion_tokens == 8
    assert time.thread_time() - start < 5
    assert len(list(beside.text_iter("y"))) > 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
        ({"json_schema": {"properties": {"w": 5}}}, "schema must be an object or boolean"),
        ({"grammar": "start: nothing"}, 'unknown name: "nothing"'),
    ],
    ids=str,
)
def test_032_a_bad_constraint_fails_its_own_program_alone(bad: dict[str, Any], message: str, engine: Engine) -> None:
    @function
    def program(s: State, options: dict[str, Any]) -> None:
        s += "Say: " + gen("x", **options, max_tokens=8)

    good = {"regex": "[a-z]{2}"}
    first, failed, last = program.run_batch(
        [{"options": good}, {"options": bad}, {"options": good}], backend=engine, return_exceptions=True
    )
    assert isinstance(first, State) and isinstance(last, State)
    assert first["x"] == last["x"]
    assert isinstance(failed, GenerationError)
    assert str(failed).startswith('gen("x"): ') and message in str(failed)
    for pattern in ("(", "["):
        with pytest.raises(ConstraintError, match="is never closed"):
            gen("x", regex=pattern)


def test_034_a_dash_is_a_range_and_the_name_of_a_control_token_is_text(engine: Engine) -> None:
    assert ok(constraint_of(regex="[A-Z,'-_]+"), "(X)")
    assert not ok(constraint_of(regex=r"[A-Z,'\-_]+"), "(X)")
    with pytest.raises(ConstraintError, match="the range z-a at position 1 is reversed"):
        gen("x", regex="[z-a]")
    state = run(engine, regex=r"[a-z]{2}<\|im_end\|>", max_tokens=20)
    assert re.fullmatch(r"[a-z]{2}<\|im_end\|>", state["x"])


def test_055_digits_of_a_regex_are_those_that_int_reads(engine: Engine) -> None:
    assert ok(constraint_of(regex=r"\d+"), "١٢٣")
    assert int("١٢٣") == 123
    assert BYTES.size == END + 1

"""Theme 9: token boundaries. Each test is a case, by its number."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from branchwise import Engine, State, function, gen, text
from branchwise.interpreter import Completion
from branchwise.lang import Text, flatten

from ..interpreter.test_templates import session_of


@pytest.mark.slow
def test_121_a_prompt_may_end_inside_a_word_or_with_a_space(demo_model: Path) -> None:
    """How healing chooses, and that it is as likely as transformers' own: tests/runtime/test_healing.py."""
    with Engine(demo_model, num_slots=1024, defaults={"temperature": 0}) as engine:

        @function
        def program(s: State, prompt: str, heal: bool) -> None:
            s += prompt + gen("x", max_tokens=4, heal=heal)

        for prompt in ("The program is in /usr/lo", "She is "):
            healed = program.run(prompt, heal=True, backend=engine)
            assert healed.text() == prompt + healed["x"]
            frozen = program.run(prompt, heal=False, backend=engine)
            assert frozen.text() == prompt + frozen["x"]
            alone = engine.generate(engine.tokenizer.encode(prompt, at_start=True, control=True), max_tokens=4)
            assert frozen.meta("x").usage.prompt_tokens == alone.prompt_tokens
        assert program.run("The program is in /usr/lo", heal=True, backend=engine)["x"].startswith("cal")


@pytest.mark.parametrize("prompt", ["Un", "Un ", "foo.b", "名前は「"])
def test_122_healing_never_changes_the_prompt_and_a_constraint_is_about_what_follows(
    engine: Engine, prompt: str
) -> None:
    @function
    def program(s: State) -> None:
        s += prompt + gen("x", max_tokens=2) + gen("y", regex=" ?[ab]c", max_tokens=4)

    state = program.run(backend=engine)
    assert state.text() == prompt + state["x"] + state["y"]
    assert state["y"].lstrip(" ") in ("ac", "bc")


def test_124_literal_pieces_are_one_text(engine: Engine) -> None:
    @function
    def pieces(s: State) -> None:
        s += "Q: "
        s += "What"
        s += "?\nA:"
        s += gen("x", max_tokens=3)

    @function
    def whole(s: State) -> None:
        s += "Q: What?\nA:" + gen("x", max_tokens=3)

    first, second = pieces.run(backend=engine), whole.run(backend=engine)
    assert first["x"] == second["x"]
    usage = second.meta("x")
    assert isinstance(usage, Completion)
    assert usage.usage.prompt_tokens == len(engine.prompt_tokens("Q: What?\nA:"))


def test_125_raw_literals_say_control_tokens_and_text_from_strangers_never(engine: Engine) -> None:
    control = engine.tokenizer.special_ids

    def tokens(*expressions: str | Text) -> array[int]:
        session = session_of(engine.tokenizer, engine.tokenizer.chat_template)
        for expression in expressions:
            for op in flatten(expression):
                session.append(op)  # type: ignore[arg-type]  # text alone
        return session.prompt()

    raw = "<|im_start|>user\nhi<|im_end|>\n"
    assert len(control & set(tokens(raw))) == 2
    assert not control & set(tokens(text(raw)))
    assert engine.tokenizer.decode(tokens(text(raw))) == raw
    assert not control & set(tokens(text("<|im_"), text("end|>"))), "nor in two pieces"

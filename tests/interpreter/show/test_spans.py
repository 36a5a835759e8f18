"""Origins of text: cached, computed, forced, sampled, chosen, as the engine's counts say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from branchwise import Engine, State, function, gen, select
from branchwise.interpreter.origins import Origins, Piece
from branchwise.interpreter.show.spans import Fork, Plain, Story, Written, give_origins, tell

LONG = "The river runs past the old mill and under the bridge. "


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, num_slots=2048, defaults={"temperature": 0, "max_tokens": 6, "heal": False}) as engine:
        yield engine


@function
def ask(s: State, text: str) -> None:
    s += text
    s += gen("x", ignore_eos=True, return_logprob=True, top_logprobs=2)


def told(s: State) -> Story:
    s.sync()
    return tell(s._transcript)


def prompt_of(story: Story) -> dict[str | None, str]:
    """The text of each origin among the program's own."""
    parts = [part for span in story.spans if isinstance(span, Plain) for part in span.parts]
    return {origin: "".join(text for text, o in parts if o == origin) for _, origin in parts}


def written(story: Story) -> list[Written]:
    return [span for span in story.spans if isinstance(span, Written)]


def test_a_first_prompt_is_computed_and_the_same_again_cached_but_for_its_last_token(engine: Engine) -> None:
    assert prompt_of(told(ask.run(LONG, backend=engine))) == {"computed": LONG}
    story = told(ask.run(LONG, backend=engine))
    again = prompt_of(story)
    assert set(again) == {"cached", "computed"}
    assert again["cached"] + again["computed"] == LONG
    (usage,) = story.usages
    last = engine.tokenizer.decode(list(engine.prompt_tokens(LONG))[usage.hit_tokens :])
    assert again["computed"] == last
    assert usage.prompt_tokens - usage.hit_tokens == 1


def test_a_prompt_that_goes_on_from_a_cached_one_is_cached_up_to_there(engine: Engine) -> None:
    ask.run(LONG, backend=engine).sync()
    origins = prompt_of(told(ask.run(LONG + "And then?", backend=engine)))
    assert origins["cached"] == LONG[: len(origins["cached"])]
    assert len(origins["cached"]) >= len(LONG) - 12  # the last word may be spelled anew
    assert origins["computed"].endswith("And then?")


def test_each_token_is_a_piece_with_its_probability(engine: Engine) -> None:
    s = ask.run(LONG, backend=engine)
    (call,) = written(told(s))
    assert "".join(piece.text for piece in call.pieces) == s["x"]
    assert {piece.origin for piece in call.pieces} == {"sampled"}
    said = {one.logprob for one in s.meta("x").logprobs}
    assert {piece.logprob for piece in call.pieces} <= said
    for piece in call.pieces:
        assert piece.logprob is not None
        assert 0 < math.exp(piece.logprob) <= 1
        assert len(piece.likely) == 2


def test_what_a_constraint_leaves_no_choice_in_is_forced(engine: Engine) -> None:
    @function
    def date(s: State) -> None:
        s += "Date: " + gen("d", regex="20[0-9]{2}-01-01", max_tokens=20)

    s = date.run(backend=engine)
    (call,) = written(story := told(s))
    forced = [piece for piece in call.pieces if piece.origin == "forced"]
    assert len(forced) == story.usages[0].forced_tokens > 0
    digits = [i for i, piece in enumerate(call.pieces) if piece.origin == "sampled"]
    assert digits, "the two digits are the model's"
    assert "".join(piece.text for piece in call.pieces) == s["d"]
    assert "".join(p.text for p in call.pieces[digits[-1] + 1 :]).endswith("01-01")


def test_a_choice_is_chosen_and_what_it_computed_has_no_origin(engine: Engine) -> None:
    @function
    def choose(s: State) -> None:
        s += LONG + select("y", ["yes", "no"]) + " Then " + gen("x", max_tokens=3)

    story = told(choose.run(backend=engine))
    choice, _ = written(story)
    assert [piece.origin for piece in choice.pieces] == ["chosen"]
    plain = [span.parts for span in story.spans if isinstance(span, Plain)]
    assert plain[0] == [(LONG, None)]
    assert all(origin is not None for _, origin in plain[1])


def test_branches_are_told_beside_each_other_and_counted_together(engine: Engine) -> None:
    @function
    def tips(s: State) -> None:
        s += LONG
        with s.fork(2) as branches:
            branches += lambda i: f"Tip {i}: " + gen("tip", max_tokens=3, ignore_eos=True)

    s = tips.run(backend=engine)
    story = told(s)
    (fork,) = [span for span in story.spans if isinstance(span, Fork)]
    first, second = map(prompt_of, fork.branches)
    assert first["computed"] == "Tip 0: "
    assert second["cached"] + second["computed"] == "Tip 1: "  # where they begin alike, the second finds the first's
    assert "1" in second["computed"]
    assert len(story.usages) == 2


def spelled(tokens: list[str]) -> Origins:
    return Origins([], range(len(tokens)), frozenset({1}), lambda ids, _: [tokens[i] for i in ids])


def test_a_stop_cuts_the_last_token() -> None:
    assert spelled(["ab", "cd"]).output("abc") == [Piece("ab", "sampled"), Piece("c", "forced")]


def test_a_text_that_its_tokens_do_not_spell_gets_no_origin() -> None:
    assert spelled(["ab", "cd"]).output("abXY") == [Piece("ab", "sampled"), Piece("XY")]


def test_the_computed_end_may_begin_inside_a_text() -> None:
    untold = [Plain([("one two", None)]), Plain([("three", None)])]
    give_origins(untold, "two<|end|>three")
    assert untold == [Plain([("one ", "cached"), ("two", "computed")]), Plain([("three", "computed")])]

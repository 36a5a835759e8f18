"""States and caches as a terminal shows them: nothing that was said is lost, and no text becomes markup."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from branchwise import State, assistant, function, gen, select, user
from branchwise.interpreter import Scripted
from branchwise.interpreter.show.terminal import Tail, as_rich
from branchwise.interpreter.show.terminal_tree import tree_as_rich
from branchwise.runtime.picture import Box, TreePicture

MARKUP = "[bold red]not markup[/]"


def printed(shown: RenderableType, *, height: int = 50) -> str:
    console = Console(file=io.StringIO(), width=80, height=height, color_system=None)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@function
def told(s: State) -> None:
    s += user(MARKUP) + assistant(gen("x", n=2))
    with s.assistant():
        s += "Tips:"
        with s.fork(2) as branches:
            branches += lambda i: f" {i}." + gen("tip")
    s += select("mood", ["good", "bad"])


def test_turns_branches_samples_and_values_are_all_there(scripted: Callable[..., Scripted]) -> None:
    s = told.run(backend=scripted({"x": [MARKUP, MARKUP], "tip": [MARKUP, MARKUP], "mood": "good"}))
    shown = printed(as_rich(s._transcript))
    lines = shown.splitlines()
    assert lines[0].strip() == "▌  user"
    assert f"▌ {MARKUP}" in lines[1]
    assert f"sample 2: {MARKUP}" in shown
    assert f"├── 0  0.‹tip›{MARKUP}" in shown
    assert f"└── 1  1.‹tip›{MARKUP}" in shown
    assert "‹mood›good" in shown
    assert f"tip = ['{MARKUP}', '{MARKUP}']" in shown
    assert "■" not in shown  # a legend of colours, where there are none


def test_a_failed_call_says_why(scripted: Callable[..., Scripted]) -> None:
    def fail(*_: object) -> str:
        raise ValueError("no answer")

    s = told.run(backend=scripted(fail), stream=True)
    with pytest.raises(Exception, match="no answer"):
        s.sync()
    shown = printed(as_rich(s._transcript))
    assert "‹gen✗›" in shown or "‹x✗›" in shown
    assert "no answer" in shown


def test_of_what_is_too_long_the_end_is_seen() -> None:
    shown = printed(Tail("\n".join(map(str, range(100)))), height=10)
    assert shown.split() == [str(n) for n in range(91, 100)]


def box(key: str, parent: str | None, text: str) -> Box:
    return Box(key, parent, text, len(text), "evictable" if parent else "root")


def picture(*boxes: Box) -> TreePicture:
    return TreePicture((box("r", None, "root"), *boxes), 100, 50)


def test_a_tree_marks_what_is_new_and_what_is_gone_but_no_split() -> None:
    before = picture(box("ab", "r", "system question"), box("c", "ab", " first"), box("d", "ab", " second"))
    after = picture(
        box("a", "r", "system "), box("ab", "a", "question"), box("c", "ab", " first"), box("e", "a", "other")
    )
    lines = [line.strip("│├└─ ▇").lstrip("0123456789 ") for line in printed(tree_as_rich(after, before)).splitlines()]
    assert lines == ["root", "system", "question", "first", "✂ second (evicted, or its end)", "+ other"]
    assert "+" not in printed(tree_as_rich(after))

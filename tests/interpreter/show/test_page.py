"""States as HTML: nothing a program or a model says becomes markup, and showing a state changes nothing in it."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

from branchwise import State, assistant, function, gen, role, select, user
from branchwise.interpreter import Scripted
from branchwise.interpreter.show.spans import MOST_LEVELS, settled

HOSTILE = "</span><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;"
TAGS = {"div", "span", "style", "details", "summary", "i"}


class Seen(HTMLParser):
    """The tags, attributes and text of a page, and whether each tag that begins ends."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


@function
def hostile(s: State) -> None:
    s += role(HOSTILE, HOSTILE)
    with s.assistant():
        s += gen("x", n=2) + select("y", [HOSTILE, "b"])
        with s.fork(2) as branches:
            branches += gen("z")
        s["w"] = HOSTILE


def test_no_text_becomes_markup(scripted: Callable[..., Scripted]) -> None:
    s = hostile.run(backend=scripted(lambda *_: HOSTILE))
    s.sync()
    seen = Seen(s._repr_html_())
    assert seen.tags <= TAGS
    assert seen.attributes <= {"class", "title", "open"}
    assert not seen.open
    assert seen.text.count(HOSTILE) >= 7  # role, content, two samples, the choice, two branches


def test_what_failed_says_why_and_is_escaped(scripted: Callable[..., Scripted]) -> None:
    def fail(*_: object) -> str:
        raise ValueError(HOSTILE)

    s = function(lambda s: s.__iadd__("Say: " + gen("x"))).run(stream=True, backend=scripted(fail))
    with pytest.raises(Exception, match="script"):
        s.sync()
    seen = Seen(s._repr_html_())
    assert seen.tags <= TAGS
    assert HOSTILE in seen.text
    assert "x failed" in seen.text


def test_a_backend_that_says_no_tokens_is_given_no_origins(scripted: Callable[..., Scripted]) -> None:
    s = function(lambda s: s.__iadd__(user("Hi") + assistant(gen("x")))).run(backend=scripted(lambda *_: "Hello"))
    s.sync()
    page = s._repr_html_()
    assert re.findall(r'<span class="t (\w*)"', page) == ["", ""]
    assert "Hello" in page


def test_showing_again_and_again_keeps_nothing(scripted: Callable[..., Scripted]) -> None:
    s = hostile.run(backend=scripted({"x": "text", "y": "b", "z": "text"}))
    s.sync()
    first = s._repr_html_()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        assert s._repr_html_() == first
    gc.collect()
    assert len(gc.get_objects()) - before < 50


def test_forks_deeper_than_a_page_is_wide_are_counted(scripted: Callable[..., Scripted]) -> None:
    @function
    def deep(s: State) -> None:
        for _ in range(2000):
            (s,) = s.fork(1)
            kept.append(s)
        s += gen("x")

    kept: list[State] = []
    s = deep.run(backend=scripted(lambda *_: "end"))
    kept[-1].sync()
    page = s._repr_html_()
    assert page.count("<summary>branch 0") == MOST_LEVELS
    assert "1 more branches, too deep to show" in page
    assert settled(s._transcript)


class Notebook:
    """`IPython.display` in a kernel: one display, and what it was updated with."""

    def __init__(self) -> None:
        self.pages: list[str] = []
        self.displays = 0

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Notebook:
        assert raw
        assert display_id
        self.displays += 1
        self.pages.append(data["text/html"])
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.pages.append(data["text/html"])


def test_a_notebook_has_one_display_that_grows(
    scripted: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook: Any = Notebook()
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]  # stands for the module
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    s = function(lambda s: s.__iadd__("Say: " + gen("x"))).run(backend=scripted(lambda *_: "Hello"))
    s.show()
    assert notebook.displays == 1
    assert "Hello" in notebook.pages[-1]
    assert "x …" not in notebook.pages[-1]
    assert len(set(notebook.pages)) == len(notebook.pages)  # an update only where there is something new


def test_elsewhere_the_text_is_printed(scripted: Callable[..., Scripted], capsys: pytest.CaptureFixture[str]) -> None:
    s = function(lambda s: s.__iadd__("Say: " + gen("x"))).run(backend=scripted(lambda *_: "Hello"))
    s.show()
    assert capsys.readouterr().out == "Say: Hello\n"

"""The program in docs/remote.md prints what stands below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .stub import Body, Stub

PAGE = Path(__file__).parents[3] / "docs" / "remote.md"


def test_the_program_of_the_page_prints_what_the_page_says(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    def text(body: Body) -> str:
        asked = body["messages"][-1]["content"]
        return "sleep early" if asked.startswith("Two") else f"more of {asked[-2]}"

    stub.text = text
    ((program, printed),) = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(program, "example.py", "exec"), {"URL": stub.url})
    assert capsys.readouterr().out == printed

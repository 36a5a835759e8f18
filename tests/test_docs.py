"""The programs in the documentation print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tokens.md"])
def test_programs_of_a_page_print_what_the_page_says(
    demo_model: Path, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```\n+(?:```text\n(.*?)```)?", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    for program, printed in blocks:
        exec(program, names)
        assert capsys.readouterr().out == printed, program
    names["engine"].close()  # type: ignore[attr-defined]  # an Engine

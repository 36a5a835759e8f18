"""The program on the README's first screen prints what the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.slow
def test_the_program_of_the_readme_prints_what_stands_below_it(
    demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL)
    assert found is not None
    names: dict[str, object] = {}
    exec(found[1], names)
    names["engine"].close()  # type: ignore[attr-defined]  # an Engine
    assert capsys.readouterr().out == found[2]


def test_every_file_the_readme_names_is_there() -> None:
    root = Path(__file__).parents[1]
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (root / link).exists(), link

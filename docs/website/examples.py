"""Puts the examples and their notebooks beside the pages of the site, which link to them where they are here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parents[2] / "examples"


def on_files(files: Files, config: Any) -> Files:
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("notebooks/*.ipynb")]:
        name = path.relative_to(EXAMPLES.parent).as_posix()
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("](../examples/", "](examples/").replace("](../benchmarks/", "](benchmarks/")

"""Makes the pictures of README and docs, and docs/examples.md, from what the programs do.

`python docs/pictures.py` makes all of them, `python docs/pictures.py examples` that page alone.

Pictures of the cache are the engine's own SVG, pictures of the terminal are what the commands print, as rich draws it.
Needs the demo model, and for the screenshots of pages a Chromium on the PATH (without one those stay as they are).
"""

from __future__ import annotations

import importlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from branchwise import Engine
from branchwise.interpreter.commands import demo
from branchwise.interpreter.commands.moments import NUM_SLOTS, moments_of

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
EXAMPLES = DOCS.parent / "examples"
WIDTH = 92  # characters
PAPER = TerminalTheme(
    (255, 255, 255),
    (36, 41, 47),
    [(36, 41, 47), (207, 34, 46), (17, 99, 41), (154, 103, 0), (9, 105, 218), (130, 80, 223), (27, 124, 131),
     (110, 119, 129)],
    [(87, 96, 106), (164, 14, 38), (26, 127, 55), (154, 103, 0), (33, 139, 255), (164, 117, 249), (49, 146, 170),
     (140, 149, 159)],
)  # fmt: skip
HEAD = """# Examples

Each is one file of less than 80 lines that runs on a CPU: `python examples/agent.py`, or all of them by
`python examples`. Below is what they print with the demo model, which has 135M parameters and is wrong now and then;
the last line says what sharing saved.

In a notebook: [the evolution of a cache](../examples/notebooks/evolution.ipynb),
[forks](../examples/notebooks/forks.ipynb), [a vote](../examples/notebooks/vote.ipynb),
[objects of types](../examples/notebooks/objects.ipynb), [a chat that is rewound](../examples/notebooks/rewind.ipynb).
"""
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width}}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect fill="#ffffff" stroke="#d0d7de" x="1" y="1" style="width:calc(100% - 2px);height:calc(100% - 2px)" rx="8"/>
<g transform="translate(10, 8)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""Without the web font that rich asks for: a picture must not call home."""


def main() -> None:
    makers: dict[str, Callable[[], None]] = {
        "demo": lambda: _terminal("demo", ["demo"]),
        "tree": lambda: _terminal("tree", ["tree", "--film", str(IMAGES / "evolution.html")]),
        "bench": lambda: _terminal("bench", ["bench"]),
        "moments": _moments,
        "screenshots": _screenshots,
        "examples": _write_examples,
    }
    IMAGES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or makers:
        makers[name]()


def _terminal(name: str, command: list[str]) -> None:
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    line = [sys.executable, "-m", "branchwise", *command]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    printed = done.stdout.replace(f"{DOCS}/", "docs/")
    shown = Text.assemble(("$ ", "dim"), (f"branchwise {' '.join(command)}".replace(f"{DOCS}/", "docs/"), "bold"), "\n")
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(shown, Text.from_ansi(printed), sep="")
    svg = console.export_svg(title="", theme=PAPER, code_format=FRAME, unique_id=f"bw-{name}")
    (IMAGES / f"{name}.svg").write_text(svg, encoding="utf-8")


def _moments() -> None:
    """The cache after each of the nine moments."""
    with Engine("smollm2-135m", num_slots=NUM_SLOTS) as engine:
        for number, moment in enumerate(moments_of(), 1):
            moment.happens(engine)
            (IMAGES / f"moment-{number}.svg").write_text(engine.tree.svg(), encoding="utf-8")


def _screenshots() -> None:
    """Screenshots of states as a notebook shows them, and of the film, by a browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("no Chromium on the PATH: the screenshots stay as they are", file=sys.stderr)
        return
    with Engine("smollm2-135m") as engine:
        demo.facts.run("Japan", backend=engine)
        state = demo.facts.run("Chile", return_logprob=True, top_logprobs=3, backend=engine)
        person = demo.extract.run(demo.TEXTS[1], backend=engine)
        for name, shown, height in (("state", state, 240), ("object", person, 180)):
            page = IMAGES / f"{name}.html"
            page.write_text(f'<meta charset="utf-8"><body style="margin:14px">{shown._repr_html_()}', encoding="utf-8")
            _shot(browser, page.as_uri(), IMAGES / f"{name}.png", 1040, height)
            page.unlink()
    _shot(browser, f"{(IMAGES / 'evolution.html').as_uri()}#6", IMAGES / "film.png", 1180, 520)


def _shot(browser: str, url: str, to: Path, width: int, height: int) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2"]
    size = f"--window-size={width},{height}"
    command = [browser, *flags, size, "--virtual-time-budget=3000", f"--screenshot={to}", url]
    subprocess.run(command, capture_output=True, check=True, timeout=120)


def _write_examples() -> None:
    """What each example prints, below its first line."""
    sys.path.insert(0, str(EXAMPLES))
    page = [HEAD]
    with Engine("smollm2-135m", num_slots=8192) as engine:
        for name in names_in_order():
            module = importlib.import_module(name)
            engine.reset_cache()
            with redirect_stdout(io.StringIO()) as printed:
                module.main(engine)
            title = name.replace("_", " ").capitalize()
            said = (module.__doc__ or "").strip()
            page.append(f"## {title}\n\n{said}\n[`{name}.py`](../examples/{name}.py)\n")
            page.append(f"```text\n{printed.getvalue()}```\n")
    (DOCS / "examples.md").write_text("\n".join(page), encoding="utf-8")


def names_in_order() -> list[str]:
    """The examples as `python examples` plays them."""
    listed = re.search(r"EXAMPLES = \[(.*?)\]", (EXAMPLES / "__main__.py").read_text(encoding="utf-8"), re.DOTALL)
    assert listed is not None
    return re.findall(r"\w+", listed[1])


if __name__ == "__main__":
    main()

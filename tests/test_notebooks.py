"""The notebooks run on the demo model from the first cell to the last, and show what they are for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EXPECTED = {
    "evolution": ["prefix hits: 40 of 55 prompt tokens, 73%", "slots were evicted", 'class="evictable"', "srcdoc="],
    "forks": ['<span class="role">assistant</span>', "branch 2", "sampled, p = ", "prefix hits: 219 of 227"],
    "objects": ["Person(name='Marie Curie', born=1867, profession='physicist')", 'class="t forced"', "writes up to"],
    "rewind": ['class="t cached"', "French", "The capital of France is Paris"],
    "vote": ["('20', ", "7 more samples", "prefix hits: "],
}


def executed(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the client, about its own sockets
        NotebookClient(notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
    return notebook


def shown(notebook: nbformat.NotebookNode) -> str:
    """All that the cells printed and displayed."""
    said = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            said.append("".join(output.get("text", "")))
            said += ["".join(data) for kind, data in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(said)


def test_notebooks_are_stored_without_output() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(EXPECTED)
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_is_for(demo_model: Path, path: Path, tmp_path: Path) -> None:
    notebook = executed(path)
    said = shown(notebook)
    for text in EXPECTED[path.stem]:
        assert text in said
    assert not any(output.get("name") == "stderr" for cell in notebook.cells for output in cell.get("outputs", ()))
    if path.stem == "evolution":
        a_browser_shows(notebook, tmp_path)


PROBE = """<script>
window.errors=[];addEventListener("error",e=>errors.push(e.message));
addEventListener("load",()=>{
 const film=document.querySelector("iframe").contentDocument,play=film.getElementById("play");play.click();
 setTimeout(()=>{document.title=JSON.stringify({errors,
  nodes:[...document.querySelectorAll(".bw-tree svg")].map(svg=>svg.querySelectorAll("rect").length),
  hover:document.querySelectorAll(".bw-tree svg title").length,
  tokens:document.querySelectorAll(".bw-state .t[title]").length,
  at:+film.getElementById("time").value,chapters:film.getElementById("chapters").children.length})},3000)});
</script>"""


def a_browser_shows(notebook: nbformat.NotebookNode, tmp_path: Path) -> None:
    """The page that nbconvert makes: no error, a box for each node, hover text, and a film that plays."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        page, _ = HTMLExporter().from_notebook_node(notebook)
    page = re.sub(r'<script src="http[^>]*></script>', "", page)  # of formulas, which there are none of
    file = tmp_path / "evolution.html"
    file.write_text(page.replace("<title>", PROBE + "<title>", 1), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *flags, "--virtual-time-budget=8000", "--dump-dom", file.as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    title = re.search(r"<title>(\{.*?\})</title>", found)
    assert title, found[:2000]
    seen = json.loads(title[1])
    assert seen["errors"] == []
    assert len(seen["nodes"]) == 9
    assert seen["nodes"][0] == 1
    assert seen["nodes"][-1] > 5
    assert seen["hover"] == sum(seen["nodes"])
    assert seen["tokens"] > 10
    assert seen["at"] > 0
    assert seen["chapters"] == 8

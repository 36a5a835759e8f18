"""The tree as a picture and a film: every node is there, no text becomes markup, recording leaves nothing behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from branchwise.runtime import Engine
from branchwise.runtime.film import MOST_FRAMES, Film
from branchwise.runtime.picture import VISIBLE, Box, TreePicture

HOSTILE = "\x00\x1b</script><script>alert(1)</script><!--\"'&\u2028"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, num_slots=512) as engine:
        yield engine
        engine.check()


def say(engine: Engine, prompt: str, **options: Any) -> None:
    engine.generate(prompt, **{"temperature": 0, "max_tokens": 4, "ignore_eos": True, **options})


def frames_of(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script id="frames" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    frames: list[dict[str, Any]] = json.loads(found[1])
    return frames


def box(key: str, parent: str | None, text: str) -> Box:
    return Box(key, parent, text, 3, "evictable" if parent else "root")


def test_the_picture_has_every_node(engine: Engine) -> None:
    for prompt in ("The river runs", "The river is deep", HOSTILE):
        say(engine, prompt, n=2, temperature=1, seed=1)
    tree = engine.tree
    nodes = engine._ask(lambda scheduler: [len(node) for node in scheduler.tree.nodes()])
    assert len(nodes) > 4
    assert sorted(nodes) == sorted(box.num_tokens for box in tree.boxes if box.parent is not None)
    assert len({box.key for box in tree.boxes}) == len(tree.boxes)
    groups = ET.fromstring(tree.svg()).findall(f"{SVG}g")
    assert [group.findtext(f"{SVG}title") for group in groups] == [
        box.hover.translate(VISIBLE) for box in tree.joined().boxes
    ]


def test_an_empty_cache_is_a_root_that_stays_the_same_box(engine: Engine) -> None:
    (root,) = engine.tree.boxes
    ET.fromstring(engine.tree.svg())
    say(engine, "The river runs")
    assert engine.tree.boxes[0] == root


def test_boxes_do_not_overlap(engine: Engine) -> None:
    for prompt in ("The river runs", "The river is deep", "The mill", "To be, or not to be"):
        say(engine, prompt, n=3, temperature=1, seed=1)
    places = list(engine.tree.places().values())
    for i, a in enumerate(places):
        for b in places[:i]:
            assert a.y != b.y or a.x + a.width <= b.x or b.x + b.width <= a.x


def test_a_box_keeps_its_name_when_its_parent_is_split(engine: Engine) -> None:
    say(engine, "The river runs past the old mill")
    before = {box.key for box in engine.tree.boxes}
    say(engine, "The river is deep")
    assert before <= {box.key for box in engine.tree.boxes}


def test_chains_that_are_used_alike_are_joined_and_nothing_of_them_is_lost(engine: Engine) -> None:
    for prompt in ("The river runs past", "The river is deep"):
        for _ in range(2):
            say(engine, prompt)
    tree = engine.tree
    joined = tree.joined()
    assert len(joined.boxes) < len(tree.boxes)
    assert joined.summary.split(" tokens")[0] == tree.summary.split(" tokens")[0]
    keys = {box.key: box for box in joined.boxes}
    assert all(box.parent is None or box.parent in keys for box in joined.boxes)
    assert "".join(box.text for box in joined.boxes) == "".join(box.text for box in tree.boxes)
    parents = [box.parent for box in joined.boxes]
    only = [box for box in joined.boxes if box.num_tokens == 1 and parents.count(box.parent) == 1]
    assert all(keys[box.parent or ""].num_tokens > 1 for box in only)


def test_what_was_evicted_to_host_memory_and_disk_is_counted(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, num_slots=64, host_cache_bytes=1 << 16, disk_cache_bytes=1 << 20,
                disk_cache_path=tmp_path) as small:  # fmt: skip
        assert "evicted" not in small.tree.summary
        for number in range(12):
            say(small, f"{number} runs past the old mill, and under the bridge, and nobody knows")
        tree = small.tree
        assert tree.host_tokens > 0
        assert f"of those evicted, {tree.host_tokens} in host memory" in tree.summary
        assert tree.host_tokens + tree.disk_tokens <= small.stats.spilled_tokens


def test_hostile_text_is_no_markup_in_a_picture() -> None:
    picture = TreePicture((box("r", None, HOSTILE), box("a", "r", HOSTILE)), 10, 4)
    svg = ET.fromstring(picture.svg())
    assert {e.tag.removeprefix(SVG) for e in svg.iter()} == {"svg", "style", "path", "g", "title", "rect", "text"}
    assert "<script" not in picture._repr_html_()


def film_of(*pictures: TreePicture) -> Film:
    film = Film(lambda _: None, lambda _: None)
    for number, picture in enumerate(pictures):
        film.chapter(f"{number} {HOSTILE}")
        film.add(picture)
    return film


def test_a_films_page_needs_nothing_else_and_hostile_text_stays_text() -> None:
    first = TreePicture((box("r", None, "root"), box("a", "r", HOSTILE)), 10, 4)
    second = TreePicture((box("r", None, "root"), box("b", "r", "/*FRAMES*/")), 10, 4)
    page = film_of(first, second).html()
    assert page.count("<script") == page.count("</script>") == 2
    assert not re.search(r"""(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page)
    frames = frames_of(page)
    assert frames[0]["chapter"] == f"0 {HOSTILE}"
    assert HOSTILE in frames[0]["boxes"]["a"][5]
    assert frames[1]["boxes"]["a"] is None  # gone
    assert "r" not in frames[1]["boxes"]  # as before


def test_frames_are_halved_when_there_are_too_many_and_chapters_stay() -> None:
    pictures = [TreePicture((box("r", None, "root"),), 10_000, free) for free in range(MOST_FRAMES + 1)]
    film = Film(lambda _: None, lambda _: None)
    for number, picture in enumerate(pictures):
        film.chapter("late" if number >= MOST_FRAMES - 1 else "early")
        film.add(picture)
    assert len(film.frames) <= MOST_FRAMES // 2 + 2
    assert {frame.chapter for frame in film.frames} == {"early", "late"}


def test_recording_ends_with_its_block_also_by_an_error(engine: Engine) -> None:
    with engine.record() as film:
        say(engine, "The river runs")
    assert len(film.frames) >= 3
    assert film.frames[-1].picture == engine.tree
    count = len(film.frames)
    with pytest.raises(ZeroDivisionError), engine.record():
        raise ZeroDivisionError
    assert engine._loop.watchers == []
    say(engine, "The mill")
    assert len(film.frames) == count


def test_two_films_at_once_record_the_same(engine: Engine) -> None:
    with engine.record() as outer, engine.record() as inner:
        say(engine, "The river runs")
    assert [f.picture for f in inner.frames] == [f.picture for f in outer.frames]


PROBE = """<script>
window.errors=[];addEventListener("error",e=>errors.push(e.message));
console.error=(...said)=>errors.push(said.join(" "));
addEventListener("load",()=>{document.getElementById("play").click();
 setTimeout(()=>{const time=document.getElementById("time"),at=time.value;time.value=time.max;
  time.dispatchEvent(new Event("input"));
  document.title=JSON.stringify({errors,at,boxes:document.querySelectorAll("#stage svg>g>g").length,
   title:document.querySelector("#stage g g title").textContent,
   note:document.getElementById("note").textContent})},3000)});
</script>"""


@pytest.mark.slow
def test_a_browser_plays_the_film(engine: Engine, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs a Chromium on the PATH")
    with engine.record() as film:
        say(engine, "The river runs")
        film.chapter("Another", "It splits the edge.")
        say(engine, "The river is deep")
    page = tmp_path / "film.html"
    page.write_text(film.html().replace("<title>", PROBE + "<title>", 1), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *flags, "--virtual-time-budget=8000", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search(r"<title>(\{.*?\})</title>", shown)
    assert title, shown[:2000]
    seen = json.loads(title[1])
    assert seen["errors"] == []
    assert int(seen["at"]) > 0
    assert seen["boxes"] == len(film.frames[-1].picture.joined().boxes)
    assert seen["title"] == "root"
    assert seen["note"] == "It splits the edge."

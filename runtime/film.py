"""The tree over time: a picture after each step that changed it, and one page that plays them."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .film_page import PAGE
from .picture import STYLE, TreePicture, curve

MOST_FRAMES = 1200
"""If there are more, every second one that begins no chapter is left out."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The tree after a step: seconds since the film began, the chapter it belongs to, and a sentence about that."""

    at_s: float
    chapter: str
    note: str
    picture: TreePicture


class Film:
    """Records between `with engine.record() as film:` and its end. `film.chapter("...")` names what follows."""

    def __init__(self, begin: Callable[[Film], None], end: Callable[[Film], None]) -> None:
        """For engines. `begin` has `add` called with each picture from then on, until `end`."""
        self._frames: list[Frame] = []
        self._chapter, self._note = "", ""
        self._started = time.monotonic()
        self._begin, self._end = begin, end

    def __enter__(self) -> Film:
        self._begin(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._end(self)

    def __repr__(self) -> str:
        return f"<Film of {len(self._frames)} frames, {len(self._chapters())} chapters>"

    @property
    def frames(self) -> list[Frame]:
        """All of them, in order."""
        return list(self._frames)

    def chapter(self, name: str, note: str = "") -> None:
        """What is recorded from here on belongs to `name`; `note` is a sentence that stands below it."""
        self._chapter, self._note = name, note

    def add(self, picture: TreePicture) -> None:
        """One more frame, unless nothing is to be seen in it that was not in the last one."""
        last = self._frames[-1] if self._frames else None
        if last is not None and last.picture == picture and last.chapter == self._chapter:
            return
        self._frames.append(Frame(time.monotonic() - self._started, self._chapter, self._note, picture))
        if len(self._frames) > MOST_FRAMES:
            starts = set(self._chapters())
            self._frames = [f for i, f in enumerate(self._frames) if i % 2 == 0 or i in starts]

    def html(self) -> str:
        """The page: plays by itself, steps, scrubs; needs nothing but a browser."""
        frames = json.dumps(_differences([_as_data(frame) for frame in self._frames]), separators=(",", ":"))
        data = frames.replace("&", "\\u0026").replace("<", "\\u003c").replace("\u2028", "\\u2028")
        return PAGE.replace("/*STYLE*/", STYLE).replace("/*FRAMES*/", data)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file."""
        target = Path(path).expanduser()
        target.write_text(self.html(), encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        page = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:520px;border:0" title="The radix tree"></iframe>'

    def _chapters(self) -> list[int]:
        """The frames at which one begins."""
        names = [frame.chapter for frame in self._frames]
        return [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


def _as_data(frame: Frame) -> dict[str, Any]:
    """A frame for the page: each box with its place, its words and the line that leads to it."""
    drawn = frame.picture.joined()
    places = drawn.places()
    boxes = {}
    for box in drawn.boxes:
        at = places[box.key]
        line = curve(places[box.parent], at) if box.parent is not None else ""
        boxes[box.key] = [at.x, at.y, at.width, at.label, box.kept_by, box.hover, box.num_tokens, line]
    said, slots = frame.picture.summary, frame.picture.num_slots
    return {
        "at": round(frame.at_s, 3), "chapter": frame.chapter, "note": frame.note, "said": said, "slots": slots,
        "boxes": boxes,
    }  # fmt: skip


def _differences(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each frame's boxes only where they differ from those before; None is one that is gone."""
    before: dict[str, Any] = {}
    changed = []
    for frame in frames:
        boxes = frame["boxes"]
        gone = {key: None for key in before if key not in boxes}
        changed.append({**frame, "boxes": {**gone, **{k: v for k, v in boxes.items() if before.get(k) != v}}})
        before = boxes
    return changed

"""A state for the terminal: turns, forks as a tree, and each token in the colour of where it came from."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import Box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.panel import Panel
from rich.segment import Segment
from rich.text import Text
from rich.tree import Tree

from ..transcript import Transcript
from .page import ORIGINS, summary
from .spans import Deeper, Fork, Plain, Role, Story, Written, tell

STYLES = {"cached": "blue", "computed": "yellow", "forced": "magenta", "sampled": "green", "chosen": "cyan"}
"""Of the sixteen colours that a terminal has in its own light or dark shades."""

BAR = Box("▌   \n▌   \n▌   \n▌   \n▌   \n▌   \n▌   \n▌   \n")
MOST_VALUE = 200  # characters of a variable's value that are shown


def as_rich(transcript: Transcript) -> RenderableType:
    """All that is written by now, done or not; waits for nothing."""
    story = tell(transcript)
    legend = Text.assemble(*((f"■ {origin}  ", STYLES[origin]) for origin in ORIGINS))
    return Group(*_blocks(story), Text(summary(story), "dim"), Coloured(legend))


class Coloured:
    """What has a meaning by its colours alone: nothing, where there are none."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.color_system is not None and not console.no_color:
            yield self._inner


class Tail:
    """The last lines of something that grows, as many as a terminal has room for: what is newest is what is seen."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._inner, options, pad=False)[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()


def _blocks(story: Story) -> list[RenderableType]:
    """The story top to bottom: text, turns as panels, forks as trees."""
    told, turn, role = list[RenderableType](), list[RenderableType](), ""
    into = told
    for span in story.spans:
        match span:
            case Role(name):
                if into is turn and turn:
                    told.append(_turn(role, turn))
                turn = []
                into, role = (told, "") if name is None else (turn, name)
            case Plain(parts):
                for text, origin in parts:
                    _line(into).append(text, STYLES.get(origin or "", ""))
            case Written():
                _write(span, into)
            case Fork(branches):
                into.append(_fork(branches))
            case Deeper(count):
                into.append(Text(f"{count} more branches, too deep to show", "dim"))
    if into is turn and turn:
        told.append(_turn(role, turn))
    for name, value in story.values.items():
        shown = value if len(value) <= MOST_VALUE else f"{value[: MOST_VALUE - 1]}…"
        told.append(Text.assemble((name, "bold"), " = ", shown))
    return [_trimmed(block) for block in told]


def _line(into: list[RenderableType]) -> Text:
    """The text at the end of `into`, to write on."""
    if into and isinstance(into[-1], Text):
        return into[-1]
    into.append(Text())
    assert isinstance(into[-1], Text)
    return into[-1]


def _write(call: Written, into: list[RenderableType]) -> None:
    line = _line(into)
    mark = {"running": "…", "failed": "✗"}.get(call.state, "")
    line.append(f"‹{call.name or 'gen'}{mark}›", "red" if call.state == "failed" else "dim")
    for piece in call.pieces:
        line.append(piece.text, STYLES.get(piece.origin or "", ""))
    if call.state == "failed":
        into.append(Text(call.note, "red"))
    for number, text in enumerate(call.others, 2):
        into.append(Text.assemble((f"  sample {number}: ", "dim"), (text, STYLES["sampled"])))
    if call.others:
        into.append(Text())


def _turn(role: str, blocks: Sequence[RenderableType]) -> Panel:
    inner = Group(*(_trimmed(block) for block in blocks))
    return Panel(inner, box=BAR, title=f"[bold]{escape(role)}[/]", title_align="left", border_style="dim")


def _fork(branches: Sequence[Story]) -> Tree:
    tree = Tree(Text(f"fork of {len(branches)}", "dim"), guide_style="dim")
    for number, branch in enumerate(branches):
        blocks = _blocks(branch) or [Text()]
        first = blocks[0]
        if isinstance(first, Text):
            blocks[0] = Text.assemble((f"{number} ", "bold"), first)
        else:
            blocks.insert(0, Text(str(number), "bold"))
        tree.add(Group(*blocks))
    return tree


def _trimmed(block: RenderableType) -> RenderableType:
    """Without the newlines at its ends: blocks stand below each other as they are."""
    if not isinstance(block, Text):
        return block
    start = len(block.plain) - len(block.plain.lstrip("\n"))
    end = len(block.plain.rstrip("\n"))
    return block[start : max(start, end)] if block.plain else block

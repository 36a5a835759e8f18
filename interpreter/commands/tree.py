"""`branchwise tree`: the cache over nine moments, in the terminal and as a film."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from branchwise.runtime.picture import LEGEND, TreePicture
from branchwise.runtime.stats import Stats

from ..local import Engine
from ..show.terminal_tree import KEPT, tree_as_rich
from .moments import NUM_SLOTS, moments_of
from .opening import open_engine


def run(options: Namespace) -> int:
    console = Console(highlight=False)
    with open_engine(Engine, options.model, num_slots=NUM_SLOTS) as engine:
        film = engine.record()
        before, last = engine.stats, engine.tree
        for number, moment in enumerate(moments_of(), 1):
            film.chapter(f"{number}  {moment.title}", moment.says)
            with film:
                moment.happens(engine)
            _print(console, f"{number}  {moment.title}. ", moment.says, engine.tree, last, engine.stats.since(before))
            before, last = engine.stats, engine.tree
    console.print(Text.assemble(*((f"■ {said}  ", KEPT[kept]) for kept, said in LEGEND.items())))
    if options.film:
        console.print(f"{film.save(options.film)}: {len(film.frames)} frames. Open it in a browser.", style="bold")
    return 0


def _print(console: Console, title: str, says: str, tree: TreePicture, last: TreePicture, spent: Stats) -> None:
    console.print(Text.assemble((title, "bold"), says))
    console.print(Padding(tree_as_rich(tree, last), (0, 3), expand=False))
    facts = [spent.hits] if spent.requests else []
    facts += [f"{spent.evicted_slots} slots evicted"] if spent.evicted_slots else []
    facts += [f"{tree.free_slots} of {tree.num_slots} free"]
    console.print(Padding(Text(" · ".join(facts), "dim"), (0, 3, 1, 3), expand=False))

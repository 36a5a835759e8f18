"""One of several texts, as a tree of their bytes: nothing is compiled, so there may be thousands.

A place is a node: what the texts below it have in common so far. Which tokens may come next is found
when a sequence is there, by going down the tree as far as some token's spelling reaches. A node from
which the vocabulary cannot spell its way to the end of a text is *stuck*, and no token leads there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import torch

from ..errors import ConstraintError
from ..messages import shown
from .automaton import MAX_ROWS_BYTES, Row, Walk, row_of
from .vocab import Vocab

MAX_NODES = 200_000
"""More would take too long to go down at the root, which is done between two steps of the engine."""

BYTES_PER_NODE = 300


def compile_choices(texts: tuple[str, ...], vocab: Vocab) -> ChoicesConstraint:
    """A constraint to one of `texts`.

    Raises:
        ConstraintError: there are none, too many, or one that `vocab` cannot spell.
    """
    if not texts:
        raise ConstraintError("there are no choices to choose from.")
    for text in texts:
        if not vocab.can_spell(text):
            raise ConstraintError(f"this vocabulary cannot spell the choice {shown(text)}.")
    return ChoicesConstraint(texts, vocab)


class ChoicesConstraint:
    """The tree of the texts, with the rows of the nodes that were visited."""

    exact = True
    warnings: tuple[str, ...] = ()
    first = 0

    def __init__(self, texts: Iterable[str], vocab: Vocab) -> None:
        self.vocab = vocab
        self._children: list[dict[int, int]] = [{}]  # of each node, by the next byte; children have higher numbers
        self._ends: set[int] = set()
        choices = set(texts)
        for text in choices:
            self._ends.add(self._add(text.encode(), len(choices)))
        self._stuck = self._find_stuck()
        self._rows: dict[int, Row] = {}
        self.ended = row_of(torch.zeros(vocab.size, dtype=torch.bool), vocab, is_complete=True)
        self.row(self.first)  # the largest one: not on the engine's time

    @property
    def nbytes(self) -> int:
        """About how much memory this holds, rows included."""
        return len(self._children) * BYTES_PER_NODE + len(self._rows) * self.vocab.size

    def start(self) -> Walk:
        return Walk(self, self.first)

    def violation(self, text: str) -> str:
        return ""

    def next(self, place: int, token: int) -> int | None:
        spelled = self.vocab.token_bytes[token]
        if not spelled:
            return None
        for byte in spelled:
            following = self._children[place].get(byte)
            if following is None:
                return None
            place = following
        return None if place in self._stuck else place

    def row(self, place: int) -> Row:
        if (row := self._rows.get(place)) is None:
            if (len(self._rows) + 1) * self.vocab.size > MAX_ROWS_BYTES:
                self._rows.clear()
            mask = torch.zeros(self.vocab.size, dtype=torch.bool)
            mask[[t for spelled, node in self._steps(place) if node not in self._stuck for t in spelled]] = True
            row = self._rows[place] = row_of(mask, self.vocab, is_complete=place in self._ends)
        return row

    def _add(self, data: bytes, num_choices: int) -> int:
        """The node of `data`, made if it must be."""
        node = 0
        for byte in data:
            if byte not in self._children[node]:
                if len(self._children) > MAX_NODES:
                    raise ConstraintError(
                        f"the {num_choices} choices are too large: they have more than {MAX_NODES} bytes, shared "
                        "beginnings counted once. Give fewer or shorter ones, or compare them in groups with "
                        "select(), or score()."
                    )
                self._children[node][byte] = len(self._children)
                self._children.append({})
            node = self._children[node][byte]
        return node

    def _steps(self, place: int) -> Iterator[tuple[list[int], int]]:
        """The nodes that one token leads to from `place`, with the ids of its spelling."""
        spellings, in_order = self.vocab.spellings, self.vocab.spellings_in_order
        waiting = [(b"", place)]
        while waiting:
            so_far, node = waiting.pop()
            for byte, child in self._children[node].items():
                spelled = so_far + bytes((byte,))
                if spelled in spellings:
                    yield spellings[spelled], child
                at = bisect_left(in_order, spelled)
                if at < len(in_order) and in_order[at].startswith(spelled):
                    waiting.append((spelled, child))

    def _find_stuck(self) -> frozenset[int]:
        """The nodes from which no tokens lead to the end of a text."""
        used = {byte for children in self._children for byte in children}
        if all(bytes((byte,)) in self.vocab.spellings for byte in used):
            return frozenset()
        stuck: set[int] = set()
        for node in reversed(range(len(self._children))):
            if node not in self._ends and all(following in stuck for _, following in self._steps(node)):
                stuck.add(node)
        return frozenset(stuck)

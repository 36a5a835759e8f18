import random
from array import array

import pytest

from branchwise.runtime.layout import NO_SLOT, Wanted, build_layout
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import RadixTree

from .trees import random_step


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_every_new_token_is_one_row_that_attends_to_its_whole_path(seed: int, page_size: int) -> None:
    tree, sequences, layout = random_step(random.Random(seed), page_size=page_size)
    fresh = sum(node.fresh for node in tree.fresh_nodes())
    assert layout.num_written == fresh == len({slot for slot in layout.write_slots if slot != NO_SLOT})
    row_path: dict[int, list[int]] = {}
    for segment in layout.segments:
        path = [slot for span in segment.path for slot in span.slots]
        for i in range(segment.num_rows):
            end = len(path) - segment.num_rows + i + 1
            row_path[segment.first_row + i] = path[:end]
    assert sorted(row_path) == list(range(len(layout.tokens)))
    for row, path in row_path.items():
        assert layout.positions[row] == len(path) - 1
        assert layout.write_slots[row] in (NO_SLOT, path[-1])
    for (tokens, node), index in zip(sequences, layout.logit_of, strict=True):
        row = layout.logit_rows[index]
        assert row_path[row] == [slot for n in node.path() for slot in n.slots[: len(n)]]
        assert layout.tokens[row] == tokens[-1]


def test_a_token_that_is_cached_already_is_computed_once_for_all_who_want_its_logits_and_written_by_none() -> None:
    tree = RadixTree(SlotPool(16))
    node, _ = tree.append(tree.lock(tree.match(array("i"))), array("i", [5, 6, 7]))
    tree.commit()
    layout = build_layout([], [Wanted(node, 2, 2), Wanted(node, 2, 2)])
    assert list(layout.tokens) == [7]
    assert list(layout.write_slots) == [NO_SLOT]
    assert list(layout.logit_of) == [0, 0]
    assert [list(span.slots) for span in layout.segments[0].path] == [[0, 1, 2]]

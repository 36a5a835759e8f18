import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchwise.runtime.errors import OutOfSlots
from branchwise.runtime.slots import SlotPool


def test_allocating_more_than_is_free_takes_nothing() -> None:
    pool = SlotPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfSlots, match="needs 2 slots, 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_sequence_grows_in_place_beside_others() -> None:
    pool = SlotPool(4096)
    sequences = [list(pool.allocate(8)) for _ in range(8)]
    for _ in range(64):
        for slots in sequences:
            slots += pool.allocate(1, after=slots[-1])
    assert all(slots == list(range(slots[0], slots[0] + 72)) for slots in sequences)


def test_freed_neighbours_are_one_run_again() -> None:
    pool = SlotPool(64)
    parts = [pool.allocate(16) for _ in range(4)]
    for part in parts:
        pool.free(part)
    assert list(pool.allocate(64)) == list(range(64))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), max_size=60), st.randoms(use_true_random=False)
)
def test_every_slot_is_free_or_allocated_once(moves: list[tuple[int, bool, bool]], rng: random.Random) -> None:
    pool, held = SlotPool(48), list[list[int]]()
    for count, give_back, grow in moves:
        if give_back and held:
            pool.free(held.pop(rng.randrange(len(held))))
        elif count <= pool.num_free:
            after = held[-1][-1] if grow and held else None
            taken = list(pool.allocate(count, after=after))
            assert len(taken) == count
            held.append(taken)
        pool.check()
        flat = [slot for part in held for slot in part]
        assert len(flat) == len(set(flat))
        assert pool.free_slots() == set(range(48)) - set(flat)

"""Prefixes that leave the pool and come back: to host memory, to disk, and through a file to another process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from branchwise.runtime import CacheError, Engine, EngineError, RequestError
from branchwise.runtime.attention import AttnSpec
from branchwise.runtime.errors import OutOfSlots
from branchwise.runtime.kv import KVPool
from branchwise.runtime.request import Request
from branchwise.runtime.saved import weights_fingerprint
from branchwise.runtime.scheduler import Scheduler, StuckRequest
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tiers import ABANDONED_AFTER_S, FILE_BYTES, FOLDER_PREFIX, MOST_UNWRITTEN, DiskTier, Tiers
from branchwise.runtime.transfers import DirectTransfers
from branchwise.runtime.tree import Node, RadixTree

from ..conftest import MakeTiny

SPECS = [
    AttnSpec(num_q_heads=6, num_kv_heads=heads, head_dim=size, scale=1.0, window=None, softcap=None)
    for heads, size in ((2, 4), (1, 8), (3, 2))
]


def kv_pool(num_slots: int, page_size: int = 1) -> KVPool:
    return KVPool(num_slots, SPECS, torch.float32, torch.device("cpu"), page_size)


def page_bytes(pool: KVPool) -> int:
    return pool.page_width * pool.dtype.itemsize


def greedy(engine: Engine, prompt: list[int], count: int = 8, **params: Any) -> tuple[int, ...]:
    return engine.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True, **params).tokens


def hits(engine: Engine, prompt: list[int], **params: Any) -> int:
    return engine.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True, **params).hit_tokens


def sequence(seed: int, length: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 390 for i in range(length)]


# --------------------------------------------------------------------------------- the tiers against what was computed


def computed(namespace: object, tokens: array[int]) -> float:
    """Stands for the keys and values of the last of `tokens`: another number for every prefix and namespace."""
    digest = blake2b(repr(namespace).encode() + tokens.tobytes(), digest_size=3).digest()
    return float(int.from_bytes(digest, "little") % (1 << 20))


def compute(pool: KVPool, namespace: object, tokens: array[int], slots: array[int], first: int) -> None:
    """What a forward pass does: fill the slots of tokens[first:]."""
    for i in range(first, len(tokens)):
        for layer, (k, v) in enumerate(zip(pool.k, pool.v, strict=True)):
            k[slots[i]] = computed(namespace, tokens[: i + 1]) + layer
            v[slots[i]] = -computed(namespace, tokens[: i + 1]) - layer


class LateTransfers(DirectTransfers):
    """As to a GPU: what was downloaded is there when it was waited for, and not before."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._late: list[tuple[Tensor, Tensor]] = []

    def download(self, values: Tensor, into: Tensor) -> None:
        into.fill_(-1.0)
        self._late.append((values.clone(), into))

    def wait(self) -> None:
        for values, into in self._late:
            into.copy_(values)
        self._late.clear()


class TiersAgainstComputing(RuleBasedStateMachine):
    """Sequences of a tree far too small for them: wherever a prefix comes from, its slots must hold its own numbers."""

    @initialize(page_size=st.sampled_from([1, 2]), host=st.integers(0, 10), disk=st.integers(0, 20), late=st.booleans())
    def begin(self, page_size: int, host: int, disk: int, late: bool) -> None:
        self.base = Path(tempfile.mkdtemp())
        self.pool = kv_pool(10, page_size)
        if late:
            self.pool.transfers = LateTransfers()
        self.tree = RadixTree(SlotPool(10, page_size))
        size = page_bytes(self.pool)
        self.disk = DiskTier(self.base, disk * (size + FILE_BYTES)) if disk else None
        self.tiers = Tiers(self.pool, (host if disk else max(1, host)) * size, self.disk)
        self.tree.on_evict = self.tiers.spill
        self.held: list[Node] = []

    @rule(
        namespace=st.sampled_from([None, "salt"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda pages: array("i", pages * 2)),
        hold=st.booleans(),
    )
    def run(self, namespace: str | None, tokens: array[int], hold: bool) -> None:
        tree, size = self.tree, self.tree.page_size
        tokens = tokens[: len(tokens) // size * size]
        found = tree.match(tokens, tree.root(namespace))
        node, start = tree.lock(found), found.length
        try:
            rows = self.tiers.fetch(namespace, tokens[:start], tokens[start:])
            assert len(rows) * size <= len(tokens) - start
            if len(rows):
                back = tokens[start : start + len(rows) * size]
                node = tree.insert(node, back, lambda slots: self.tiers.restore(slots, rows))
                start += len(back)
            if start < len(tokens):
                node, _ = tree.append(node, tokens[start:])
        except OutOfSlots:
            tree.unlock(node)
            return
        slots = array("i", [slot for n in node.path() for slot in n.slots])
        compute(self.pool, namespace, tokens, slots, start)
        tree.commit()
        for i, slot in enumerate(slots):
            for layer, (k, v) in enumerate(zip(self.pool.k, self.pool.v, strict=True)):
                assert (k[slot] == computed(namespace, tokens[: i + 1]) + layer).all(), (tokens, i, start)
                assert (v[slot] == -computed(namespace, tokens[: i + 1]) - layer).all(), (tokens, i, start)
        if hold:
            self.held.append(node)
        else:
            tree.unlock(node)

    @rule(count=st.integers(1, 10))
    def evict(self, count: int) -> None:
        self.tree.evict(count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.tree.unlock(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.disk)
    @rule(data=st.data(), how=st.sampled_from(["missing", "short", "other bytes", "other file", "empty"]))
    def tear(self, data: st.DataObject, how: str) -> None:
        assert self.disk is not None
        self.disk.flush()
        files = sorted(self.disk.folder.iterdir())
        if files:
            tear(data.draw(st.sampled_from(files)), how)

    @rule()
    def forget(self) -> None:
        self.tree.reset()
        self.tiers.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.tree.check()
        self.tiers.check()
        if self.disk is not None:
            self.disk.flush()
            assert sum(file.stat().st_size for file in self.disk.folder.iterdir()) <= self.disk.num_bytes

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.close()
            self.tiers.close()
            assert not list(self.base.iterdir())
            self.base.rmdir()


def tear(file: Path, how: str) -> None:
    """Spoil a file in place."""
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "other file":
        save_file({"kv": torch.zeros(1, 2)}, file)
    else:
        data[-4:] = b"torn"
        file.write_bytes(data if how == "other bytes" else data[: len(data) // 2] if how == "short" else b"")


TestTiers = TiersAgainstComputing.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def spilled(tiers: Tiers, pool: KVPool, tokens: array[int]) -> None:
    """Let `tokens`, which begin a conversation, go to the tiers."""
    slots = array("i", range(len(tokens)))
    compute(pool, None, tokens, slots, 0)
    tiers.spill(None, array("i"), tokens, slots)


def found(tiers: Tiers, tokens: array[int]) -> int:
    return len(tiers.fetch(None, array("i"), tokens))


def numbers(start: int, count: int) -> array[int]:
    return array("i", range(start, start + count))


def test_when_host_memory_is_full_the_least_recently_used_goes_first_and_a_sequence_from_its_end() -> None:
    pool = kv_pool(16)
    tiers = Tiers(pool, 10 * page_bytes(pool))
    spilled(tiers, pool, numbers(100, 4))
    spilled(tiers, pool, numbers(200, 4))
    assert found(tiers, numbers(100, 4)) == 4  # used again
    spilled(tiers, pool, numbers(300, 4))
    assert [found(tiers, numbers(start, 4)) for start in (200, 100, 300)] == [2, 4, 4]
    spilled(tiers, pool, numbers(400, 16))  # more than there is room for
    assert found(tiers, numbers(400, 16)) == 10
    tiers.check()


def test_what_came_back_is_not_copied_again_when_it_is_evicted_again() -> None:
    pool = kv_pool(16)
    tiers = Tiers(pool, 16 * page_bytes(pool))
    spilled(tiers, pool, numbers(0, 8))
    spilled(tiers, pool, numbers(0, 10))
    assert tiers.spilled_tokens == 10


def disk_tiers(folder: Path, pool: KVPool) -> tuple[DiskTier, Tiers]:
    """Three files of 16 pages at most, and a fourth part of the budget in memory, on its way to disk."""
    disk = DiskTier(folder, 64 * page_bytes(pool))
    return disk, Tiers(pool, 0, disk)


def test_what_is_over_the_budget_of_the_disk_is_unlinked_oldest_first_and_all_at_close(tmp_path: Path) -> None:
    pool = kv_pool(16)
    disk, tiers = disk_tiers(tmp_path, pool)
    for start in range(0, 1600, 16):
        spilled(tiers, pool, numbers(start, 16))
        disk.flush()
        assert sum(file.stat().st_size for file in disk.folder.iterdir()) <= disk.num_bytes
    assert found(tiers, numbers(0, 16)) == 0
    assert found(tiers, numbers(1584, 16)) == found(tiers, numbers(1568, 16)) == 16
    assert len(list(disk.folder.iterdir())) > 1
    tiers.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["missing", "short", "other bytes", "other file", "empty"])
def test_a_torn_file_is_a_miss_and_is_forgotten(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = kv_pool(16)
    disk, tiers = disk_tiers(tmp_path, pool)
    spilled(tiers, pool, numbers(0, 16))
    spilled(tiers, pool, numbers(100, 16))
    spilled(tiers, pool, numbers(200, 16))
    disk.flush()
    assert found(tiers, numbers(0, 16)) == 16
    for file in disk.folder.iterdir():
        tear(file, how)
    with caplog.at_level(logging.WARNING):
        assert found(tiers, numbers(0, 16)) < 16
    assert "cannot be read; what it held is computed again" in caplog.text
    tiers.check()
    tiers.close()


def test_a_disk_that_cannot_be_written_to_makes_misses_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = kv_pool(16)
    disk, tiers = disk_tiers(tmp_path, pool)
    disk.folder.rmdir()
    with caplog.at_level(logging.WARNING):
        for start in range(0, 160, 16):
            spilled(tiers, pool, numbers(start, 16))
        disk.flush()
        assert found(tiers, numbers(0, 16)) == 0
    tiers.check()
    tiers.close()


def test_a_disk_that_is_behind_holds_up_nobody(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 1 << 20)
    stuck, reached = threading.Event(), threading.Event()
    disk._jobs.put(lambda: (reached.set(), stuck.wait(30), None)[-1])
    assert reached.wait(10)
    rows = torch.arange(8.0).reshape(1, 8)
    for i in range(100):
        disk.add([(None, bytes([i]))], rows + i)
    assert [i for i in range(100) if (None, bytes([i])) in disk] == list(range(MOST_UNWRITTEN))
    into = torch.empty(1, 8)
    assert disk.read([(None, b"\5")], into=into, at=[0]) == 1  # not written yet, but there
    assert torch.equal(into, rows + 5)
    stuck.set()
    disk.flush()
    assert disk.read([(None, b"\5")], into=into, at=[0]) == 1
    assert torch.equal(into, rows + 5)
    disk.close()


def test_a_folder_that_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, young, other = (tmp_path / name for name in (f"{FOLDER_PREFIX}a", f"{FOLDER_PREFIX}b", "mine"))
    for folder in (old, young, other):
        folder.mkdir()
        (folder / "0.safetensors").touch()
    for folder in (old, other):
        os.utime(folder, (time.time() - ABANDONED_AFTER_S - 60,) * 2)
    DiskTier(tmp_path, 1000).close()
    assert sorted(tmp_path.iterdir()) == [young, other]


# ------------------------------------------------------------------------------------------------ in the scheduler


class Stocked:
    """Tiers that have every token from `first` on up to `last`, whatever it is."""

    def __init__(self, first: int, last: int = 1000) -> None:
        self.first, self.last = first, last
        self.asked: list[tuple[int, int]] = []

    def fetch(self, namespace: object, before: array[int], tokens: array[int]) -> Tensor:
        self.asked.append((len(before), len(tokens)))
        return torch.empty(min(len(tokens), self.last - len(before)) if len(before) >= self.first else 0, 1)

    def restore(self, slots: array[int], rows: Tensor) -> None:
        assert len(slots) == len(rows)


def scheduler(stocked: Stocked, num_slots: int) -> Scheduler:
    tree = RadixTree(SlotPool(num_slots))
    return Scheduler(tree, max_step_tokens=64, max_running=8, tiers=cast(Tiers, stocked))


def request(tokens: list[int]) -> Request:
    return Request(tokens=array("i", tokens), num_prompt=len(tokens), max_tokens=4, on_done=lambda _: None)


def test_nothing_is_restored_below_tokens_that_the_step_may_still_fail_to_compute() -> None:
    stocked = Stocked(first=5)
    sched = scheduler(stocked, 64)
    sched.add([request([1, 2, 3, 4, 5]), request([1, 2, 3, 4, 5, 6, 7, 8])])
    plan = sched.plan()
    assert plan is not None
    assert list(plan.layout.tokens) == [1, 2, 3, 4, 5, 6, 7, 8]
    sched.undo(plan)
    sched.tree.check()
    assert sched.tree.pool.num_free == 64


def test_restoring_takes_no_more_than_the_request_needs_and_never_the_path_it_just_matched() -> None:
    stocked = Stocked(first=4)
    sched = scheduler(stocked, 12)
    tree = sched.tree
    for tokens in ([1, 2, 3, 4], [9] * 8):  # the second was used later: the first would be evicted first
        node = tree.lock(tree.match(array("i", tokens)))
        tree.append(node, array("i", tokens))
        tree.commit()
        for leaf in list(tree.nodes()):
            while leaf.lock:
                tree.unlock(leaf)
    asking = request([1, 2, 3, 4, 5, 6, 7])
    sched.add([asking])
    plan = sched.plan()
    assert stocked.asked == [(4, 3)]
    assert asking.hit_len == 6
    assert plan is not None
    assert plan.layout.num_written == 0
    assert tree.match(array("i", [9] * 8)).length == 5
    tree.check()


def test_what_follows_a_restored_prefix_is_computed_once() -> None:
    sched = scheduler(Stocked(first=0, last=5), 12)
    sched.add([request([1, 2, 3, 4, 5, 6, 7])])
    plan = sched.plan()
    assert plan is not None
    assert list(plan.layout.tokens) == [6, 7]
    sched.tree.commit()
    assert [list(node.tokens) for node in sched.tree.nodes()] == [[1, 2, 3, 4, 5, 6, 7]]


def test_restoring_takes_no_slot_that_is_pinned() -> None:
    sched = scheduler(Stocked(first=0), 12)
    tree = sched.tree
    node = tree.lock(tree.match(array("i")))
    node, _ = tree.append(node, array("i", [9] * 8))
    tree.commit()
    tree.pin(tree.match(array("i", [9] * 8)))
    tree.unlock(node)
    sched.add([request([1, 2, 3, 4, 5, 6, 7])])
    with pytest.raises(StuckRequest):
        sched.plan()
    assert tree.match(array("i", [1, 2, 3, 4, 5])).length == 4
    assert tree.match(array("i", [9] * 8)).length == 8
    tree.check()


# --------------------------------------------------------------------------------------------------- in the engine


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_evicted_prompt_comes_back_as_hits(tier: str, page_size: int, tiny_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"host_cache_bytes": 1 << 20}
    if tier == "disk":
        options = {"disk_cache_bytes": 600_000, "disk_cache_path": tmp_path}
    prompts = [sequence(seed, 200) for seed in range(4)]
    with Engine(tiny_model, num_slots=256, page_size=page_size) as plain:
        answers = [greedy(plain, prompt) for prompt in prompts]
    with Engine(tiny_model, num_slots=256, page_size=page_size, **options) as engine:
        for _ in range(2):
            assert [greedy(engine, prompt) for prompt in prompts] == answers
        stats = engine.stats
        assert stats.restored_tokens == 4 * (200 if page_size == 1 else 192)
        assert stats.hit_tokens == 4 * (199 if page_size == 1 else 192)
        assert stats.spilled_tokens >= 4 * 192
        engine.check()
        assert bool(list(tmp_path.glob("*/*.safetensors"))) == (tier == "disk")
        assert engine.reset_cache() > 0
        assert [hits(engine, prompt) for prompt in prompts] == [0] * 4  # forgotten in every tier
    assert not list(tmp_path.iterdir())


def test_a_step_that_fails_after_restoring_is_done_again_with_the_same_answer(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=256, host_cache_bytes=1 << 20) as engine:
        prompt = sequence(1, 100)
        answer = greedy(engine, prompt)
        greedy(engine, sequence(2, 240))
        forward, failures = engine.model.forward, iter([True])

        def failing(step: Any) -> Tensor:
            if next(failures, False):
                raise RuntimeError("the device is on fire")
            return forward(step)

        engine.model.forward = failing  # type: ignore[method-assign]  # a saboteur in its place
        assert greedy(engine, [*prompt, *answer[:4]], 4) == answer[4:]
        assert engine.stats.restored_tokens >= 99
        engine.check()


def test_a_salt_finds_only_its_own_in_the_tiers(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=128, host_cache_bytes=1 << 20) as engine:
        prompt = sequence(1, 100)
        greedy(engine, prompt, cache_salt="a")
        greedy(engine, sequence(2, 110))
        assert hits(engine, prompt) == 0
        greedy(engine, sequence(2, 110))
        assert hits(engine, prompt, cache_salt="b") == 0
        assert hits(engine, prompt, cache_salt="a") == 99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_cache_bytes": -1}, "Engine: host_cache_bytes must be 0 or a number of bytes, got -1."),
        ({"disk_cache_bytes": 1.5}, "Engine: disk_cache_bytes must be 0 or a number of bytes, got 1.5."),
        (
            {"disk_cache_bytes": 9},
            "Engine: disk_cache_bytes (9) and disk_cache_path (None) go together: give both, or neither.",
        ),
        (
            {"host_cache_bytes": 100},
            "Engine: host_cache_bytes must be at least 512, what one page takes, got 100. 0 is off.",
        ),
        (
            {"disk_cache_bytes": 600, "disk_cache_path": "new"},
            "Engine: disk_cache_bytes must be at least 768, what one page takes, got 600. 0 is off.",
        ),
    ],
)
def test_a_budget_that_cannot_be_is_refused(
    options: dict[str, Any], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    if "disk_cache_path" in options:
        options = {**options, "disk_cache_path": tmp_path / "new"}
    with pytest.raises(RequestError) as error:
        Engine(tiny_model, num_slots=64, **options)
    assert str(error.value) == message
    assert not list(tmp_path.glob("new/*"))


def test_a_disk_that_cannot_be_used_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"^Engine: disk_cache_path '.*file' cannot be used: "):
        Engine(tiny_model, num_slots=64, disk_cache_bytes=10000, disk_cache_path=tmp_path / "file")


# --------------------------------------------------------------------------------------------------- saved caches


@pytest.fixture
def saved(tiny_model: Path, tmp_path: Path) -> Path:
    """The cache of an engine that answered three prompts, the second of them last."""
    path = tmp_path / "cache.safetensors"
    with Engine(tiny_model, num_slots=1024) as engine:
        for seed in (1, 2, 3, 2):
            greedy(engine, sequence(seed, 100))
        assert engine.save_cache(path) == 3 * 107
    return path


def test_a_restarted_process_answers_the_first_request_of_a_saved_prefix_with_its_tokens_as_hits(
    tiny_model: Path, tmp_path: Path
) -> None:
    prefix, path = sequence(5, 2000), tmp_path / "cache.safetensors"
    with Engine(tiny_model, num_slots=2500) as engine:
        answer = greedy(engine, prefix, 16)
        engine.reset_cache()
        greedy(engine, prefix, 1)
        assert engine.save_cache(path) == 2000
    script = f"""
        import json
        from branchwise import Engine
        with Engine({str(tiny_model)!r}, num_slots=2500, dtype="float32") as engine:
            engine.load_cache({str(path)!r})
            result = engine.generate({prefix!r}, max_tokens=16, temperature=0, ignore_eos=True)
            print(json.dumps([result.hit_tokens, result.tokens, engine.stats.computed_tokens]))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [1999, list(answer), 15]


def test_a_loaded_tree_has_the_shape_of_the_saved_one(tiny_model: Path, tmp_path: Path) -> None:
    def shape(engine: Engine) -> object:
        def below(node: Node) -> object:
            return sorted((list(child.tokens), child.sealed, below(child)) for child in node.children.values())

        return engine._ask(lambda s: [(name, below(s.tree.root(name))) for name in (None, "salt")])

    path = tmp_path / "cache.safetensors"
    with Engine(tiny_model, num_slots=1024) as engine, Engine(tiny_model, num_slots=1024) as other:
        for prompt, salt in (([5, 6, 7, 8], None), ([5, 6, 9, 9], None), ([5, 6], "salt"), ([5, 6, 7, 8, 1, 1], None)):
            engine.generate(prompt, n=3, max_tokens=6, temperature=1.0, seed=3, ignore_eos=True, cache_salt=salt)
        engine.save_cache(path)
        assert other.load_cache(path) == engine.stats.evictable_slots > 40
        assert shape(other) == shape(engine)
        assert other.load_cache(path) == 0
        assert shape(other) == shape(engine)
        assert hits(other, [5, 6], cache_salt="other") == 0
        other.check()


def test_what_is_evicted_first_after_loading_is_what_was_used_least_recently(tiny_model: Path, saved: Path) -> None:
    with Engine(tiny_model, num_slots=322) as engine:
        engine.load_cache(saved)
        greedy(engine, sequence(9, 200), 1)
        assert [hits(engine, sequence(seed, 100)) for seed in (2, 1)] == [99, 0]


def test_loading_adds_the_most_recently_used_while_slots_are_free_and_evicts_nothing(
    tiny_model: Path, saved: Path
) -> None:
    with Engine(tiny_model, num_slots=260) as engine:
        mine, theirs = sequence(7, 60), sequence(2, 100)
        greedy(engine, mine, 1)
        greedy(engine, theirs[:40], 1)  # a part of what is in the file
        before = slots_of(engine, mine) + slots_of(engine, theirs[:40])
        assert engine.load_cache(saved) == 160  # what was free
        assert engine.stats.evicted_slots == engine.stats.free_slots == 0
        assert slots_of(engine, mine) + slots_of(engine, theirs[:40]) == before
        engine.check()
        lengths = [len(slots_of(engine, sequence(seed, 100))) for seed in (2, 3, 1)]
        assert lengths == [100, 260 - 60 - 107, 0]
        with Engine(tiny_model, num_slots=1024) as plain:
            for seed in (2, 3):
                assert greedy(engine, sequence(seed, 100)) == greedy(plain, sequence(seed, 100))


def test_a_prefix_that_many_share_takes_its_slots_once_when_loaded(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, num_slots=200) as engine:
        for seed in (1, 2, 3):
            greedy(engine, sequence(0, 60) + sequence(seed, 20), 1)
        assert engine.save_cache(tmp_path / "cache") == 120
    with Engine(tiny_model, num_slots=120) as engine:
        assert engine.load_cache(tmp_path / "cache") == 120


def slots_of(engine: Engine, tokens: list[int]) -> list[int]:
    def look(scheduler: Scheduler) -> list[int]:
        found = scheduler.tree.match(array("i", tokens))
        return [slot for node in found.node.path() for slot in node.slots][: found.length]

    return engine._ask(look)


def test_a_cache_can_be_saved_and_loaded_while_requests_run(tiny_model: Path, saved: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, num_slots=700) as plain:
        answer = greedy(plain, sequence(2, 100), 300)
    with Engine(tiny_model, num_slots=700) as engine:
        results: list[tuple[int, ...]] = []
        thread = threading.Thread(target=lambda: results.append(greedy(engine, sequence(2, 100), 300)))
        thread.start()
        while engine.stats.generated_tokens < 3:
            time.sleep(0.001)
        engine.load_cache(saved)
        engine.save_cache(tmp_path / "other.safetensors")
        thread.join()
        engine.check()
        assert results == [answer]


@pytest.fixture
def other_engine(request: pytest.FixtureRequest, make_tiny: MakeTiny) -> Iterator[Engine]:
    kind, options = request.param
    with Engine(make_tiny(kind), num_slots=256, **options) as engine:
        greedy(engine, [5, 6, 7])
        yield engine


@pytest.mark.parametrize(
    ("other_engine", "differing"),
    [
        (("qwen3", {}), r"weights \([0-9a-f]{64} there, [0-9a-f]{64} here\)"),
        (("gpt2", {}), r"weights \(.*\), kv_shapes \(2 layers of 2 x 16 there, 2 layers of 4 x 16 here\)"),
        (("llama", {"dtype": "bfloat16"}), r"dtype \(float32 there, bfloat16 here\)"),
        (("llama", {"page_size": 16}), r"page_size \(1 there, 16 here\)"),
    ],
    indirect=["other_engine"],
)
def test_another_models_cache_is_refused_and_changes_nothing(
    other_engine: Engine, differing: str, saved: Path
) -> None:
    before = other_engine.render_tree()
    with pytest.raises(
        CacheError, match=rf"was saved by an engine that differs in {differing}\. Nothing was loaded; save a cache"
    ):
        other_engine.load_cache(saved)
    assert other_engine.render_tree() == before


def test_another_version_and_another_tokenizer_are_refused(tiny_model: Path, saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a file is no dict
    with Engine(tiny_model, num_slots=256) as engine:
        for name, here in (("version", "1"), ("tokenizer", engine.tokenizer.fingerprint)):
            save_file(tensors, saved, {**metadata, name: "other"})
            with pytest.raises(CacheError, match=rf"differs in {name} \(other there, {here} here\)"):
                engine.load_cache(saved)


SPOILT = {
    "missing": (None, r"cannot be read: .*It is missing, torn, or no saved cache"),
    "empty": (lambda data: b"", "cannot be read"),
    "text": (lambda data: b"once upon a time there was a file of text", "cannot be read"),
    "header only": (lambda data: data[:3000], "cannot be read"),
    "one byte short": (lambda data: data[:-1], "cannot be read"),
    "one bit": (lambda data: data[:-777] + bytes([data[-777] ^ 1]) + data[-776:], "is torn: its bytes are not those"),
    "a hole": (lambda data: data[:-5000] + bytes(4000) + data[-1000:], "is torn: its bytes are not those"),
    "another salt": (lambda data: data.replace(b"[null]", rb"[\"\"]"), "is torn: its bytes are not those"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_file_is_refused_and_changes_nothing(how: str, tiny_model: Path, saved: Path) -> None:
    spoil, message = SPOILT[how]
    data = saved.read_bytes()
    saved.unlink()
    if spoil is not None:
        assert spoil(data) != data
        saved.write_bytes(spoil(data))
    with Engine(tiny_model, num_slots=512) as engine:
        greedy(engine, [5, 6, 7])
        before = engine.render_tree()
        with pytest.raises(CacheError, match=message):
            engine.load_cache(saved)
        assert engine.render_tree() == before
        engine.check()


def test_another_safetensors_file_is_refused(tiny_model: Path) -> None:
    with (
        Engine(tiny_model, num_slots=64) as engine,
        pytest.raises(CacheError, match=r"model\.safetensors' is a safetensors file, but not a saved cache\."),
    ):
        engine.load_cache(tiny_model / "model.safetensors")


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tiny_model: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("branchwise.runtime.saved.save_file", half)
    data = saved.read_bytes()
    with Engine(tiny_model, num_slots=64) as engine:
        with pytest.raises(CacheError, match=r"cannot be written: \[Errno 28\] No space left on device"):
            engine.save_cache(saved)
        with pytest.raises(CacheError, match="cannot be written"):
            engine.save_cache(saved / "in a file")
    assert saved.read_bytes() == data
    assert list(saved.parent.iterdir()) == [saved]


def test_an_empty_cache_can_be_saved_and_loaded(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, num_slots=64) as engine:
        assert engine.save_cache(tmp_path / "cache") == 0
        assert engine.load_cache(tmp_path / "cache") == 0
        engine.check()


def test_the_fingerprint_sees_other_weights_of_the_same_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = torch.zeros(1_000_000)
    seen = set()
    for index in (None, 0, 500_000, 999_999):
        changed = weights.clone()
        if index is not None:
            changed[max(0, index - 10_000) : index + 10_000] += 1
        save_file({"w": changed}, tmp_path / "model.safetensors")
        seen.add(weights_fingerprint(tmp_path))
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    seen.add(weights_fingerprint(tmp_path))
    assert len(seen) == 5

"""Where evicted prefixes go, and come back from: host memory, and from there files on a disk.

The unit is a page: the keys and values of its tokens in every layer, one row of bytes. It is known by its namespace
and a hash of all tokens up to its end, so it is found again whatever became of the tree. Knows no tree and no request.
A page that cannot be brought back is computed again: nothing here is ever missed, it only saves time.

Only the engine's thread calls this; one more thread writes files, so that no step waits for a disk.
"""

from __future__ import annotations

import logging
import queue
import shutil
import tempfile
import threading
import time
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, takewhile
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import EngineConfig
from .devices import gib
from .errors import EngineError, RequestError
from .kv import KVPool

log = logging.getLogger("branchwise")

Key: TypeAlias = tuple[Hashable, bytes]

PIECE_BYTES = 8 << 20
"""Pages move in pieces of about that size; a file holds one."""

FILE_BYTES = 256
"""More than a file needs beside its rows."""

MOST_UNWRITTEN = 16
"""When that many files wait to be written, what would be the next is forgotten: no step waits for a disk."""

ABANDONED_AFTER_S = 24 * 3600.0
"""A folder that a process left behind when it was killed is removed when nothing has changed in it for so long."""

FOLDER_PREFIX = "branchwise-evicted-"


def page_keys(namespace: Hashable, before: array[int], tokens: array[int], page_size: int) -> Iterator[Key]:
    """What the pages of `tokens` that follow `before` are known by. One that is not full has no key."""
    state = blake2b(before, digest_size=16)
    for start in range(0, len(tokens) - page_size + 1, page_size):
        state.update(tokens[start : start + page_size])
        yield namespace, state.digest()


class Tiers:
    """Evicted pages, least recently used first; each row of host memory is free or holds one page.

    A page stays here when it is brought back, so it need not be copied again when it is next evicted.
    """

    def __init__(self, pool: KVPool, host_bytes: int, disk: DiskTier | None = None) -> None:
        """With a disk, host memory holds at least one piece, which is on its way there.

        Raises:
            RequestError: a budget holds not even one page.
        """
        self.spilled_tokens = 0
        self.restored_tokens = 0
        self._pool = pool
        self._disk = disk
        page_bytes = pool.page_width * pool.dtype.itemsize
        self._piece = max(1, PIECE_BYTES // page_bytes)
        if disk is not None:
            self._piece = max(1, min(self._piece, disk.num_bytes // 4 // page_bytes))
            _check_budget("disk_cache_bytes", disk.num_bytes, page_bytes + FILE_BYTES)
        if host_bytes or disk is None:
            _check_budget("host_cache_bytes", host_bytes, page_bytes)
        num_rows = max(host_bytes // page_bytes, self._piece if disk is not None else 1)
        self._piece = min(self._piece, num_rows)
        self._rows = _host_memory(pool, num_rows)
        self._free = list(range(num_rows))
        self._host: OrderedDict[Key, int] = OrderedDict()  # -> its row

    def __contains__(self, key: Key) -> bool:
        return key in self._host or (self._disk is not None and key in self._disk)

    @property
    def held(self) -> tuple[int, int]:
        """Tokens that are kept in host memory, and on disk."""
        size = self._pool.page_size
        return len(self._host) * size, (len(self._disk) if self._disk is not None else 0) * size

    def spill(self, namespace: Hashable, before: array[int], tokens: array[int], slots: array[int]) -> None:
        """Keep the pages of `tokens`, which follow `before` and lie in `slots`; the last of them are dropped first."""
        pool = self._pool
        size, new = pool.page_size, list[tuple[Key, int]]()
        for page, key in reversed(list(enumerate(page_keys(namespace, before, tokens, size)))):
            if key in self._host:
                self._host.move_to_end(key)
            else:
                new.append((key, page))
        if self._disk is None:
            new = new[-len(self._rows) :]
        for start in range(0, len(new), self._piece):
            piece = new[start : start + self._piece]
            taken = array("i", [slot for _, page in piece for slot in slots[page * size : (page + 1) * size]])
            try:
                rows = pool.gather(taken)
            except torch.OutOfMemoryError:
                log.warning("no memory on the device to copy %d evicted tokens from; they are forgotten", len(taken))
                return
            self._make_room(len(piece))
            places, self._free = self._free[: len(piece)], self._free[len(piece) :]
            for first, place, count in _runs(places):
                pool.transfers.download(rows[first : first + count], self._rows[place : place + count])
            self._host.update(zip((key for key, _ in piece), places, strict=True))
            self.spilled_tokens += len(taken)

    def fetch(self, namespace: Hashable, before: array[int], tokens: array[int]) -> Tensor:
        """Copies of the leading pages of `tokens` that are here, on the device: [pages, page_width]."""
        keys: list[Key] = []
        if self._host or self._disk:
            keys += takewhile(self.__contains__, page_keys(namespace, before, tokens, self._pool.page_size))
        in_host = [i for i, key in enumerate(keys) if key in self._host]
        on_disk = [i for i, key in enumerate(keys) if key not in self._host]
        transfers = self._pool.transfers
        rows = transfers.empty(len(keys), self._pool.page_width, dtype=self._pool.dtype)
        if in_host:
            transfers.wait()
            rows[in_host] = self._rows[[self._host[keys[i]] for i in in_host]]
        for i in reversed(in_host):
            self._host.move_to_end(keys[i])
        if self._disk is not None and on_disk:
            count = self._disk.read([keys[i] for i in on_disk], into=rows, at=on_disk)
            rows = rows[: on_disk[count]] if count < len(on_disk) else rows
        try:
            return transfers.upload(rows)
        except torch.OutOfMemoryError:
            log.warning("no memory on the device to bring %d pages back to; they are computed again", len(rows))
            return rows[:0]

    def restore(self, slots: array[int], rows: Tensor) -> None:
        """Put pages that `fetch` gave into `slots` of the pool."""
        self._pool.scatter(slots, rows)
        self.restored_tokens += len(slots)

    def clear(self) -> None:
        """Forget all pages."""
        self._free += self._host.values()
        self._host.clear()
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        """Remove all files."""
        if self._disk is not None:
            self._disk.close()

    def check(self) -> None:
        """Assert the invariant of the class."""
        assert sorted([*self._free, *self._host.values()]) == list(range(len(self._rows))), "a row is lost or shared"
        if self._disk is not None:
            self._disk.check()

    def _make_room(self, count: int) -> None:
        """Free rows for `count` pages, a piece at most; the least recently used go to the disk, or are dropped."""
        if count <= len(self._free):
            return
        missing = count - len(self._free)
        keys = list(islice(self._host, self._piece if self._disk is not None else missing))
        places = [self._host.pop(key) for key in keys]
        self._free += places
        if self._disk is not None:
            new = [(key, place) for key, place in zip(keys, places, strict=True) if not self._disk.touch(key)]
            if new:
                self._pool.transfers.wait()
                self._disk.add([key for key, _ in new], self._rows[[place for _, place in new]])


def _host_memory(pool: KVPool, num_rows: int) -> Tensor:
    """For so many pages; beside a GPU it is pinned, so that pages are copied there while steps go on."""
    try:
        return pool.transfers.empty(num_rows, pool.page_width, dtype=pool.dtype)
    except RuntimeError as error:  # what torch raises where there is none
        wanted = gib(num_rows * pool.page_width * pool.dtype.itemsize)
        raise EngineError(
            f"Engine: there is no host memory for {wanted} of evicted keys and values. Lower host_cache_bytes."
        ) from error


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive places: the index of the first, that place, and how many there are."""
    first = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield first, places[first], i - first
            first = i


@dataclass(eq=False, slots=True)
class PageFile:
    """Pages in one file. `rows` are theirs until the file is written; then `checksums` are."""

    path: Path
    keys: list[Key]
    num_bytes: int
    rows: Tensor | None
    checksums: list[int] = field(default_factory=list)


class _Torn(Exception):
    """A file does not hold what was written to it."""


class DiskTier:
    """Files of pages that take at most `num_bytes`, least recently used first; a page is in one file only."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """The files are in a new folder inside `folder`, which is made if it is missing.

        Raises:
            EngineError: it cannot be written to.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder)
            self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=folder))
        except OSError as error:
            raise EngineError(f"Engine: disk_cache_path {str(folder)!r} cannot be used: {error}") from error
        self.num_bytes = num_bytes
        self._used = 0
        self._made = 0
        self._files: OrderedDict[PageFile, None] = OrderedDict()
        self._place: dict[Key, tuple[PageFile, int]] = {}
        self._unwritten: deque[PageFile] = deque()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=_work, args=(self._jobs,), name="branchwise-disk", daemon=True)
        self._writer.start()

    def __contains__(self, key: Key) -> bool:
        return key in self._place

    def __len__(self) -> int:
        """Pages."""
        return len(self._place)

    def touch(self, key: Key) -> bool:
        """Whether the page is here; if so, it was used just now."""
        if key not in self._place:
            return False
        self._files.move_to_end(self._place[key][0])
        return True

    def add(self, keys: list[Key], rows: Tensor) -> None:
        """Write pages that are not here yet to a file, some time soon, unless they do not fit or the disk is behind.

        Args:
            rows: [len(keys), page_width], the tier's from now on.
        """
        while self._unwritten and self._unwritten[0].rows is None:
            self._unwritten.popleft()
        size = rows.nbytes + FILE_BYTES
        if size > self.num_bytes or len(self._unwritten) >= MOST_UNWRITTEN:
            return
        while self._used + size > self.num_bytes:
            self._drop(next(iter(self._files)))
        file = PageFile(self.folder / f"{self._made}.safetensors", keys, size, rows)
        self._made += 1
        self._used += size
        self._files[file] = None
        self._place |= {key: (file, i) for i, key in enumerate(keys)}
        self._unwritten.append(file)
        self._jobs.put(lambda: _write(file))

    def read(self, keys: Sequence[Key], *, into: Tensor, at: Sequence[int]) -> int:
        """Copy pages that are here to rows `at` of `into`; returns how many of the first of them could be read."""
        wanted: dict[PageFile, list[int]] = {}
        for i, key in enumerate(keys):
            wanted.setdefault(self._place[key][0], []).append(i)
        good = len(keys)
        for file, indices in wanted.items():
            try:
                into[[at[i] for i in indices]] = _read(file, [self._place[keys[i]][1] for i in indices], into)
            except (OSError, SafetensorError, _Torn) as error:
                log.warning("%s cannot be read; what it held is computed again: %s", file.path, error)
                good = min(good, indices[0])
                self._drop(file)
            else:
                self._files.move_to_end(file)
        return good

    def clear(self) -> None:
        """Remove all files."""
        for file in list(self._files):
            self._drop(file)

    def flush(self) -> None:
        """Wait until all files are written."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def close(self) -> None:
        """End the writer and remove the folder. Twice is fine."""
        self._jobs.put(None)
        self._writer.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def check(self) -> None:
        """Assert the invariant of the class."""
        assert self._used == sum(file.num_bytes for file in self._files) <= self.num_bytes, "bytes are miscounted"
        assert len(self._place) == sum(len(file.keys) for file in self._files), "a page is in two files, or lost"

    def _drop(self, file: PageFile) -> None:
        del self._files[file]
        self._used -= file.num_bytes
        for key in file.keys:
            del self._place[key]
        self._jobs.put(lambda: file.path.unlink(missing_ok=True))  # after it is written


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except OSError as error:
            log.warning("an evicted prefix is not on disk: %s", error)


def _write(file: PageFile) -> None:
    """Write a file. If that fails it is torn or missing, which is found when it is read."""
    assert file.rows is not None, f"{file.path} is written twice"
    file.checksums = [_checksum(row) for row in file.rows]
    try:
        save_file({"kv": file.rows}, file.path)
    except SafetensorError as error:
        log.warning("%s cannot be written: %s", file.path, error)
    finally:
        file.rows = None


def _read(file: PageFile, places: list[int], like: Tensor) -> Tensor:
    """Some rows of a file, as wide and of the kind of `like`.

    Raises:
        OSError, SafetensorError, _Torn: the file is not what was written.
    """
    rows = file.rows
    if rows is not None:
        return rows[places]
    first, end = min(places), max(places) + 1
    with safe_open(file.path, framework="pt") as opened:
        part = opened.get_slice("kv")[first:end]
    if part.shape != (end - first, like.shape[1]) or part.dtype != like.dtype:
        raise _Torn(f"it holds {part.dtype} of shape {tuple(part.shape)}")
    found: Tensor = part[[place - first for place in places]]
    if [_checksum(row) for row in found] != [file.checksums[place] for place in places]:
        raise _Torn("its bytes have changed")
    return found


def _checksum(row: Tensor) -> int:
    return zlib.crc32(row.view(torch.uint8).numpy().data)


def _remove_abandoned(folder: Path) -> None:
    for old in folder.glob(f"{FOLDER_PREFIX}*"):
        if old.stat().st_mtime < time.time() - ABANDONED_AFTER_S:
            shutil.rmtree(old, ignore_errors=True)


def _check_budget(name: str, num_bytes: int, least: int) -> None:
    if num_bytes < least:
        raise RequestError(f"Engine: {name} must be at least {least}, what one page takes, got {num_bytes}. 0 is off.")


def open_tiers(config: EngineConfig, pool: KVPool) -> Tiers | None:
    """The tiers that an engine is asked for, if any.

    Raises:
        RequestError, EngineError: a budget is too small, or the disk cannot be used; nothing was started.
    """
    if not config.disk_cache_bytes:
        return Tiers(pool, config.host_cache_bytes) if config.host_cache_bytes else None
    assert config.disk_cache_path is not None, "the configuration is checked"
    disk = DiskTier(Path(config.disk_cache_path).expanduser(), config.disk_cache_bytes)
    try:
        return Tiers(pool, config.host_cache_bytes, disk)
    except RequestError:
        disk.close()
        raise

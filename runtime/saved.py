"""A cache in one file: the tree's tokens, their keys and values, and whose they are.

A file is loaded only where the same tokens would give the same keys and values; otherwise the error names what differs.
`copy_tree` and `merge` touch the tree and run on the engine's thread; writing and reading files does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import CacheError
from .kv import KVPool
from .tree import Node, RadixTree, Root

if TYPE_CHECKING:
    from .attention import AttnSpec

FORMAT = "branchwise cache"
VERSION = "1"

COPIED_TOGETHER = 1024
"""Pages copied from the pool at a time, so that a device needs no second pool."""

NUM_BLOCKS, BLOCK_BYTES = 64, 4096
"""How much of the data of each weight file its fingerprint reads."""


@dataclass(frozen=True, slots=True)
class SavedTree:
    """A tree and what is in its slots, away from both.

    Node i holds the next `nodes[i][1]` of `tokens`, and of `rows`, in the order of the nodes.
    """

    namespaces: list[str | None]
    nodes: list[tuple[int, int, int, int]]  # parent (or -1 - index of its namespace), tokens, last use, sealed
    tokens: array[int]
    rows: Tensor  # [pages, page_width], on the CPU


def weights_fingerprint(folder: Path) -> str:
    """SHA-256 over config.json and, of each weight file, its name, size, header, and 64 blocks of 4 KiB of its data.

    The blocks are spread evenly, the first and the last are among them; small files are read whole. So other weights,
    a finetune of the same ones, and another way to keep them differ. A change that lies between the blocks is not seen.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\n{path.name} {size}\n".encode())
        with path.open("rb") as file:
            start = int.from_bytes(file.read(8), "little") + 8
            file.seek(0)
            digest.update(file.read(min(start, size)))
            room = max(0, size - start - BLOCK_BYTES)
            for i in range(NUM_BLOCKS):
                file.seek(start + room * i // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def fingerprint(
    weights: str,
    tokenizer: str,
    specs: Sequence[AttnSpec],
    dtype: torch.dtype,
    page_size: int,
    *,
    deterministic: bool = False,
) -> dict[str, str]:
    """All that must be equal for a saved cache to be of use, by name.

    A deterministic engine takes only what one has computed; others take both.
    """
    shapes = [(len(list(run)), k, d) for (k, d), run in groupby((s.num_kv_heads, s.head_dim) for s in specs)]
    return {
        "weights": weights,
        "tokenizer": tokenizer,
        "dtype": str(dtype).removeprefix("torch."),
        "page_size": str(page_size),
        "kv_shapes": ", ".join(f"{layers} layers of {k} x {d}" for layers, k, d in shapes),
        **({"arithmetic": "deterministic"} if deterministic else {}),
    }


# ------------------------------------------------------------------------------------------- on the engine's thread


def copy_tree(tree: RadixTree, pool: KVPool) -> SavedTree:
    """A copy of all computed tokens in whole pages, as long as their namespace is None or a string."""
    namespaces: list[str | None] = []
    nodes: list[tuple[int, int, int, int]] = []
    index: dict[Node, int] = {}
    tokens, slots = array("i"), array("i")
    for node in tree.nodes():
        parent = node.parent
        if isinstance(parent, Root):
            if not (parent.namespace is None or isinstance(parent.namespace, str)):
                continue
            if parent.namespace not in namespaces:
                namespaces.append(parent.namespace)
            above = -1 - namespaces.index(parent.namespace)
        elif parent in index:
            above = index[parent]
        else:
            continue
        assert not node.fresh, f"{node!r} is not computed yet"
        index[node] = len(nodes)
        nodes.append((above, len(node), node.last_use, node.sealed))
        tokens += node.tokens
        slots += node.slots
    rows = torch.empty(len(slots) // pool.page_size, pool.page_width, dtype=pool.dtype)
    for start in range(0, len(rows), COPIED_TOGETHER):
        end = min(start + COPIED_TOGETHER, len(rows))
        rows[start:end] = pool.transfers.read(pool.gather(slots[start * pool.page_size : end * pool.page_size]))
    return SavedTree(namespaces, nodes, tokens, rows)


def merge(saved: SavedTree, tree: RadixTree, pool: KVPool) -> int:
    """Add what the tree does not have while slots are free, the most recently used first; returns the tokens added.

    Nothing is evicted. What is added counts as used now, in the order in which it was used before.
    """
    before = tree.pool.num_free
    for path, upto in reversed(_fitting(saved, tree)):
        _add_path(saved, path, upto, tree, pool)
    return before - tree.pool.num_free


@dataclass(frozen=True, slots=True)
class _Path:
    namespace: str | None
    nodes: list[tuple[int, int, int, int]]  # node, its first token in the file, where on the path it begins and ends
    tokens: array[int]


def _fitting(saved: SavedTree, tree: RadixTree) -> list[tuple[_Path, int]]:
    """Which paths fit in the free slots, most recently used first, and up to which token; the last may be cut short."""
    room, chosen, taken = tree.pool.num_free, list[tuple[_Path, int]](), set[int]()
    for path in _paths(saved):
        present, upto = tree.match(path.tokens, tree.root(path.namespace)).length, 0
        for node, _, start, end in path.nodes:
            missing = 0 if node in taken else end - max(start, min(end, present))
            fits = min(missing, room)
            taken.add(node)
            room -= fits
            upto = end - missing + fits
            if fits < missing:
                return [*chosen, (path, upto)]
        chosen.append((path, upto))
    return chosen


def _paths(saved: SavedTree) -> Iterator[_Path]:
    """From each root to each leaf, the most recently used leaf first."""
    starts, start = [], 0
    for _, length, _, _ in saved.nodes:
        starts.append(start)
        start += length
    leaves = set(range(len(saved.nodes))) - {node[0] for node in saved.nodes}
    for leaf in sorted(leaves, key=lambda i: (-saved.nodes[i][2], i)):
        above, node = list[int](), leaf
        while node >= 0:
            above.append(node)
            node = saved.nodes[node][0]
        tokens, places = array("i"), list[tuple[int, int, int, int]]()
        for i in reversed(above):
            length = saved.nodes[i][1]
            places.append((i, starts[i], len(tokens), len(tokens) + length))
            tokens += saved.tokens[starts[i] : starts[i] + length]
        yield _Path(saved.namespaces[-1 - node], places, tokens)


def _add_path(saved: SavedTree, path: _Path, upto: int, tree: RadixTree, pool: KVPool) -> None:
    """Add [0, upto) of a path, node by node, so that it can be evicted as before."""
    found = tree.match(path.tokens[:upto], tree.root(path.namespace))
    node, done, size = tree.lock(found), found.length, pool.page_size
    for i, at, start, end in path.nodes:
        stop = min(end, upto)
        if stop > done:
            rows = saved.rows[(at + done - start) // size : (at + stop - start) // size]
            node = tree.insert(node, path.tokens[done:stop], partial(pool.scatter, rows=rows))
            node.sealed = bool(saved.nodes[i][3]) and stop == end
            done = stop
    tree.unlock(node)


# --------------------------------------------------------------------------------------------------------- the file


def write(saved: SavedTree, path: Path, model: dict[str, str]) -> None:
    """Write a file beside `path`, then rename it, so that `path` is the old file or the new one, never half of one.

    Raises:
        CacheError: it cannot be written.
    """
    namespaces = json.dumps(saved.namespaces)
    tensors = {
        "nodes": torch.tensor(saved.nodes, dtype=torch.int64).reshape(-1, 4),
        "tokens": torch.tensor(saved.tokens, dtype=torch.int32),
        "kv": saved.rows,
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        **model,
        "namespaces": namespaces,
        "checksum": _checksum(tensors, namespaces),
    }
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        os.close(handle)
        save_file(tensors, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise CacheError(f"save_cache: {str(path)!r} cannot be written: {error}") from error


def read(path: Path, model: dict[str, str], vocab_size: int, pool: KVPool) -> SavedTree:
    """Read a file that was written for the same `model`.

    Raises:
        CacheError: it cannot be read, is torn, is something else, or belongs to another model.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            _check_metadata(path, metadata, model)
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in ("nodes", "tokens", "kv")}
    except (OSError, SafetensorError) as error:
        raise CacheError(
            f"load_cache: {str(path)!r} cannot be read: {error}. It is missing, torn, or no saved cache; save it anew."
        ) from error
    kinds = {"nodes": torch.int64, "tokens": torch.int32, "kv": pool.dtype}
    if tensors["nodes"].shape[1:] != (4,) or any(tensors[name].dtype != kind for name, kind in kinds.items()):
        found = ", ".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise CacheError(f"load_cache: {str(path)!r} is not a cache that save_cache wrote: it holds {found}.")
    namespaces = metadata.get("namespaces", "")
    if _checksum(tensors, namespaces) != metadata.get("checksum"):
        raise CacheError(f"load_cache: {str(path)!r} is torn: its bytes are not those that were saved. Save it anew.")
    nodes = [(above, length, used, sealed) for above, length, used, sealed in tensors["nodes"].tolist()]
    saved = SavedTree(_names_in(namespaces), nodes, array("i", tensors["tokens"].tolist()), tensors["kv"])
    if wrong := _what_is_wrong(saved, vocab_size, pool):
        raise CacheError(f"load_cache: {str(path)!r} is not a cache that save_cache wrote: {wrong}.")
    return saved


def _names_in(namespaces: str) -> list[str | None]:
    """Those of a file; none if it holds something else, which the nodes then do not fit."""
    try:
        names: object = json.loads(namespaces)
    except (ValueError, RecursionError):
        return []
    return names if isinstance(names, list) and all(name is None or isinstance(name, str) for name in names) else []


def _check_metadata(path: Path, metadata: dict[str, str], model: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise CacheError(f"load_cache: {str(path)!r} is a safetensors file, but not a saved cache.")
    wanted = {"version": VERSION, **model}
    differing = [
        f"{name} ({metadata.get(name, 'none')} there, {value} here)"
        for name, value in wanted.items()
        if metadata.get(name) != value
    ]
    if differing:
        raise CacheError(
            f"load_cache: {str(path)!r} was saved by an engine that differs in {', '.join(differing)}. "
            "Nothing was loaded; save a cache with this engine."
        )


def _what_is_wrong(saved: SavedTree, vocab_size: int, pool: KVPool) -> str:
    """Why the parts of a file do not fit together; empty if they do."""
    lengths = [length for _, length, _, _ in saved.nodes]
    if any(not -len(saved.namespaces) <= node[0] < i for i, node in enumerate(saved.nodes)):
        return "a node has no parent"
    if any(length < 1 or length % pool.page_size for length in lengths):
        return "a node does not fill its pages"
    total, rows = sum(lengths), saved.rows
    if total != len(saved.tokens) or rows.shape != (total // pool.page_size, pool.page_width):
        return f"{total} tokens in nodes, {len(saved.tokens)} in all, keys and values of shape {tuple(rows.shape)}"
    if rows.dtype != pool.dtype:
        return f"keys and values are {rows.dtype}"
    if any(not 0 <= token < vocab_size for token in saved.tokens):
        return "a token is outside of the vocabulary"
    return ""


def _checksum(tensors: dict[str, Tensor], namespaces: str) -> str:
    value = zlib.crc32(namespaces.encode())
    for name in ("nodes", "tokens", "kv"):
        if tensors[name].numel():
            value = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"

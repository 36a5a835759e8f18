"""Which of several servers has seen the beginning of a text, and which one should get it. Knows no network.

A server's tree keeps tokens; who routes keeps less: for each block of a text's beginning, a hash of all up to its end,
and who got it last. That is exact for equal beginnings, small, and forgotten in the order of use like the tree itself.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

BLOCK = 128
"""Characters; about 30 tokens, which are computed in a step or less."""

MOST_BLOCKS = 1 << 18
"""So many are remembered: beginnings of 32 million characters."""


IMBALANCE = 8
"""So many texts more may run on a server than on the least loaded, for the sake of what it knows."""


class Prefixes(Generic[T]):
    """Beginnings of texts, and which server got them last."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._servers: OrderedDict[bytes, T] = OrderedDict()
        self._blocks: dict[T, int] = {}  # of each server

    def seen(self, text: str) -> dict[T, int]:
        """For each server how many blocks of the beginning of `text` it got last, or got with others behind them."""
        found: dict[T, int] = {}
        for length, key in enumerate(_keys(text), start=1):
            if key not in self._servers:
                break
            found[self._servers[key]] = length
        return found

    def add(self, text: str, server: T) -> None:
        """`server` gets `text`."""
        for key in _keys(text):
            before = self._servers.pop(key, None)
            if before is not None:
                self._blocks[before] -= 1
            self._servers[key] = server
            self._blocks[server] = self._blocks.get(server, 0) + 1
        while len(self._servers) > self._most:
            _, server = self._servers.popitem(last=False)
            self._blocks[server] -= 1

    def forget(self, server: T) -> None:
        """`server` is gone, and what it had with it."""
        for key in [key for key, other in self._servers.items() if other == server]:
            del self._servers[key]
        self._blocks.pop(server, None)

    def size(self, server: T) -> int:
        """Blocks that `server` got last."""
        return self._blocks.get(server, 0)

    def ranked(self, text: str, loads: Mapping[T, int], imbalance: int) -> list[T]:
        """The servers in the order in which they should be asked for `text`.

        First who knows most of it, unless more than `imbalance` texts more run there than where the fewest do: then,
        and where nobody knows it, the least loaded; of those the one that got the fewest beginnings.
        """
        least = min(loads.values(), default=0)
        seen = self.seen(text)

        def order(server: T) -> tuple[int, int, int]:
            known = seen.get(server, 0) if loads[server] - least <= imbalance else 0
            return -known, loads[server], self.size(server)

        return sorted(loads, key=order)


def _keys(text: str) -> Iterator[bytes]:
    """A name for the beginning of `text` up to the end of each of its whole blocks; of a shorter one, for all of it."""
    digest = blake2b(digest_size=16)
    for start in range(0, max(len(text) - BLOCK, 0) + 1, BLOCK):
        digest.update(text[start : start + BLOCK].encode("utf-8", "surrogatepass"))
        yield digest.digest()


def text_of(body: bytes) -> str:
    """What of a request the model will read, in the order in which it does; "" if it is none."""
    try:
        said = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(said, dict):
        return ""
    salt = said.get("cache_salt") or said.get("extra_key") or ""
    for name in ("prompt", "text", "input_ids"):
        if name in said:
            return f"{salt}\0{_flat(said[name])}"
    messages = said.get("messages")
    if not isinstance(messages, list):
        return ""
    turns = [f"{m.get('role')}\0{_flat(m.get('content'))}" for m in messages if isinstance(m, dict)]
    return "\0".join([str(salt), json.dumps(said.get("tools")), *turns])


def _flat(value: Any) -> str:
    """A prompt as one text; of several the first, as the others are likely to begin like it."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return _flat(value[0])
    return value if isinstance(value, str) else json.dumps(value)

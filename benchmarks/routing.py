"""What 64 replicas find in their caches, by how they are chosen: a simulation with the routing code of the cluster.

    python benchmarks/routing.py

No model runs. A replica keeps the blocks of the texts that it computed, and the least recently used go. Blocks that are
not there are computed one request after the other; answers are written side by side, each the slower the more there
are. Requests arrive at random, the same for all. `prefix` is `interpreter/serve/prefixes.py`, as
`interpreter/serve/cluster.py` uses it.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from branchwise.interpreter.serve.prefixes import BLOCK, IMBALANCE, Prefixes

CACHE_BLOCKS = 4_000  # of one replica: 120,000 tokens of 4 characters
BLOCK_S = 0.008       # to compute a block
ANSWER_S = 1.0        # to write an answer alone
SLOWER = 0.08         # by so much for each answer beside it: as measured with the demo model, 32 beside each other
PER_SECOND = 4.0      # requests for each replica


@dataclass
class Replica:
    """A cache of blocks, and how much work there is."""

    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    running: int = 0
    free_at: float = 0.0

    def take(self, blocks: list[int]) -> int:
        """How many blocks of a prompt are found; all are there from then on."""
        found = 0
        while found < len(blocks) and blocks[found] in self.cache:
            found += 1
        for block in blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)
        return found


def few_shot(rng: random.Random, count: int) -> Iterator[str]:
    """2,000 tasks, some asked far more often than others, of 20 blocks each; then a question."""
    weights = [1 / (rank + 1) for rank in range(2_000)]
    for number in range(count):
        (task,) = rng.choices(range(2_000), weights)
        yield f"task {task:<123}" + f"{task:<128}" * 19 + f"question {number}" * 10


def chats(rng: random.Random, count: int) -> Iterator[str]:
    """600 conversations at a time, over one of 8 system prompts, two blocks longer with each turn; some begin anew."""
    open_chats = [(number, number % 8, 0) for number in range(600)]
    for number in range(count):
        at = rng.randrange(len(open_chats))
        chat, system, turns = open_chats[at]
        begins = turns and rng.random() < 0.1
        chat, turns = (number + 1_000, 0) if begins else (chat, turns)
        yield f"system {system:<121}" * 8 + "".join(f"{chat} turn {turn:<240}" for turn in range(turns + 1))
        open_chats[at] = chat, system, turns + 1


Choose = Callable[[str, list[Replica]], list[int]]


def by_turns() -> Choose:
    """One after the other."""
    turn = iter(range(1 << 60))
    return lambda text, replicas: [next(turn) % len(replicas)]


def by_load() -> Choose:
    """Where the fewest run."""
    return lambda text, replicas: [min(range(len(replicas)), key=lambda i: replicas[i].running)]


def by_prefix() -> Choose:
    """As the cluster does."""
    prefixes: Prefixes[int] = Prefixes()

    def choose(text: str, replicas: list[Replica]) -> list[int]:
        loads = {index: replica.running for index, replica in enumerate(replicas)}
        ranked = prefixes.ranked(text, loads, IMBALANCE)
        prefixes.add(text, ranked[0])
        return ranked

    return choose


class Outcome(NamedTuple):
    """The share of blocks found, and the 95th percentiles of seconds to the first token and to the end."""

    found: float
    first_s: float
    end_s: float


def simulate(texts: list[str], choose: Choose, count: int, rng: random.Random) -> Outcome:
    """Requests for `texts`, one after the other at random times."""
    replicas = [Replica() for _ in range(count)]
    ends: list[tuple[float, int]] = []
    found = asked = 0
    now, first_token_s, took = 0.0, list[float](), list[float]()
    for text in texts:
        now += rng.expovariate(PER_SECOND * count)
        while ends and ends[0][0] <= now:
            replicas[heapq.heappop(ends)[1]].running -= 1
        blocks = [hash(text[: end + BLOCK]) for end in range(0, len(text), BLOCK)]
        index = choose(text, replicas)[0]
        replica = replicas[index]
        hits = replica.take(blocks)
        found, asked = found + hits, asked + len(blocks)
        replica.free_at = max(replica.free_at, now) + (len(blocks) - hits) * BLOCK_S
        first_token_s.append(replica.free_at - now)
        answer_s = ANSWER_S * (1 + SLOWER * replica.running)
        took.append(first_token_s[-1] + answer_s)
        replica.running += 1
        heapq.heappush(ends, (replica.free_at + answer_s, index))
    return Outcome(found / asked, *(statistics.quantiles(times, n=20)[-1] for times in (first_token_s, took)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--requests", type=int, default=40_000)
    options = parser.parse_args()
    print("| workload | chosen by | blocks found | first token, p95 s | end, p95 s |")
    print("|---|---|---:|---:|---:|")
    for workload in (few_shot, chats):
        texts = list(workload(random.Random(0), options.requests))
        for name, make in (("turns", by_turns), ("load", by_load), ("prefix", by_prefix)):
            got = simulate(texts, make(), options.replicas, random.Random(1))
            print(f"| {workload.__name__} | {name} | {got.found:.1%} | {got.first_s:.2f} | {got.end_s:.2f} |")


if __name__ == "__main__":
    main()

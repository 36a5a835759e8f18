"""How much of what could be shared each scheduling policy shares, without a model: `python benchmarks/hit_rate.py`.

All jobs of a workload are there at the start, or come as soon as the job they follow is done; the pool
holds a part of their tokens. Tokens that were computed once and need not be again are *hits*. With a
pool for everything and any order, a batch computes each distinct prefix once: the table gives the
hits of each policy as a share of the hits then.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from branchwise.runtime.policies import SCHEDULING
from branchwise.runtime.request import Request
from branchwise.runtime.scheduler import Scheduler
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import RadixTree

VOCAB = 50_000
POOLS: dict[float, tuple[str, ...]] = {0.25: SCHEDULING, 0.1: ("lpm", "fcfs", "dfs-weight")}
"""The pool's slots as a share of a workload's distinct tokens -> the policies that are tried."""
MAX_RUNNING = 16
MAX_STEP_TOKENS = 1024


@dataclass(eq=False, slots=True)
class Job:
    """A prompt, what the model will answer, and the jobs that come then."""

    prompt: list[int]
    answer: list[int]
    then: list[Job] = field(default_factory=list)

    def all(self) -> Iterator[Job]:
        yield self
        for job in self.then:
            yield from job.all()


class Writer:
    """Random text of given lengths; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def text(self, shortest: int, longest: int | None = None) -> list[int]:
        length = self._rng.randint(shortest, longest or shortest)
        return [self._rng.randrange(VOCAB) for _ in range(length)]

    def shuffled(self, jobs: list[Job]) -> list[Job]:
        return self._rng.sample(jobs, len(jobs))

    def number(self, least: int, most: int) -> int:
        return self._rng.randint(least, most)


def multi_turn(writer: Writer) -> list[Job]:
    """96 chats of 4 to 8 turns, below 4 system prompts."""
    systems = [writer.text(200, 400) for _ in range(4)]
    return writer.shuffled([_chat(writer, systems[i % 4], writer.number(4, 8), (20, 120), 40) for i in range(96)])


def few_shot(writer: Writer) -> list[Job]:
    """48 sets of examples, 16 questions to each, in no order."""
    sets = [writer.text(600, 1000) for _ in range(48)]
    return writer.shuffled(
        [Job(examples + writer.text(20, 60), writer.text(8)) for examples in sets for _ in range(16)]
    )


def tree_of_thought(writer: Writer) -> list[Job]:
    """64 problems below one instruction; three thoughts, three after each of them, and again."""
    instruction = writer.text(200)
    return writer.shuffled([_thought(writer, instruction + writer.text(100, 300), depth=3) for _ in range(64)])


def agents(writer: Writer) -> list[Job]:
    """60 episodes of 5 to 12 calls below 3 descriptions of tools; observations are longer than answers."""
    tools = [writer.text(1200, 1800) for _ in range(3)]
    return writer.shuffled([_chat(writer, tools[i % 3], writer.number(5, 12), (60, 300), 24) for i in range(60)])


def _chat(writer: Writer, before: list[int], turns: int, asked: tuple[int, int], answered: int) -> Job:
    first = job = Job(before + writer.text(*asked), writer.text(answered))
    for _ in range(turns - 1):
        job.then.append(Job(job.prompt + job.answer + writer.text(*asked), writer.text(answered)))
        job = job.then[0]
    return first


def _thought(writer: Writer, prompt: list[int], depth: int) -> Job:
    job = Job(prompt, writer.text(30))
    if depth:
        after = prompt + job.answer
        job.then = [_thought(writer, after + writer.text(5), depth - 1) for _ in range(3)]
    return job


WORKLOADS: tuple[Callable[[Writer], list[Job]], ...] = (multi_turn, few_shot, tree_of_thought, agents)


def distinct_prefixes(jobs: list[Job]) -> int:
    """What a batch must compute at least: the newest token of a sequence is not computed."""
    sequences = sorted(array("i", job.prompt + job.answer[:-1]) for job in jobs)
    shared = sum(_common(a, b) for a, b in itertools.pairwise(sequences))
    return sum(map(len, sequences)) - shared


def _common(a: array[int], b: array[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def computed_tokens(jobs: list[Job], policy: str, num_slots: int) -> int:
    """Run a batch to its end; how many tokens were computed, those that were computed again included."""
    scheduler = Scheduler(
        RadixTree(SlotPool(num_slots)), max_step_tokens=MAX_STEP_TOKENS, max_running=MAX_RUNNING, policy=policy
    )
    job_of: dict[Request, Job] = {}

    def submit(more: list[Job]) -> None:
        for job in more:
            request = Request(
                tokens=array("i", job.prompt),
                num_prompt=len(job.prompt),
                on_done=lambda _: None,
                max_tokens=len(job.answer),
                id=len(job_of),
            )
            job_of[request] = job
            scheduler.add([request])

    submit(jobs)
    computed = 0
    while scheduler.busy:
        plan = scheduler.plan()
        assert plan is not None, "nothing can run"
        computed += plan.layout.num_written
        scheduler.tree.commit()
        for request, places in plan.wanted:
            if not places:
                continue
            job = job_of[request]
            request.tokens.append(job.answer[request.num_sampled])
            if request.num_sampled == len(job.answer):
                scheduler.remove(request)
                submit(job.then)
    return computed


def main() -> None:
    start = time.perf_counter()
    names = [workload.__name__ for workload in WORKLOADS]
    batches = [workload(Writer(seed=0)) for workload in WORKLOADS]
    every = [[job for first in jobs for job in first.all()] for jobs in batches]
    demands = [sum(len(job.prompt) + len(job.answer) - 1 for job in jobs) for jobs in every]
    least = [distinct_prefixes(jobs) for jobs in every]
    for pool, policies in POOLS.items():
        print(f"| pool: {pool:.0%} | " + " | ".join(names) + " | mean |")
        print("|---|" + "---:|" * (len(names) + 1))
        for policy in policies:
            shares = [
                (demand - computed_tokens(jobs, policy, int(pool * distinct))) / (demand - distinct)
                for jobs, demand, distinct in zip(batches, demands, least, strict=True)
            ]
            print(f"| {policy} | " + " | ".join(f"{100 * x:.1f}%" for x in (*shares, statistics.mean(shares))) + " |")
        print()
    for name, jobs, demand, distinct in zip(names, every, demands, least, strict=True):
        best = (demand - distinct) / demand
        print(f"{name}: {len(jobs)} requests, {demand:,} tokens, {distinct:,} of them distinct: {best:.1%} can be hits")
    print(f"\n{MAX_RUNNING} run at once, {MAX_STEP_TOKENS} tokens a step; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

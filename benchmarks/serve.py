"""A server under load from another process: what HTTP costs, open streams, overload, clients that vanish.

    python benchmarks/serve.py                         # all of it on a tiny model: what the server itself bears
    python benchmarks/serve.py --model smollm2-135m streams --streams 16

The server is the real command, a process of its own; this process sends. In `overload` and `mixed` requests start when
their time has come, whatever became of those before them. One line a part; the exit code is 1 if something was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak import tiny_model

from branchwise.runtime import Engine

PARTS = ("overhead", "streams", "overload", "mixed")
WARM = 50
OVERLOAD_S = 10.0
OVERLOAD = 5
MIXED_AT_ONCE = 256
ABORTED = 0.1
KEPT_S = 3.0
"""Uvicorn closes connections that were idle for five seconds."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, seconds to the first byte of the body, and in all; `whole` if it came to its end."""

    status: int
    first_s: float
    total_s: float
    whole: bool


class Connection:
    """One connection, one request at a time: as little of HTTP/1.1 as uvicorn's answers need."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def post(self, path: str, body: dict[str, Any], *, leave_after_s: float | None = None) -> Answer:
        """Ask, and read the answer to its end, or hang up after so many seconds."""
        data = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
        began = time.perf_counter()
        self._writer.write("\r\n".join([*head, "", ""]).encode() + data)
        try:
            async with asyncio.timeout(leave_after_s):
                status, first = await self._read()
        except TimeoutError:
            self._writer.transport.abort()
            return Answer(0, 0.0, time.perf_counter() - began, whole=False)
        return Answer(status, first - began, time.perf_counter() - began, whole=True)

    async def _read(self) -> tuple[int, float]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if length := re.search(rb"(?i)content-length: (\d+)", head):
            await self._reader.readexactly(int(length[1]))
            return status, time.perf_counter()
        first = 0.0
        while size := int(await self._reader.readline(), 16):
            first = first or time.perf_counter()
            await self._reader.readexactly(size + 2)
        await self._reader.readexactly(2)
        return status, first

    def close(self) -> None:
        self._writer.close()


@contextmanager
def served(model: str, *options: str) -> Iterator[int]:
    """The port of a server that runs while this lasts."""
    call = [sys.executable, "-m", "branchwise", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r":(\d+)$", line.strip())
        assert found, "the server did not start"
        yield int(found[1])
    finally:
        process.terminate()
        process.wait(timeout=60)


def body(number: int, tokens: int, **more: Any) -> dict[str, Any]:
    """A request for so many tokens; one in eight begins like it."""
    prompt = f"Story {number % 8} of the old mill by the river. Chapter {number}: "
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def at(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


async def left_behind(port: int) -> str:
    """What of the server is still busy after at most a second; "" if nothing is."""
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
        busy = re.findall(
            r'^(branchwise_(?:requests_running|requests_waiting|texts_inside|slots\{state="(?:protected|held)"\})'
            r" [1-9].*)$", page, re.M,
        )  # fmt: skip
        if not busy:
            return ""
        await asyncio.sleep(0.05)
    return "; ".join(busy)


def overhead(model: str, count: int) -> bool:
    """A request alone: through HTTP, less the same on the engine in this process."""
    with Engine(model, num_slots=8192) as engine:
        alone = []
        for number in range(WARM + count):
            prompt = body(number, 4)["prompt"]
            began = time.perf_counter()
            engine.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True)
            alone.append(time.perf_counter() - began)

    async def ask(port: int, **more: Any) -> list[Answer]:
        connection = await Connection.open(port)
        answers = [await connection.post("/v1/completions", body(n, 4, **more)) for n in range(WARM + count)]
        connection.close()
        return answers[WARM:]

    with served(model, "--num-slots", "8192") as port:
        whole, stream = asyncio.run(ask(port)), asyncio.run(ask(port, stream=True))
    engine_ms = statistics.median(alone[WARM:]) * 1e3
    over = [statistics.median(a.total_s for a in answers) * 1e3 - engine_ms for answers in (whole, stream)]
    print(f"overhead: engine alone {engine_ms:.2f} ms p50; HTTP adds {over[0]:.2f} ms, as a stream {over[1]:.2f} ms")
    return all(answer.status == 200 for answer in whole + stream)


def streams(model: str, count: int) -> bool:
    """So many streams at once, all opened before the first may end."""

    async def ask(port: int) -> tuple[list[Answer], str]:
        async def one(number: int) -> Answer:
            connection = await Connection.open(port)
            answer = await connection.post("/v1/completions", body(number, 32, stream=True))
            connection.close()
            return answer

        return list(await asyncio.gather(*map(one, range(count)))), await left_behind(port)

    began = time.perf_counter()
    with served(model, "--num-slots", "65536", "--max-running", "1024", "--max-step-tokens", "1024") as port:
        answers, left = asyncio.run(ask(port))
    good = sum(answer.status == 200 and answer.whole for answer in answers)
    first = [answer.first_s for answer in answers]
    print(
        f"streams: {good} of {count} came to their end in {time.perf_counter() - began:.1f} s with the start; "
        f"first token p50 {at(first, 0.5):.2f} s, p99 {at(first, 0.99):.2f} s; left behind: {left or 'nothing'}"
    )
    return good == count and not left


def overload(model: str) -> bool:
    """Five times what the server can do, for ten seconds, with room for 64 texts."""

    async def ask(port: int) -> tuple[float, list[Answer], str]:
        idle: list[tuple[float, Connection]] = []

        async def one(number: int) -> Answer:
            since, connection = idle.pop() if idle else (0.0, None)
            if connection is None or time.perf_counter() - since > KEPT_S:
                connection = await Connection.open(port)
            try:
                answer = await connection.post("/v1/completions", body(number, 32))
            except (OSError, asyncio.IncompleteReadError):
                return Answer(0, 0.0, 0.0, whole=False)
            idle.append((time.perf_counter(), connection))
            return answer

        async def worker(first: int) -> list[Answer]:
            return [await one(first + number) for number in range(40)]

        began = time.perf_counter()
        await asyncio.gather(*(worker(1000 * number) for number in range(32)))
        rate = 32 * 40 / (time.perf_counter() - began)
        began, tasks = time.perf_counter(), []
        for number in range(int(rate * OVERLOAD * OVERLOAD_S)):
            wait = began + number / (rate * OVERLOAD) - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(number)))
        return rate, list(await asyncio.gather(*tasks)), await left_behind(port)

    with served(model, "--num-slots", "32768", "--max-requests", "64") as port:
        rate, answers, left = asyncio.run(ask(port))
    taken = [answer.total_s * 1e3 for answer in answers if answer.status == 200]
    refused = [answer.total_s * 1e3 for answer in answers if answer.status == 429]
    broken = len(answers) - len(taken) - len(refused)
    print(
        f"overload: {rate:.0f} requests/s are what it can do; of {len(answers)} at {OVERLOAD} times that, {len(taken)} "
        f"were taken (p50 {at(taken, 0.5):.0f} ms, p99 {at(taken, 0.99):.0f} ms) and {len(refused)} refused "
        f"(p50 {at(refused or [0], 0.5):.0f} ms, p99 {at(refused or [0], 0.99):.0f} ms); {broken} connections "
        f"broke; left behind: {left or 'nothing'}"
    )
    return not broken and not left


def mixed(model: str, count: int) -> bool:
    """Streams, texts, samples, constraints and chats; one in ten hangs up in the middle."""
    rng = random.Random(0)

    async def ask(port: int) -> tuple[Counter[str], str]:
        counts: Counter[str] = Counter()
        room = asyncio.Semaphore(MIXED_AT_ONCE)

        async def one(number: int) -> None:
            path, more = rng.choice(
                [
                    ("/v1/completions", {"stream": True}), ("/v1/completions", {}), ("/v1/completions", {"n": 3}),
                    ("/v1/completions", {"regex": "[a-f]{3,9}"}), ("/v1/chat/completions", {"stream": True}),
                    ("/generate", {}),
                ]
            )  # fmt: skip
            asked = body(number, rng.randint(1, 24), **more)
            if path.endswith("chat/completions"):
                asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
            elif path == "/generate":
                asked = {"text": asked["prompt"], "sampling_params": {"max_new_tokens": asked["max_tokens"]}}
            leaves = rng.random() < ABORTED
            try:
                connection = await Connection.open(port)
                answer = await connection.post(path, asked, leave_after_s=rng.random() * 0.1 if leaves else None)
                connection.close()
                counts["hung up" if not answer.whole else str(answer.status)] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                counts[type(error).__name__] += 1
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                await room.acquire()
                group.create_task(one(number))
        return counts, await left_behind(port)

    began = time.perf_counter()
    with served(model, "--num-slots", "16384") as port:
        counts, left = asyncio.run(ask(port))
    print(
        f"mixed: {count} requests in {time.perf_counter() - began:.0f} s with the start: {dict(counts)}; left behind: "
        f"{left or 'nothing'}"
    )
    return set(counts) <= {"200", "hung up"} and not left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}; all of them")
    parser.add_argument("--model", help="a tiny random one, if it is not said")
    parser.add_argument("--requests", type=int, default=300, help="of `overhead`")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--mixed", type=int, default=24_000)
    options = parser.parse_args()
    if wrong := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(wrong))}")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(tiny_model(Path(folder)))
        run = {
            "overhead": lambda: overhead(model, options.requests),
            "streams": lambda: streams(model, options.streams),
            "overload": lambda: overload(model),
            "mixed": lambda: mixed(model, options.mixed),
        }
        good = [run[part]() for part in options.parts]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

"""branchwise itself: each call is started on the engine when it can, and what follows it when it is done.

The programs are given as tokens, as to every other system, so through `Engine.start` and not in the language.
"""

from __future__ import annotations

import queue
from array import array
from collections.abc import Sequence
from typing import Any

import harness
from harness import Progress, Task
from workloads import Program

from branchwise.runtime import Engine, GenerateParams

Done = tuple[Task, list[Any] | Exception]


class Branchwise:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()

    def run(self, progress: Progress) -> None:
        for task in progress.take():
            self._start(task)
        while not progress.finished:
            task, results = self._done.get()
            if isinstance(results, Exception):
                raise results
            progress.done(task, [result.tokens for result in results] if task.call.output else ())
            for follower in progress.take(task.program):
                self._start(follower)

    def prepare(self, programs: Sequence[Program]) -> None:
        self._engine.reset_cache()

    def _start(self, task: Task) -> None:
        call, engine = task.call, self._engine
        if call.choices:
            continuations = [array("i", choice) for choice in call.choices]
            prompt = array("i", task.prompt)
            engine.start_score(prompt, continuations, on_done=lambda scores: self._done.put((task, scores)))
            return
        results: list[Any] = []

        def on_done(_: int, result: Any) -> None:
            results.append(result)
            if isinstance(result, Exception):
                self._done.put((task, result))
            elif len(results) == call.samples:
                self._done.put((task, results))

        if call.regex is not None:
            params = GenerateParams(max_tokens=128, temperature=0, regex=call.regex)
        else:
            temperature = 1.0 if call.samples > 1 else 0.0
            params = GenerateParams(max_tokens=call.output, temperature=temperature, ignore_eos=True)
        prompt = engine.prompt_tokens(task.prompt if call.text is None else call.text)
        engine.start(prompt, params, n=call.samples, on_done=on_done)


def load(dtype: str) -> Branchwise:
    options = {"dtype": "bfloat16", "quantization": "int4"} if dtype == "int4" else {"dtype": dtype}
    return Branchwise(Engine("smollm2-135m", **options))


if __name__ == "__main__":
    harness.main(load)

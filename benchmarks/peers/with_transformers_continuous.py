"""transformers' continuous batching, with blocks of a prefix shared: a call joins the running batch when it can start.

It has no scores of given text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import harness
import torch
from harness import Progress, Task
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from workloads import Program

PAGE_SIZE = 32
"""Shorter ones share more of a prefix; the default is 256."""

CACHED_TOKENS = 1 << 15


class ContinuousBatching:
    def __init__(self, dtype: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(os.environ["BENCH_MODEL"], dtype=getattr(torch, dtype))
        self._model = model.eval()
        self._manager = None

    def prepare(self, programs: Sequence[Program]) -> None:
        """A manager with a cache of its own; whether it samples, and how often, is settled when it is made."""
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager.destroy()
        samples = max(call.samples for program in programs for call in program)
        sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if samples > 1 else {}
        config = GenerationConfig(
            do_sample=samples > 1, num_return_sequences=samples, eos_token_id=-1, pad_token_id=0, **sampling
        )
        batching = ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=CACHED_TOKENS // PAGE_SIZE, max_batch_tokens=512, max_requests_per_batch=256
        )
        self._manager = self._model.init_continuous_batching(config, batching)
        self._manager.start()

    def run(self, progress: Progress) -> None:
        started: dict[str, tuple[Task, list[list[int]]]] = {}

        def start(tasks: list[Task]) -> None:
            for task in sorted(tasks, key=lambda task: task.prompt):  # as its own `add_requests` does, to share more
                name = f"{task.program}-{task.number}"
                started[name] = (task, [])
                self._manager.add_request(task.prompt, request_id=name, max_new_tokens=task.call.output)

        start(progress.take())
        while not progress.finished:
            result = self._manager.get_result(timeout=1)
            if result is None:
                assert self._manager.is_running(), "the manager has ended"
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            task, answers = started[result.request_id.partition("__child")[0]]
            answers.append(result.generated_tokens)
            if len(answers) == task.call.samples:
                progress.done(task, answers)
                start(progress.take(task.program))


if __name__ == "__main__":
    harness.main(ContinuousBatching)

"""guidance on llama.cpp, the faster of its two local backends: one call after the other, for constrained work only."""

from __future__ import annotations

import os
from collections.abc import Sequence

import harness
from guidance import gen
from guidance.models import LlamaCpp
from harness import Progress
from workloads import Program


class Guidance:
    def __init__(self, dtype: str) -> None:
        del dtype  # the file's own
        threads = len(os.sched_getaffinity(0))
        self._model = LlamaCpp(
            os.environ["BENCH_GGUF"], n_ctx=4096, n_threads=threads, n_threads_batch=threads, echo=False
        )

    def prepare(self, programs: Sequence[Program]) -> None:
        pass  # it keeps what a prompt has in common with the one before

    def run(self, progress: Progress) -> None:
        while not progress.finished:
            for task in progress.take():
                if task.call.regex is not None:
                    str(self._model + task.call.text + gen(regex=task.call.regex, temperature=0.0))
                    progress.done(task)
                else:
                    raise NotImplementedError("guidance is measured in constrained work")


if __name__ == "__main__":
    harness.main(Guidance)

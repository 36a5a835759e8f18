"""outlines on llama.cpp, its fastest local backend for one call after the other, for constrained work only."""

from __future__ import annotations

import os
from collections.abc import Sequence

import harness
import outlines
from harness import Progress
from llama_cpp import Llama
from outlines.types import Regex
from workloads import PERSON, Program


class Outlines:
    def __init__(self, dtype: str) -> None:
        del dtype  # the file's own
        threads = len(os.sched_getaffinity(0))
        llama = Llama(os.environ["BENCH_GGUF"], n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)
        self._generate = outlines.Generator(outlines.from_llamacpp(llama), Regex(PERSON))

    def prepare(self, programs: Sequence[Program]) -> None:
        pass

    def run(self, progress: Progress) -> None:
        while not progress.finished:
            for task in progress.take():
                self._generate(task.call.text, max_tokens=128, temperature=0.0)
                progress.done(task)


if __name__ == "__main__":
    harness.main(Outlines)

"""llama.cpp by its class `Llama`: one call after the other, and each keeps what it has in common with the one before.

Next is always the call that has most in common with the last one. It has no scores of given text without keeping the
logits of every token, so those are left to `with_llama_cpp_batched.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice

import harness
from harness import Progress, Task, common
from llama_cpp import Llama, LlamaGrammar
from workloads import Program

PERSON = r"""
root ::= "{" name ", " city ", " year ", " trade ", " married "}"
name ::= "\"name\": \"" [A-Z] [a-z]{2,9} "\""
city ::= "\"city\": \"" [A-Z] [a-z]{2,9} "\""
year ::= "\"year\": " ("19" | "20") [0-9] [0-9]
trade ::= "\"trade\": \"" [a-z]{3,9} "\""
married ::= "\"married\": " ("true" | "false")
"""
"""`workloads.PERSON` in llama.cpp's own grammar."""


class LlamaCpp:
    def __init__(self, dtype: str) -> None:
        del dtype  # the file's own
        threads = len(os.sched_getaffinity(0))
        self._llama = Llama(
            os.environ["BENCH_GGUF"], n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._last: list[int] = []
        self._grammar = LlamaGrammar.from_string(PERSON, verbose=False)

    def prepare(self, programs: Sequence[Program]) -> None:
        self._llama.reset()
        self._last = []

    def run(self, progress: Progress) -> None:
        ready: list[Task] = []
        while not progress.finished:
            ready += progress.take()
            task = max(ready, key=lambda task: common(task.prompt, self._last))
            ready.remove(task)
            if task.call.text is not None:
                self._llama.create_completion(task.call.text, max_tokens=128, temperature=0, grammar=self._grammar)
                progress.done(task)
            else:
                progress.done(task, [self._answer(task) for _ in range(task.call.samples)])

    def _answer(self, task: Task) -> list[int]:
        temperature = 1.0 if task.call.samples > 1 else 0.0
        generated = self._llama.generate(task.prompt, temp=temperature, top_k=0, top_p=1.0, min_p=0.0)
        answer = list(islice(generated, task.call.output))
        self._last = task.prompt + answer
        return answer


if __name__ == "__main__":
    harness.main(LlamaCpp)

"""vLLM on the CPU, with prefix caching, its engine in this process: a call is added when it can start, then `step()`.

Scores of given text are log-probabilities of a prompt, for which it does not use what is cached.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

# Before vllm is imported. A process of its own for the engine would share these cores with this one.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"
os.environ["VLLM_NO_USAGE_STATS"] = os.environ["DO_NOT_TRACK"] = "1"

import harness
from harness import Progress, Task
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from workloads import Program


class Vllm:
    def __init__(self, dtype: str) -> None:
        llm = LLM(
            os.environ["BENCH_MODEL"],
            dtype=dtype,
            max_model_len=4096,
            enable_prefix_caching=True,
            block_size=32,  # the least that its attention on a CPU takes
            disable_log_stats=True,
        )
        self._engine = llm.llm_engine
        self._tokenizer = llm.get_tokenizer()
        self._count = 0

    def prepare(self, programs: Sequence[Program]) -> None:
        self._engine.reset_prefix_cache()

    def run(self, progress: Progress) -> None:
        started: dict[str, Task] = {}
        missing: dict[tuple[int, int], int] = {}  # choices that are not scored yet

        def start(tasks: list[Task]) -> None:
            for task in tasks:
                call = task.call
                prompt = task.prompt if call.text is None else self._tokenizer.encode(call.text)
                prompts = [[*prompt, *choice] for choice in call.choices] or [prompt]
                missing[task.program, task.number] = len(prompts)
                for ids in prompts:
                    self._count += 1
                    started[str(self._count)] = task
                    self._engine.add_request(str(self._count), TokensPrompt(prompt_token_ids=ids), _params(task))

        start(progress.take())
        while not progress.finished:
            for result in self._engine.step():
                if not result.finished:
                    continue
                task = started[result.request_id]
                place = task.program, task.number
                missing[place] -= 1
                if not missing[place]:
                    progress.done(task, [sample.token_ids for sample in result.outputs] if task.call.output else ())
                    start(progress.take(task.program))


def _params(task: Task) -> SamplingParams:
    call, whole = task.call, RequestOutputKind.FINAL_ONLY
    if call.choices:
        return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, output_kind=whole)
    if call.regex is not None:
        grammar = StructuredOutputsParams(regex=call.regex)
        return SamplingParams(max_tokens=128, temperature=0, structured_outputs=grammar, output_kind=whole)
    return SamplingParams(
        n=call.samples,
        temperature=1.0 if call.samples > 1 else 0.0,
        max_tokens=call.output,
        min_tokens=call.output,
        ignore_eos=True,
        output_kind=whole,
    )


if __name__ == "__main__":
    harness.main(Vllm)

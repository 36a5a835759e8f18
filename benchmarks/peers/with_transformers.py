"""transformers' `generate`: all calls that can start are padded batches, and what can start then are the next ones.

It shares nothing between calls. A batch has at most 64 rows, of similar lengths; smaller ones are slower.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby

import harness
import torch
from harness import Progress, Task
from torch import Tensor
from transformers import AutoModelForCausalLM
from workloads import Program

MOST_ROWS = int(os.environ.get("BENCH_ROWS", "64"))
MOST_SCORED = 24
"""Rows of a batch whose logits are read: they are larger."""


class Transformers:
    def __init__(self, dtype: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(os.environ["BENCH_MODEL"], dtype=getattr(torch, dtype))
        self._model = model.eval()

    def prepare(self, programs: Sequence[Program]) -> None:
        pass  # nothing is kept between calls

    def run(self, progress: Progress) -> None:
        while not progress.finished:
            for batch in _batches(progress.take()):
                if batch[0].call.choices:
                    self._score(batch)
                    for task in batch:
                        progress.done(task)
                else:
                    for task, answers in zip(batch, self._generate(batch), strict=True):
                        progress.done(task, answers)

    @torch.inference_mode()
    def _generate(self, batch: list[Task]) -> list[list[list[int]]]:
        """For each task the tokens of each of its samples."""
        call = batch[0].call
        ids, mask = _padded([task.prompt for task in batch])
        sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if call.samples > 1 else {}
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=call.output,
            min_new_tokens=call.output,
            num_return_sequences=call.samples,
            do_sample=call.samples > 1,
            pad_token_id=0,
            **sampling,
        )
        rows = out[:, ids.shape[1] :].tolist()
        return [rows[i : i + call.samples] for i in range(0, len(rows), call.samples)]

    @torch.inference_mode()
    def _score(self, batch: list[Task]) -> list[Tensor]:
        """The log-probabilities of the tokens of each choice. All choices of a task are as long as each other."""
        pairs = [(task.prompt, choice) for task in batch for choice in task.call.choices]
        scores: list[Tensor] = []
        for i in range(0, len(pairs), MOST_SCORED):
            some = pairs[i : i + MOST_SCORED]
            ids, mask = _padded([[*prompt, *choice] for prompt, choice in some])
            length = len(some[0][1])
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=length + 1, use_cache=False
            ).logits
            logprobs = logits[:, :-1].float().log_softmax(-1)
            scores += logprobs.gather(2, ids[:, -length:, None])[:, :, 0].unbind()
        return scores


def _batches(tasks: list[Task]) -> Iterator[list[Task]]:
    """Tasks that want as much, sorted by length, a batch's rows at a time."""

    def kind(task: Task) -> tuple[int, int]:
        return task.call.output, task.call.samples

    for (_, samples), alike in groupby(sorted(tasks, key=lambda task: (*kind(task), len(task.prompt))), key=kind):
        group, size = list(alike), max(1, MOST_ROWS // samples)
        yield from (group[i : i + size] for i in range(0, len(group), size))


def _padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids, padded on the left, and which of them count."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


if __name__ == "__main__":
    harness.main(Transformers)

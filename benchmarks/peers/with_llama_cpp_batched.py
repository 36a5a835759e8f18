"""llama.cpp at its best: many sequences in one batch, and prefixes taken over from one sequence by another.

The class `Llama` does neither, so this is written on the package's bindings of the C API. A sequence begins with the
longest prefix that one before it has computed (`llama_memory_seq_cp`, which shares the cells), and waits where one that
is being computed has a longer one. There is no grammar here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import harness
import llama_cpp as lib
import numpy as np
from harness import Progress, Task
from workloads import Program

CELLS = 1 << 15
MOST_SEQUENCES = 128
MOST_ROWS = 512
"""Of one batch."""


@dataclass(eq=False)
class Row:
    """Tokens of one sample or choice, of which the first `computed` are in the cells of sequence `id`."""

    task: Task
    tokens: np.ndarray
    length: int      # tokens that are known
    scored: int = 0  # so many of the last ones are a choice, whose log-probabilities are wanted
    id: int = -1
    computed: int = 0
    logprobs: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """All is generated, or scored. The last token is not computed: nothing needs what follows it."""
        return self.length == len(self.tokens) and self.computed == self.length - 1


class LlamaCppBatched:
    def __init__(self, dtype: str) -> None:
        del dtype  # the file's own
        lib.llama_backend_init()
        self._silence = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._silence, None)
        model = lib.llama_model_load_from_file(os.environ["BENCH_GGUF"].encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = CELLS, MOST_SEQUENCES, True
        params.n_batch = params.n_ubatch = MOST_ROWS
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = lib.llama_init_from_model(model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._num_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch = lib.llama_batch_init(MOST_ROWS, 0, 1)
        self._random = np.random.default_rng(0)
        self._kept: list[Row] = []  # those whose tokens are in cells, oldest first

    def prepare(self, programs: Sequence[Program]) -> None:
        lib.llama_memory_clear(self._memory, True)
        self._kept = []

    def run(self, progress: Progress) -> None:
        waiting, running = _rows(progress.take()), []
        finished: dict[tuple[int, int], list[list[int]]] = {}
        while not progress.finished:
            self._admit(waiting, running)
            self._step(running)
            for row in [row for row in running if row.done]:
                running.remove(row)
                task = row.task
                answers = finished.setdefault((task.program, task.number), [])
                answers.append(row.tokens[len(task.prompt) :].tolist())
                if len(answers) == max(task.call.samples, len(task.call.choices)):
                    progress.done(task, answers if task.call.output else ())
                    waiting += _rows(progress.take(task.program))

    def _admit(self, waiting: list[Row], running: list[Row]) -> None:
        """Begin every row that nobody who is being computed could help to begin further on."""
        for row in list(waiting):
            shared = [(_common(row, other), other) for other in self._kept]
            best, source = max(((min(n, other.computed), other) for n, other in shared), default=(0, None), key=_first)
            if any(n > best and other in running for n, other in shared) or len(running) == MOST_SEQUENCES:
                continue
            if len(self._kept) == MOST_SEQUENCES:
                self._drop(next(other for other in self._kept if other not in running and other is not source))
            used = {other.id for other in self._kept}
            row.id = next(i for i in range(MOST_SEQUENCES) if i not in used)
            row.computed = min(best, row.length - 1 - row.scored)
            if row.computed and source is not None:
                lib.llama_memory_seq_cp(self._memory, source.id, row.id, 0, row.computed)
            self._kept.append(row)
            running.append(row)
            waiting.remove(row)

    def _drop(self, row: Row) -> None:
        lib.llama_memory_seq_rm(self._memory, row.id, -1, -1)
        self._kept.remove(row)

    def _step(self, running: list[Row]) -> None:
        """One batch: the next token of each row that generates, and of the others as much as there is room for."""
        batch, size = self._batch, 0
        outputs: list[tuple[Row, int, int]] = []  # the row, the place of the token whose logits these are, in the batch
        for row in sorted(running, key=lambda row: row.length - row.computed):
            last = row.length - (1 if row.scored else 0)  # of a choice nothing follows the last token
            for place in range(row.computed, min(last, row.computed + MOST_ROWS - size)):
                batch.token[size], batch.pos[size] = int(row.tokens[place]), place
                batch.n_seq_id[size], batch.seq_id[size][0] = 1, row.id
                wanted = place >= row.length - 1 - row.scored
                batch.logits[size] = wanted
                if wanted:
                    outputs.append((row, place, size))
                size += 1
                row.computed = place + 1
        batch.n_tokens = size
        while lib.llama_decode(self._context, batch) == 1:  # no cells are left
            self._drop(next(other for other in self._kept if other not in running))
        for row, place, index in outputs:
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, index), shape=(self._num_vocab,))
            if row.scored:
                row.logprobs.append(float(logits[row.tokens[place + 1]] - np.logaddexp.reduce(logits)))
            else:
                row.tokens[row.length] = self._next(row, logits)
                row.length += 1

    def _next(self, row: Row, logits: np.ndarray) -> int:
        if row.task.call.samples == 1:
            return int(logits.argmax())
        total = np.exp(logits - logits.max()).cumsum()
        return int(np.searchsorted(total, self._random.random() * total[-1]))


def _rows(tasks: list[Task]) -> list[Row]:
    rows: list[Row] = []
    for task in tasks:
        prompt, call = np.array(task.prompt, np.int32), task.call
        if call.choices:
            wholes = [np.concatenate([prompt, np.array(choice, np.int32)]) for choice in call.choices]
            rows += [Row(task, whole, len(whole), len(whole) - len(prompt)) for whole in wholes]
        else:
            room = np.zeros(call.output, np.int32)
            rows += [Row(task, np.concatenate([prompt, room]), len(prompt)) for _ in range(call.samples)]
    return rows


def _common(row: Row, other: Row) -> int:
    """How many tokens two rows begin with alike, of those that are known."""
    length = min(row.length, other.length)
    differ = row.tokens[:length] != other.tokens[:length]
    return int(differ.argmax()) if differ.any() else length


def _first(pair: tuple[int, object]) -> int:
    return pair[0]


if __name__ == "__main__":
    harness.main(LlamaCppBatched)

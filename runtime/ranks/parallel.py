"""One engine on several GPUs: its process decides and computes, the others compute their shares of every step.

Rank 0 is the process that made the engine. It alone has a scheduler, a tree and requests; it sends each step's layout,
plain integers, and every rank runs that step on its part of the model and of the keys and values. The ranks of a model
exchange tensors by NCCL, or by Gloo on a CPU; layouts go by Gloo, so that a rank with nothing to do sleeps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ..attention import int32
from ..devices import CPU, gpu_count, is_gpu
from ..errors import EngineError
from ..layout import Layout
from ..model.split import Split
from ..runner import Runner
from .wire import encode

dist: Any = torch.distributed  # its types are incomplete

HOST = "127.0.0.1"
STARTING = timedelta(minutes=3)
"""For a rank to be there."""

IDLE = timedelta(days=365)
"""Ranks wait as long as there is nothing to compute. If rank 0 ends, whatever way, they are told by its connection."""


@dataclass(frozen=True, slots=True)
class Job:
    """What another rank is started with."""

    port: int
    rank: int
    size: int
    folder: str
    dtype: str
    device: str
    threads: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What is known when rank 0 has loaded its share."""

    num_slots: int
    page_size: int
    price: float
    max_levels: int
    least_saved: float

    def encoded(self) -> array[int]:
        return array("i", json.dumps(asdict(self)).encode("utf-32-le"))

    @staticmethod
    def decoded(values: array[int]) -> Settings:
        return Settings(**json.loads(values.tobytes().decode("utf-32-le")))


class Links:
    """One rank's connections to the others."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._control = dist.ProcessGroupGloo(dist.PrefixStore("control", store), rank, size, IDLE)
        self._data: Any = self._control
        if is_gpu(device):
            self._data = dist.ProcessGroupNCCL(
                dist.PrefixStore("data", store), rank, size, dist.ProcessGroupNCCL.Options()
            )

    def split(self) -> Split:
        return Split(self.rank, self.size, self._add, self._join)

    def send(self, values: array[int]) -> None:
        """From rank 0 to all: some integers, one at least."""
        self._broadcast(torch.tensor([len(values)]))
        self._broadcast(int32(values))

    def receive(self) -> array[int]:
        """What rank 0 sends. Waits for it.

        Raises:
            RuntimeError: rank 0 has ended.
        """
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        content = torch.empty(int(size), dtype=torch.int32)
        self._broadcast(content)
        return array("i", content.numpy().tobytes())

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self._control.barrier().wait()

    def _broadcast(self, tensor: Tensor) -> None:
        self._control.broadcast(tensor, 0).wait()

    def _add(self, x: Tensor) -> None:
        self._data.allreduce(x).wait()

    def _join(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._data.allgather(parts, x.contiguous()).wait()
        return torch.cat(parts, dim=-1)


class Team:
    """The other ranks of an engine, as rank 0 sees them."""

    def __init__(self, size: int, folder: Path, dtype: torch.dtype, device: torch.device, threads: int) -> None:
        """Start them; they begin to load their shares.

        Raises:
            EngineError: there are fewer GPUs, or a rank did not come up.
        """
        store = dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False, timeout=STARTING)
        self._others: list[subprocess.Popen[bytes]] = []
        self.devices = ranks(device, size)
        for rank in range(1, size):
            name = str(dtype).removeprefix("torch.")
            job = Job(store.port, rank, size, str(folder), name, str(self.devices[rank]), threads)
            command = [sys.executable, "-m", "branchwise.runtime.ranks.rank", json.dumps(asdict(job))]
            self._others.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        try:
            self.links = Links(store, 0, size, self.devices[0])
        except RuntimeError as error:
            self.close()
            raise EngineError(f"Engine: a process of tensor_parallel={size} did not come up: {error}") from error

    def begin(self, settings: Settings) -> None:
        """Tell the others how to begin, and wait until they are ready.

        Raises:
            EngineError: one of them ended.
        """
        try:
            self.links.send(settings.encoded())
            self.links.meet()
        except RuntimeError as error:
            raise self._ended() from error

    def forward(self, runner: Runner, layout: Layout) -> Tensor:
        """A step on all ranks; the logits of all.

        Raises:
            EngineError: a rank ended, or failed; none computes any more.
        """
        if any(other.poll() is not None for other in self._others):
            raise self._ended()
        try:
            self.links.send(encode(layout))
            return runner.forward(layout)
        except RuntimeError as error:
            self.close()  # they may wait for each other
            raise self._ended() from error

    def close(self) -> None:
        """End the other ranks. Twice is fine."""
        for other in self._others:
            if other.poll() is None:
                other.terminate()
        for other in self._others:
            other.wait()

    def _ended(self) -> EngineError:
        codes = ", ".join(f"rank {i} with {other.poll()}" for i, other in enumerate(self._others, 1) if other.poll())
        return EngineError(
            f"a process of this engine has ended{f' ({codes})' if codes else ''}, and without it nothing can be "
            "computed. What it said is on stderr. Make a new engine."
        )


class ParallelRunner:
    """Steps on all ranks."""

    def __init__(self, runner: Runner, team: Team) -> None:
        self._runner, self._team = runner, team

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def attention_name(self) -> str:
        return self._runner.attention_name

    def forward(self, layout: Layout) -> Tensor:
        return self._team.forward(self._runner, layout)

    def close(self) -> None:
        self._team.close()


def ranks(device: torch.device, size: int) -> Sequence[torch.device]:
    """Where each rank runs: on GPUs in order from the one named, or all on the CPU.

    Raises:
        EngineError: there are not so many.
    """
    if not is_gpu(device):
        return [CPU] * size
    first, count = device.index or 0, gpu_count()
    if first + size > count:
        raise EngineError(f"Engine: tensor_parallel {size} from {device} on takes more GPUs than there are ({count}).")
    return [torch.device(device.type, first + rank) for rank in range(size)]

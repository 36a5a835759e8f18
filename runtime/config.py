"""How an engine is set up: checked once, when it is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .devices import choose_device, free_bytes, gib, half_precision, is_cpu, is_gpu, total_bytes
from .errors import EngineError, RequestError
from .messages import check_name, shown
from .policies import EVICTION, SCHEDULING, AdmissionOrder, EvictionOrder
from .probe import speeds

MEMORY_SHARE = 0.3
"""Share of the free memory that `num_slots="auto"` takes for keys and values."""

MOST_AUTO_SLOTS = 1 << 18
"""More than this many slots are only made when asked for."""

GPU_MEMORY_SHARE, GPU_RESERVE_BYTES, MOST_AUTO_SLOTS_ON_GPU = 0.85, 2 << 30, 1 << 21
"""The same on a GPU, of what is free beside the weights, less what a step and its kernels need to compute with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options of an engine.

    device: where the model runs, as torch names it; None takes a GPU if there is one.
    dtype: of weights, keys and values. "auto" is float32 on a CPU, in which the cache never changes a greedy answer,
        and bfloat16 on a GPU. "fastest" is what a probe, which runs once on a machine, found clearly faster (see
        `probe`); in 16 bits, more than half of 40-token answers of the demo model came out otherwise from a warm cache
        than from a cold one: near-ties fall the other way.
    threads: of torch in this process, from the making of the engine on; "auto" is torch's own number, which knows
        OMP_NUM_THREADS, or fewer where the probe, on an idle machine, found that clearly faster.
    quantization: "int8" or "int4" packs the weights of a model like Llama, on a CPU: steps of few rows then read less.
        What it changes, and what memory it takes: see `model.quantize` and `model.linear`. None keeps them as they are.
    num_slots: tokens whose keys and values fit in the cache; "auto" goes by free memory.
    page_size: slots that are allocated together; the prefix cache shares whole pages. 1 shares every token.
    policy: which waiting request is admitted next: a name of `policies.SCHEDULING`, or a function like those there.
    eviction: which cached leaf goes first: a name of `policies.EVICTION`, or a function like those there.
    max_step_tokens: rows of one forward pass at most; longer prompts are computed in chunks.
    max_running: requests that take part in one step at most.
    jump_forward: text that a constraint forces is taken without a forward pass for each of its tokens; greedily, the
        tokens are the same either way.
    cuda_graphs: on a GPU, steps in which requests only decode are recorded once for each size, and launched whole.
    tensor_parallel: so many GPUs, from `device` on, compute together, each in a process of its own with a share of the
        model and of the keys and values. For models like Llama whose heads can be divided so.
    context_length: positions at most; None takes the model's own.
    host_cache_bytes: host memory for keys and values that were evicted, to bring them back from. 0 is none.
    disk_cache_bytes, disk_cache_path: the same in files in a folder, for what host memory has no room for. They go when
        the engine is closed; `save_cache` is what lasts.
    deterministic: the scores of a token have the same bits whatever else is in its step, however its prompt was cut
        into chunks and pages, and whether it was computed now or found in the cache; on one machine, with one version
        and one number of threads. For models like Llama, on a CPU, in float32 or bfloat16; slower (see
        docs/reliability.md). Without it, float32 differs in the last bits, and two candidates that are that close can
        change places.
    seed: makes requests without a seed of their own reproducible, given the same order of calls.
    """

    device: str | None = None
    dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16"] = "auto"
    threads: int | Literal["auto"] = "auto"
    quantization: Literal["int8", "int4"] | None = None
    num_slots: int | Literal["auto"] = "auto"
    page_size: int = 1
    policy: str | AdmissionOrder = "lpm"
    eviction: str | EvictionOrder = "lru"
    max_step_tokens: int = 512
    max_running: int = 256
    jump_forward: bool = True
    cuda_graphs: bool = True
    tensor_parallel: int = 1
    context_length: int | None = None
    host_cache_bytes: int = 0
    disk_cache_bytes: int = 0
    disk_cache_path: str | os.PathLike[str] | None = None
    deterministic: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("jump_forward", "cuda_graphs", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"Engine: {name} must be True or False, got {shown(getattr(self, name))}.")
        sizes = ("page_size", "max_step_tokens", "max_running", "tensor_parallel")
        for name in ("threads", "num_slots", "context_length", *sizes):
            value = getattr(self, name)
            if (name in ("threads", "num_slots") and value == "auto") or (name == "context_length" and value is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"Engine: {name} must be a positive integer, got {shown(value)}.")
        if self.device is not None and not isinstance(self.device, str | torch.device):
            raise RequestError(
                f'Engine: device must be a name like "cpu" or "cuda:0", or None, got {shown(self.device)}.'
            )
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise RequestError(f"Engine: seed must be a whole number, or None, got {shown(self.seed)}.")
        if self.disk_cache_path is not None and not isinstance(self.disk_cache_path, str | os.PathLike):
            raise RequestError(f"Engine: disk_cache_path must be a path, or None, got {shown(self.disk_cache_path)}.")
        if self.max_running > self.max_step_tokens:
            raise RequestError(
                f"Engine: max_running ({self.max_running}) must not exceed max_step_tokens ({self.max_step_tokens}): "
                "every running request computes a token a step."
            )
        for name, known in (("policy", SCHEDULING), ("eviction", tuple(EVICTION))):
            value = getattr(self, name)
            if not callable(value) and not (isinstance(value, str) and value in known):
                raise RequestError(
                    f"Engine: {name} must be one of {', '.join(known)}, or a function, got {shown(value)}."
                )
        if self.num_slots != "auto" and self.num_slots % self.page_size:
            size = self.page_size
            raise RequestError(f"Engine: num_slots must be a multiple of page_size ({size}), got {self.num_slots}.")
        for name in ("host_cache_bytes", "disk_cache_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise RequestError(f"Engine: {name} must be 0 or a number of bytes, got {shown(value)}.")
        for name in ("quantization", "host_cache_bytes", "disk_cache_bytes"):
            if self.tensor_parallel > 1 and getattr(self, name):
                raise RequestError(f"Engine: {name} and tensor_parallel do not go together. Leave one of them out.")
        if bool(self.disk_cache_bytes) != (self.disk_cache_path is not None):
            raise RequestError(
                f"Engine: disk_cache_bytes ({self.disk_cache_bytes}) and disk_cache_path ({self.disk_cache_path!r}) "
                "go together: give both, or neither."
            )
        dtypes = ("auto", "fastest", "float32", "bfloat16", "float16")
        if not isinstance(self.dtype, str) or self.dtype not in dtypes:
            raise RequestError(f"Engine: dtype must be one of {', '.join(dtypes)}, got {shown(self.dtype)}.")
        if self.quantization is not None and self.quantization not in ("int8", "int4"):
            raise RequestError(f"Engine: quantization must be int8, int4 or None, got {shown(self.quantization)}.")

    def torch_device(self) -> torch.device:
        """The device, checked to be there."""
        return choose_device(self.device)

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        if self.dtype not in ("auto", "fastest"):
            dtype: torch.dtype = getattr(torch, self.dtype)
            return dtype
        if not is_cpu(device):
            return half_precision(device)
        return speeds().dtype() if self.dtype == "fastest" else torch.float32

    def check_deterministic(self, device: torch.device, dtype: torch.dtype) -> None:
        """Refuse what the promise cannot be held for."""
        if self.deterministic and (not is_cpu(device) or dtype == torch.float16):
            raise RequestError(
                f"Engine: deterministic is for a CPU, in float32 or bfloat16, not for {device} in {dtype}. "
                'Leave it out, or add device="cpu" and dtype="float32".'
            )
        if self.deterministic and self.tensor_parallel > 1:
            raise RequestError("Engine: deterministic and tensor_parallel exclude each other. Leave one of them out.")

    def num_threads(self, device: torch.device) -> int | None:
        """How many threads torch shall use; None: as many as it does."""
        if self.threads != "auto":
            return self.threads
        return speeds().num_threads() if is_cpu(device) else None


def engine_config(**options: Any) -> EngineConfig:
    """The options of an engine, by name.

    Raises:
        RequestError: there is no such option, or it has a value it cannot have.
    """
    for name in options:
        check_name(name, EngineConfig.__dataclass_fields__, where="Engine: ")
    return EngineConfig(**options)


def check_memory(num_slots: int, slot_bytes: int, device: torch.device) -> None:
    """Refuse a cache that the device cannot hold even with nothing else on it.

    Args:
        slot_bytes: bytes of one token's keys and values in all layers.

    Raises:
        RequestError: it is larger than all of the device's memory.
    """
    wanted, total = num_slots * slot_bytes, total_bytes(device)
    if wanted > total:
        raise RequestError(
            f"Engine: num_slots {num_slots:,} needs {gib(wanted)} for keys and values, and {device} has "
            f'{gib(total)}, {gib(free_bytes(device))} of it free. Lower num_slots, or leave it at "auto".'
        )


@contextmanager
def no_memory(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Say it with sizes, and what to change, if the device has no memory for something as the engine starts.

    Raises:
        EngineError: it has not.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"Engine: there is no memory for {what}: {device} has {gib(total_bytes(device))}, "
            f"{gib(free_bytes(device))} of it free. Change {remedy}."
        ) from error


def auto_num_slots(slot_bytes: int, context_length: int, device: torch.device) -> int:
    """Slots that fit in a share of the free memory, and at least one full context.

    Args:
        slot_bytes: bytes of one token's keys and values in all layers.
    """
    free = free_bytes(device)
    room, most = free * MEMORY_SHARE, MOST_AUTO_SLOTS
    if is_gpu(device):  # nothing else is meant to live there
        room, most = (free - GPU_RESERVE_BYTES) * GPU_MEMORY_SHARE, MOST_AUTO_SLOTS_ON_GPU
    fitting = int(max(0.0, room)) // slot_bytes
    return max(min(fitting, most), min(context_length, 2048))

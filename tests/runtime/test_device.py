"""Nothing of a GPU's step is done on the CPU by mistake: a step walked with tensors that have a device and no numbers.

torch's fake tensors refuse what a GPU would refuse: operators whose arguments are on different devices. They run no
kernel, so this shows where tensors are, of what shape and dtype, and not what is in them.
"""

from __future__ import annotations

import ast
import random
import re
import warnings
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from transformers import LlamaConfig, Qwen3Config

from branchwise.runtime import EngineError, device_draws, devices, runner
from branchwise.runtime.attention import flashinfer
from branchwise.runtime.attention.flashinfer import FlashInferAttention
from branchwise.runtime.attention.levels import CostModel
from branchwise.runtime.config import EngineConfig, auto_num_slots, no_memory
from branchwise.runtime.device_draws import DeviceDrawer, TorchOperations
from branchwise.runtime.draws import Draw
from branchwise.runtime.gpu import graphs
from branchwise.runtime.gpu.graphs import Graphs
from branchwise.runtime.kv import KVPool
from branchwise.runtime.layout import Layout
from branchwise.runtime.model import rows
from branchwise.runtime.model.llama import LlamaModel
from branchwise.runtime.penalties import Penalties, Repeated
from branchwise.runtime.request import Request
from branchwise.runtime.runner import StepRunner
from branchwise.runtime.sampling import SamplingParams

from .trees import decode_step, random_step

GPU = torch.device("meta")
"""Stands for one: builds of torch without CUDA index no tensor that says it is on "cuda", even a fake one."""

ROOT = Path(__file__).parents[2]
NUM_SLOTS = 256
SIZES: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


class FakeTransfers:
    """To a GPU that there is not. What comes back is zeros, as nobody knows better; `waits` counts how often."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self.waits = 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def pinned(self, values: Tensor) -> Tensor:
        assert not isinstance(values, FakeTensor) and values.device.type == "cpu"
        return values

    def upload(self, values: Tensor) -> Tensor:
        assert not isinstance(values, FakeTensor) and values.device.type == "cpu"
        with self._mode:
            return torch.empty(values.shape, dtype=values.dtype, device=GPU)

    def download(self, values: Tensor, into: Tensor) -> None:
        assert values.device == GPU

    def wait(self) -> None:
        self.waits += 1

    def read(self, values: Tensor) -> Tensor:
        assert values.device == GPU
        self.wait()
        with unset_fake_temporarily():
            return torch.zeros(values.shape, dtype=values.dtype)

    def so_far(self) -> Any:
        return lambda: None


class FakeLibrary:
    """FlashInfer by where its arguments are: plans on the host but for page numbers, everything else on the GPU."""

    def __init__(self) -> None:
        self.launches = 0

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: Tensor, layout: str, **options: Any) -> Any:  # its name
        assert workspace.device == GPU and options.pop("backend") == "fa2"
        assert all(value is True or (value.device == GPU and value.dtype == torch.int32) for value in options.values())
        return SimpleNamespace(plan=self._plan, run=self._run, reset_workspace_buffer=self._reset)

    def _reset(self, floats: Tensor, integers: Tensor) -> None:
        assert floats.device == integers.device == GPU

    def _plan(self, **arguments: Any) -> None:
        for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"):
            assert arguments[name].device.type == "cpu" and arguments[name].dtype == torch.int32, name
        assert arguments["paged_kv_indices"].device == GPU and arguments["paged_kv_indices"].dtype == torch.int32
        assert arguments["q_data_type"] == torch.bfloat16

    def _run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor, lse: Tensor, return_lse: bool) -> None:
        self.launches += 1
        for tensor in (q, *cache, out):
            assert tensor.device == GPU and tensor.dtype == torch.bfloat16 and tensor.stride(-1) == 1
        assert out.shape == q.shape and lse.shape == q.shape[:2]
        assert lse.device == GPU and lse.dtype == torch.float32

    def merge_state_in_place(self, out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        assert {tensor.device for tensor in (out, lse, more, more_lse)} == {GPU}


class FakeWeights:
    """Of any shape, on the GPU."""

    def __contains__(self, name: str) -> bool:
        return "bias" not in name

    def get(self, name: str, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=GPU)

    def optional(self, name: str, *shape: int) -> Tensor | None:
        return self.get(name, *shape) if name in self else None

    def stacked(self, prefix: str, heights: dict[str, int], width: int) -> Tensor:
        return torch.empty(sum(heights.values()), width)  # on the CPU, as it is read from a file

    def check(self) -> None:
        """All is well."""


def real(function: Any) -> Any:
    """`function`, on tensors that have numbers, also where others are faked."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """A GPU that there is not. What makes index arrays on the host goes on to make real ones."""
    monkeypatch.setattr(devices, "GPU", GPU.type)
    monkeypatch.setattr(rows, "gpu_rows", lambda dtype, device: rows.TorchRows())  # ours need a GPU
    for module, names in HOST.items():
        for name in names.split():
            owner, _, attribute = name.rpartition(".")
            holder = getattr(module, owner) if owner else module
            monkeypatch.setattr(holder, attribute, real(getattr(holder, attribute)))
    with FakeTensorMode() as mode:
        yield mode


HOST: dict[Any, str] = {
    runner: "attn_batch step_integers",
    graphs: "shape_of fill_up Graphs._integers",
    flashinfer: "_check workspace_bytes",
    device_draws: "packed on_host",
}


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Qwen3Config(**SIZES, tie_word_embeddings=True)])
@pytest.mark.parametrize("recording", [False, True])
def test_every_tensor_of_a_step_is_on_the_gpu(mode: FakeTensorMode, config: Any, recording: bool) -> None:
    transfers, library = FakeTransfers(mode), FakeLibrary()
    model = LlamaModel(FakeWeights(), config, dtype=torch.bfloat16, device=GPU)
    pool = KVPool(NUM_SLOTS, model.specs, torch.bfloat16, GPU)
    pool.transfers = transfers
    attention = FlashInferAttention(library, GPU, torch.bfloat16, transfers)
    recorded: list[Callable[[], Tensor]] = []

    def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recorded.append(run)
        return run

    replays = Graphs(model, attention, pool, transfers, record) if recording else None
    steps = StepRunner(model, attention, CostModel(price=0.0), pool, replays)
    drawer = DeviceDrawer(frozenset({2}), TorchOperations(), transfers)
    for seed in range(6):
        make = real(decode_step if seed % 2 else lambda rng, size: random_step(rng, NUM_SLOTS)[2])
        layout: Layout = make(random.Random(seed), 4)
        transfers.waits, library.launches = 0, 0
        logits = steps.forward(layout)
        assert logits.device == GPU and logits.dtype == torch.float32
        assert logits.shape == (len(layout.logit_rows), config.vocab_size)
        assert library.launches >= config.num_hidden_layers and transfers.waits == 0
        draws = [Draw(request, number % len(logits)) for number, request in enumerate(requests())]
        assert len(drawer.draw(logits, draws)) == len(draws)
        assert transfers.waits == 1, "a step waits for its tokens, and for nothing else"
    assert bool(recorded) == recording


def requests() -> list[Request]:
    """One of each kind that is drawn in another way."""
    with unset_fake_temporarily():
        allowed = torch.arange(400) % 3 == 0
    kinds: list[dict[str, Any]] = [
        {"sampling": SamplingParams(temperature=0)},
        {"sampling": SamplingParams()},
        {"sampling": SamplingParams(top_k=5, top_p=0.9, min_p=0.1)},
        {"sampling": SamplingParams(), "repeated": Repeated(Penalties(frequency=1.0, bias={3: 1.0}))},
        {"constraint": SimpleNamespace(mask=lambda: allowed, is_finished=False)},
    ]
    return [Request(tokens=array("i", [5]), num_prompt=1, on_done=lambda _: None, **kind) for kind in kinds]


LITERAL = re.compile(r"(cpu|cuda)(:\d+)?")


@pytest.mark.parametrize("path", sorted(ROOT.glob("runtime/**/*.py")), ids=lambda path: path.name)
def test_only_configuration_names_kinds_of_devices(path: Path) -> None:
    """A tensor that is made on a device by name is on the wrong one sooner or later."""
    if path.name in ("config.py", "devices.py"):
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not LITERAL.fullmatch(node.value), f"{path}:{node.lineno} names a device: ask runtime/devices.py"
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and path.name not in ("transfers.py", "graphs.py"):
            raise AssertionError(f"{path}:{node.lineno} asks CUDA itself: ask runtime/devices.py")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    devices._warn_once.cache_clear()


@pytest.mark.usefixtures("driver")
def test_a_build_of_torch_without_cuda_beside_a_gpu_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices.torch.version, "cuda", None)
    for _ in range(2):
        assert EngineConfig().torch_device() == devices.CPU
    (message,) = caplog.messages
    assert message.startswith("the model runs on the CPU: there is an NVIDIA driver, but torch ")
    assert message.endswith("a build without CUDA. Install torch's CUDA build, from the index that pytorch.org names.")
    with pytest.raises(EngineError, match=r"Engine: device 'cuda:0' cannot be used: there is an NVIDIA driver, but"):
        EngineConfig(device="cuda:0").torch_device()


@pytest.mark.usefixtures("driver")
def test_an_old_driver_is_told_in_torch_s_own_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_available() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=2)
        return False

    monkeypatch.setattr(devices.torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices.torch.cuda, "is_available", is_available)
    assert EngineConfig().torch_device() == devices.CPU
    assert caplog.messages == [
        "the model runs on the CPU: CUDA initialization: The NVIDIA driver on your system is too old"
    ]


def test_a_machine_without_a_gpu_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    monkeypatch.setattr(devices.torch.version, "cuda", None)
    assert EngineConfig().torch_device() == devices.CPU
    assert not caplog.messages
    with pytest.raises(EngineError, match=r"Engine: device 'cuda' cannot be used: no GPU is found"):
        EngineConfig(device="cuda").torch_device()


def test_no_memory_at_the_start_gives_sizes_and_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.runtime.config.total_bytes", lambda device: 80 << 30)
    monkeypatch.setattr("branchwise.runtime.config.free_bytes", lambda device: 3 << 30)
    with pytest.raises(EngineError) as raised, no_memory(GPU, "the weights", "dtype"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB")
    assert str(raised.value) == (
        "Engine: there is no memory for the weights: meta has 80.0 GiB, 3.0 GiB of it free. Change dtype."
    )


def test_a_gpu_s_memory_is_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "GPU", GPU.type)
    monkeypatch.setattr("branchwise.runtime.config.free_bytes", lambda device: 102 << 30)
    assert auto_num_slots(1 << 17, 8192, GPU) == int((100 << 30) * 0.85) // (1 << 17)
    monkeypatch.setattr("branchwise.runtime.config.free_bytes", lambda device: 1 << 30)
    assert auto_num_slots(1 << 17, 8192, GPU) == 2048

"""Tokens drawn on a device are those drawn on the host, and cost one wait a step."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.runtime.device_draws import DeviceDrawer, TorchOperations
from branchwise.runtime.draws import Draw, HostDrawer
from branchwise.runtime.errors import ConstraintError, EngineError
from branchwise.runtime.penalties import Penalties, Repeated
from branchwise.runtime.request import Request
from branchwise.runtime.sampling import SamplingParams
from branchwise.runtime.transfers import DirectTransfers

SIZE, ENDS = 70, frozenset({3})
CPU = torch.device("cpu")


class Counting(DirectTransfers):
    """Counts what waits."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1

    def read(self, values: Tensor) -> Tensor:
        self.wait()
        return super().read(values)


def on_device() -> tuple[DeviceDrawer, Counting]:
    transfers = Counting(CPU)
    return DeviceDrawer(ENDS, TorchOperations(), transfers), transfers


def random_request(rng: random.Random, number: int) -> Request:
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 3.0]),
        top_p=rng.choice([1.0, 0.9, 0.3]),
        top_k=rng.choice([None, 1, 7, 10**6]),
        min_p=rng.choice([0.0, 0.1]),
        seed=rng.randrange(100),
        sample=number,
    )
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        bias = {rng.randrange(SIZE): rng.choice([-3.0, 5.0, float("-inf")]) for _ in range(3)}
        presence, repetition = rng.choice([0.0, 0.7]), rng.choice([1.0, 1.7])
        options["repeated"] = Repeated(Penalties(frequency=0.3, presence=presence, repetition=repetition, bias=bias))
    if rng.random() < 0.5:
        allowed = torch.rand(SIZE) < 0.5
        allowed[rng.randrange(SIZE)] = True
        options["constraint"] = SimpleNamespace(mask=lambda: allowed, is_finished=False)
        options["ignore_eos"] = rng.random() < 0.5
    tokens = array("i", rng.choices(range(SIZE), k=9))
    if rng.random() < 0.3:
        options["min_tokens"] = 7
        options["stop_ids"] = frozenset({8, 9})
    return Request(tokens=tokens, num_prompt=5, on_done=lambda _: None, sampling=sampling, **options)


def copied(requests: list[Request]) -> list[Request]:
    """The same for another drawer: what was said is read on by each."""
    for request in requests:
        if request.repeated is not None:
            request.repeated = Repeated(request.repeated._penalties)
    return requests


@pytest.mark.parametrize("seed", range(60))
def test_all_that_a_request_may_ask_for_is_drawn_alike(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    logits = torch.round(torch.randn(4, SIZE) * 3, decimals=1)  # some are equal
    requests = [random_request(rng, number) for number in range(12)]
    drawer, transfers = on_device()
    found: list[list[str]] = []
    for each in (HostDrawer(ENDS), drawer):
        draws = [Draw(request, number % 4) for number, request in enumerate(copied(requests))]
        found.append([repr(token) for token in each.draw(logits, draws)])
    assert found[0] == found[1]
    assert transfers.waits == 1


def test_failures_are_those_of_their_requests() -> None:
    logits = torch.zeros(3, SIZE)
    logits[1] = torch.nan
    everything = Repeated(Penalties(bias=dict.fromkeys(range(SIZE), float("-inf"))))

    def broken() -> Tensor:
        raise ValueError("a mask that cannot be had")

    large, fine = torch.ones(SIZE + 64).bool(), torch.arange(SIZE) == 7
    options: list[dict[str, Any]] = [
        {"sampling": SamplingParams(temperature=0)},
        {"sampling": SamplingParams(top_p=0.5)},
        {"sampling": SamplingParams(), "repeated": everything},
        {"constraint": SimpleNamespace(mask=broken, is_finished=False)},
        {"constraint": SimpleNamespace(mask=lambda: large, is_finished=False)},
        {"constraint": SimpleNamespace(mask=lambda: fine, is_finished=False)},
    ]
    requests = [Request(tokens=array("i", [5]), num_prompt=1, on_done=lambda _: None, **one) for one in options]
    drawer, _ = on_device()
    rows = [0, 1, 2, 0, 0, 2]
    found = drawer.draw(logits, [Draw(one, row) for one, row in zip(requests, rows, strict=True)])
    first, second, third, fourth, fifth, sixth = found
    assert isinstance(first, int) and isinstance(fifth, ValueError) and sixth == 7
    assert isinstance(second, EngineError) and "not numbers (nan)" in str(second)
    assert isinstance(third, ConstraintError) and isinstance(fourth, ValueError)


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(1, SIZE)
    before = logits.clone()
    biased = Repeated(Penalties(bias={0: 100.0}))
    request = Request(tokens=array("i", [5]), num_prompt=1, on_done=lambda _: None, repeated=biased)
    drawer, _ = on_device()
    assert drawer.draw(logits, [Draw(request, 0)]) == [0]
    assert torch.equal(logits, before)

"""Another rank of an engine: a process that computes its share of each step until rank 0 ends it. See `parallel.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ..attention.choice import attention_for
from ..attention.levels import CostModel
from ..devices import on
from ..kv import KVPool
from ..model.load import load_model
from ..runner import StepRunner
from .parallel import HOST, STARTING, Job, Links, Settings, dist
from .wire import decode


def main(job: Job) -> None:
    """Load a share of the model, and follow."""
    torch.set_num_threads(job.threads)
    device, dtype = torch.device(job.device), getattr(torch, job.dtype)
    with on(device):
        follow(job, device, dtype)


def follow(job: Job, device: torch.device, dtype: torch.dtype) -> None:
    """Run what rank 0 sends, until it ends."""
    store = dist.TCPStore(HOST, job.port, job.size, is_master=False, timeout=STARTING)
    links = Links(store, job.rank, job.size, device)
    model = load_model(Path(job.folder), dtype=dtype, device=device, split=links.split())
    settings = Settings.decoded(links.receive())
    pool = KVPool(settings.num_slots, model.specs, dtype, device, settings.page_size)
    attention, _ = attention_for(model, pool)
    cost = CostModel(settings.price, settings.max_levels, settings.least_saved)
    runner = StepRunner(model, attention, cost, pool)
    links.meet()
    while True:
        runner.forward(decode(links.receive()))


if __name__ == "__main__":
    try:
        main(Job(**json.loads(sys.argv[1])))
    except RuntimeError as error:
        sys.exit(f"rank of a branchwise engine: {error}")

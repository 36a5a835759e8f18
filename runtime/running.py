"""How a model's steps are run: by what there is where it runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from . import calibration
from .attention.choice import attention_for
from .attention.flashinfer import FlashInferAttention
from .devices import gpu_name, is_gpu
from .graphs import Graphs, record_on
from .kv import KVPool
from .model import Model
from .model.llama import LlamaModel
from .runner import StepRunner


def runner_for(model: Model, pool: KVPool, cuda_graphs: bool) -> StepRunner:
    """Decode steps of the Llama family are recorded on a GPU if `cuda_graphs`; others' code may wait for the GPU."""
    attention, cost = attention_for(model, pool)
    if not (is_gpu(model.device) and isinstance(attention, FlashInferAttention)):
        return StepRunner(model, attention, cost, pool)
    record, spec = record_on(model.device), model.specs[0]
    measure = partial(calibration.measure, attention, spec, pool.dtype, model.device, record)
    saved = calibration.least_saved(measure, gpu_name(model.device), attention.version, spec, pool.dtype)
    graphs = None
    if cuda_graphs and isinstance(model, LlamaModel):
        graphs = Graphs(model, attention, pool, pool.transfers, record)
    return StepRunner(model, attention, replace(cost, least_saved=saved), pool, graphs)

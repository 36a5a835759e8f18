"""How a model's steps are run: by what there is where it runs."""

from __future__ import annotations

from .attention.choice import attention_for
from .attention.flashinfer import FlashInferAttention
from .devices import is_gpu
from .graphs import Graphs, record_on
from .kv import KVPool
from .model import Model
from .model.llama import LlamaModel
from .runner import StepRunner
from .transfers import transfers_for


def runner_for(model: Model, pool: KVPool, cuda_graphs: bool) -> StepRunner:
    """Decode steps of the Llama family are recorded on a GPU if `cuda_graphs`; others' code may wait for the GPU."""
    attention, cost = attention_for(model, pool)
    transfers = transfers_for(model.device)
    graphs = None
    wanted = cuda_graphs and is_gpu(model.device) and isinstance(model, LlamaModel)
    if wanted and isinstance(attention, FlashInferAttention):
        graphs = Graphs(model, attention, pool, transfers, record_on(model.device))
    return StepRunner(model, attention, cost, pool, graphs, transfers)

"""How a model's steps are run: by what there is where it runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from .attention.choice import attention_for, deterministic_attention
from .attention.flashinfer import FlashInferAttention
from .devices import gpu_name, is_gpu
from .gpu import calibration
from .gpu.graphs import Graphs, record_on
from .kv import KVPool
from .model import Model
from .model.llama import LlamaModel
from .ranks.parallel import ParallelRunner, Settings, Team
from .runner import Runner, StepRunner


def runner_for(
    model: Model, pool: KVPool, *, cuda_graphs: bool = True, deterministic: bool = False, team: Team | None = None
) -> Runner:
    """Decode steps of the Llama family are recorded on a GPU if `cuda_graphs`; others' code may wait for the GPU.

    Those of a team are not: that has not been tried.

    Raises:
        EngineError: what `deterministic` needs cannot be had.
    """
    if deterministic:
        return StepRunner(model, deterministic_attention(), None, pool)
    runner = _alone(model, pool, cuda_graphs=cuda_graphs and team is None)
    if team is None:
        return runner
    cost = runner.cost  # whoever measured: all ranks must share alike
    assert cost is not None
    team.begin(Settings(pool.scratch, pool.page_size, cost.price, cost.max_levels, cost.least_saved))
    return ParallelRunner(runner, team)


def _alone(model: Model, pool: KVPool, *, cuda_graphs: bool) -> StepRunner:
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

"""Which backend computes attention where a model runs, and when it pays there to read a span once for several rows."""

from __future__ import annotations

import logging

from ..devices import gpu_lacks, is_cpu, is_gpu
from ..errors import EngineError
from ..gpu.libraries import Missing, flashinfer, triton
from ..kv import KVPool
from ..messages import shortened
from ..model import Model
from . import Attention
from .cpu import CpuAttention, is_available
from .flashinfer import FlashInferAttention, cost_model, unsupported
from .levels import CostModel
from .reference import ReferenceAttention

log = logging.getLogger("branchwise")


def attention_for(model: Model, pool: KVPool) -> tuple[Attention, CostModel]:
    """The fastest there is. What could not be had, and what is used instead, is logged."""
    if is_cpu(model.device) and is_available():
        attention = CpuAttention()
        attention.prepare(model.specs, pool.dtype)
        return attention, CostModel()
    return _on_gpu(model, pool) if is_gpu(model.device) else (ReferenceAttention(), CostModel())


def deterministic_attention() -> Attention:
    """The one whose bits do not depend on the step; nothing is read once for several rows.

    Raises:
        EngineError: there is no numba to compile it.
    """
    try:
        from .deterministic import DeterministicAttention  # numba, which nobody else must wait for

        return DeterministicAttention()
    except ImportError as error:
        raise EngineError("Engine: deterministic needs numba's compiled code: install it, or leave it out.") from error


def _on_gpu(model: Model, pool: KVPool) -> tuple[Attention, CostModel]:
    lacks = gpu_lacks(model.device)
    reason = lacks or unsupported(model.specs, pool.dtype)
    if reason is None:
        library = flashinfer()
        if not isinstance(library, Missing):
            attention = FlashInferAttention(library, model.device, pool.dtype)
            try:
                attention.try_out(model.specs)
                return attention, cost_model(model.specs, pool.dtype)
            except Exception as error:  # no compiler, a driver that is too old for what was compiled, and what else not
                reason = f"{type(error).__name__}: {shortened(' '.join(str(error).split()), 300)}"
        else:
            reason = library.reason
    if lacks is None:
        missing = triton(model.device)
        if not isinstance(missing, Missing):
            from .triton import TritonAttention

            own = TritonAttention(model.device)
            try:
                own.try_out(model.specs, pool.dtype)
                log.warning("attention runs on kernels of our own, slower: FlashInfer cannot be used (%s)", reason)
                return own, cost_model(model.specs, pool.dtype)
            except Exception as error:  # heads too large for this GPU
                missing = Missing(f"{type(error).__name__}: {shortened(str(error), 300)}")
        reason += f"; nor Triton: {missing.reason}"
    log.warning("attention runs in plain torch, right and slow: FlashInfer cannot be used (%s)", reason)
    return ReferenceAttention(), CostModel()

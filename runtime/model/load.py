"""A model's folder to the fastest way there is to run it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ..errors import RequestError
from ..probe import speeds
from . import Model
from .configuration import read_config
from .family import fits
from .linear import Quantization
from .llama import LlamaModel
from .split import Split
from .weights import Weights

log = logging.getLogger("branchwise")


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    split: Split | None = None,
    deterministic: bool = False,
) -> Model:
    """Load the model in `folder`, its matrices packed if there is a `quantization`, or a rank's share of it.

    Raises:
        WeightsError: the configuration cannot be used, a weight is missing or misshapen, or
            the model keeps a state that is not keys and values.
        RequestError: the model, the device or this torch cannot be quantised or divided so, or not be deterministic; no
            weight was read.
    """
    config = read_config(folder)
    if fits(config):
        packed_rows = speeds().packed_rows(quantization, dtype) if quantization is not None else 0
        weights = Weights(folder, dtype, device)
        return LlamaModel(
            weights,
            config,
            dtype=dtype,
            device=device,
            quantization=quantization,
            packed_rows=packed_rows,
            split=split,
            deterministic=deterministic,
        )
    if deterministic:
        raise RequestError(
            f"Engine: deterministic is for models like Llama, and {config.model_type} runs on transformers' own code, "
            "whose sums depend on how many rows a step has. Leave it out."
        )
    if quantization is not None:
        raise RequestError(
            f"Engine: quantization {quantization!r} is for models like Llama, and {config.model_type} runs on "
            "transformers' own code. Leave it out."
        )
    if split is not None:
        raise RequestError(
            f"Engine: tensor_parallel is for models like Llama, and {config.model_type} runs on transformers' own "
            "code. Leave it out."
        )
    from .transformers import TransformersModel  # a second of imports that the family above does not need

    log.info("%s runs on transformers' own code, which is somewhat slower", config.model_type)
    return TransformersModel(folder, config, dtype=dtype, device=device)

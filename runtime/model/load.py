"""A model's folder to the fastest way there is to run it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from . import Model
from .configuration import read_config
from .llama import LlamaModel, fits

log = logging.getLogger("branchwise")


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Model:
    """Load the model in `folder`.

    Raises:
        WeightsError: the configuration cannot be used, a weight is missing or misshapen, or
            the model keeps a state that is not keys and values.
    """
    config = read_config(folder)
    if fits(config):
        return LlamaModel(folder, config, dtype=dtype, device=device)
    from .transformers import TransformersModel  # a second of imports that the family above does not need

    log.info("%s runs on transformers' own code, which is somewhat slower", config.model_type)
    return TransformersModel(folder, config, dtype=dtype, device=device)

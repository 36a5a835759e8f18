"""A model's configuration, or what is wrong with it by the name of its file."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from ..errors import WeightsError
from ..messages import shortened, shown
from ..models import read_json


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration in `folder`, as transformers reads it.

    Raises:
        WeightsError: it names no model that transformers knows, or has a value that its model refuses.
    """
    file = folder / "config.json"
    kind = read_json(file).get("model_type")
    if not kind:
        raise WeightsError(f'{file} has no "model_type", so there is no telling what to run. Fetch it again.')
    if kind not in CONFIG_MAPPING:
        raise WeightsError(
            f"{file}: transformers {transformers.__version__} knows no model of type {shown(kind)}. "
            "Update transformers, or use another model."
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each model checks its own configuration, and raises what it likes
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        reason = shortened(reason, 300)
        raise WeightsError(f"{file} cannot be used ({reason}). Correct it, or fetch it again.") from error
    return config

"""Any causal language model of transformers, its attention replaced by ours.

transformers calls a registered function where a layer attends; ours writes the step's keys and
values to the pool and asks the attention backend. No mask is built and no cache object is made:
the metadata of the step travels through the model as a keyword.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from ..attention import AttnSpec
from ..errors import WeightsError
from ..messages import shortened
from . import StepInput

NAME = "branchwise"
RECURRENT = {"linear_attention", "mamba", "recurrent", "ssm", "conv"}


class TransformersModel:
    """A model of transformers behind the `Model` protocol."""

    def __init__(self, folder: Path, config: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        """Load the model in `folder`, whose configuration is `config`.

        Raises:
            WeightsError: a weight is missing or misshapen, or the model keeps a state that is not keys and values.
        """
        refuse_recurrent(config)
        self._model = load_weights(folder, dtype).to(device).eval()
        self.dtype, self.device = dtype, device
        text = config.get_text_config()
        self.vocab_size: int = self._model.get_output_embeddings().weight.shape[0]
        self.context_length: int = getattr(text, "max_position_embeddings", None) or 2048
        self.specs = self._probe(text.num_hidden_layers)

    def forward(self, step: StepInput) -> Tensor:
        return self._call(step.tokens, step.positions, step.logit_rows, step)

    def _call(self, tokens: Tensor, positions: Tensor, logit_rows: Tensor, context: StepInput | _Probe) -> Tensor:
        with torch.inference_mode():
            output = self._model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logit_rows,
                branchwise_step=context,
            )
        logits: Tensor = output.logits[0].float()
        return logits

    def _probe(self, num_layers: int) -> tuple[AttnSpec, ...]:
        """What each layer asks of attention, found by running one token."""
        probe = _Probe()
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._call(zero, zero, zero, probe)
        if sorted(probe.specs) != list(range(num_layers)):
            raise WeightsError(
                f"{type(self._model).__name__}: {num_layers} layers, but only {len(probe.specs)} of them keep "
                "per-token keys and values; recurrent and hybrid models cannot be run."
            )
        return tuple(probe.specs[layer] for layer in range(num_layers))


class _Probe:
    """Takes the place of a step, and notes how each layer attends."""

    def __init__(self) -> None:
        self.specs: dict[int, AttnSpec] = {}

    def note(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: dict[str, Any]) -> None:
        if k.shape != v.shape or options.get("s_aux") is not None:
            raise WeightsError("attention with values of another size than the keys, or with sinks, cannot be run.")
        self.specs[layer] = AttnSpec(
            num_q_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[3],
            scale=scale,
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
        )


def attend_through_pool(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    branchwise_step: StepInput | _Probe,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of one layer, as transformers calls it.

    Args:
        q: [1, H, T, D], positions applied.
        k, v: [1, K, T, D].

    Returns:
        [1, T, H, D], and no weights.
    """
    assert attention_mask is None, "a mask was built for attention that needs none"
    layer: int = module.layer_idx
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    rows = q[0].transpose(0, 1)                                            # [T, H, D]
    match branchwise_step:
        case _Probe() as probe:
            probe.note(layer, q, k, v, scale, options)
            out = torch.zeros_like(rows)
        case StepInput(write_slots=slots, attention=attention, pool=pool):
            pool.write(layer, slots, k[0].transpose(0, 1), v[0].transpose(0, 1))
            out = attention.forward(layer, rows, pool.k[layer], pool.v[layer])
    return out[None], None


AttentionInterface.register(NAME, attend_through_pool)


def refuse_recurrent(config: transformers.PreTrainedConfig) -> None:
    """Raise `WeightsError` if some layer keeps a recurrent state; such a state cannot be shared by prefix."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or []) & RECURRENT
    if kinds:
        raise WeightsError(
            f"{config.model_type}: layers of kind {', '.join(sorted(kinds))} keep a recurrent state, which cannot "
            "be shared by prefix. Use a model whose layers all attend."
        )


def load_weights(folder: Path, dtype: torch.dtype) -> Any:
    """The model in `folder` with every weight from its safetensors files; none is left random."""
    if not sys.stderr.isatty():
        disable_progress_bar()  # bars are for people who watch
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are told below, all of them
            output_loading_info=True,
        )
    except KeyError as error:
        raise WeightsError(
            f"{folder / 'config.json'} asks for {error}, which transformers {transformers.__version__} does not know. "
            "Update transformers, or use another model."
        ) from error
    except Exception as error:  # what is wrong with a folder is raised as whatever it caused in there
        reason = shortened(" ".join(str(error).split()) or type(error).__name__, 300)
        raise WeightsError(f"{folder}: the weights cannot be loaded: {reason}") from error
    model, info = loaded
    problems = [f"missing {name}" for name in sorted(info["missing_keys"])]
    problems += [f"{name} has shape {tuple(a)}, not {tuple(b)}" for name, a, b in sorted(info["mismatched_keys"])]
    if problems:
        shown = "; ".join(problems[:4])
        raise WeightsError(f"{folder}: {len(problems)} weights do not fit the configuration: {shown}.")
    return model

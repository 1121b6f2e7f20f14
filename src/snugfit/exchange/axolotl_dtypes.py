"""What axolotl keeps in 32 bits where weights are in 4 bits.

peft's `prepare_model_for_kbit_training` raises whatever is not quantized to float32. Then axolotl takes the
normalisations, the embeddings and the head back to the dtype of the computation, finding them by their
names. What neither finds (a bias, a position embedding of another name, a router) stays in float32. Read at
067b021c: loaders/model.py (`_configure_embedding_dtypes`, `_convert_embedding_modules_dtype`, the skipped
modules of `_set_quantization_config`) and loaders/utils.py (`get_linear_embedding_layers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snugfit.job.job import Job

_EMBEDDINGS = {
    "gpt_neox": ("embed_in", "embed_out"),
    "falcon": ("word_embeddings", "lm_head"),
    "nemotron_h": ("embeddings", "lm_head"),
}
"""By `model_type`, parts of the names of what axolotl takes for embeddings and head."""

_USUAL_EMBEDDINGS = ("embed_tokens", "lm_head")

_NOT_QUANTIZED = {"falcon_h1": ("out_proj",)}
"""By `model_type`, linear layers that axolotl itself leaves whole."""


def left_in_float32(job: Job) -> list[str]:
    """The parameters that axolotl has in float32 when it trains this job's model in 4 bits, by name."""
    import torch
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    from snugfit.job.build import instantiate

    with torch.device("meta"):
        model = instantiate(job, dtype="float32", attention="sdpa")
    kind = str(job.model.config.get("model_type"))
    whole = [*get_keys_to_not_convert(model), *_NOT_QUANTIZED.get(kind, ())]
    embeddings = _EMBEDDINGS.get(kind, _USUAL_EMBEDDINGS)
    left = []
    for name, module in model.named_modules():
        is_linear = type(module) in (nn.Linear, Conv1D)
        is_quantized = is_linear and should_convert_module(name, whole)
        if "norm" in name or (any(part in name for part in embeddings) and hasattr(module, "weight")):
            continue
        for own, _ in module.named_parameters(recurse=False):
            if not (is_quantized and own == "weight"):
                left.append(f"{name}.{own}".lstrip("."))
    return left

"""The architecture of a served model: its config, and transformers' model class on `meta`."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from snugfit.errors import ModelError, one_line
from snugfit.hub_kernels import only_errors
from snugfit.job.architectures import class_names
from snugfit.job.model import Model

if TYPE_CHECKING:
    from torch import nn

CLASSES = ("AutoModelForImageTextToText", "AutoModelForCausalLM")
"""transformers' auto classes of models that generate text. Those with an image encoder come first."""


@lru_cache(maxsize=32)
def served_config(model: Model) -> Any:
    """Return the transformers config of a model, which must not be changed.

    Raises `ModelError` for a model that no inference engine here serves, because it is no text decoder.
    """
    config = model.transformers_config("causal-lm", 2)
    # The text model's config decides, and transformers 5 ties the head of Mistral 3 regardless of it.
    if "tie_word_embeddings" in model.config.get("text_config", {}):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings
    # Encoders such as BERT also have a class for causal language modeling.
    encodes = bool(class_names("masked-lm", model.architecture))
    if encodes or config.is_encoder_decoder or _class_of(config) is None:
        raise ModelError(
            f"{model.name} ({model.architecture}) is not a decoder of text, so its server is not predicted. "
            "Allowed are decoders, such as Llama-3.1-8B. Name one of those."
        )
    return config


def build_without_data(model: Model) -> nn.Module:
    """Build the model of a config on `meta`, in bfloat16.

    Raises `ModelError` for a config that transformers cannot use.
    """
    import torch

    config = served_config(model)
    auto = _class_of(config)
    try:
        with torch.device("meta"), only_errors(once=(auto, type(config))):
            built: nn.Module = auto.from_config(config, trust_remote_code=False, dtype=torch.bfloat16)
    except Exception as error:
        raise ModelError(
            f"{model.name}: transformers cannot build it: {one_line(error, 1000)} Correct the config.json, "
            "or try another version of transformers."
        ) from error
    return built


def _class_of(config: Any) -> Any:
    """Return the auto class that builds this config; None without one."""
    import transformers

    for name in CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto
    return None

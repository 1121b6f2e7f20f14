"""The dtype of a model's weights: its checkpoint's, its module's, or the requested one.

Names are torch's (`bfloat16`). transformers 5 loads a checkpoint in the dtype that its config names. If the
config names none, it uses the dtype of the first floating-point tensor (`modeling_utils._get_dtype`, dtype
"auto").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in which a model's weights can be loaded. The first is the default."""

KEYS = ("dtype", "torch_dtype")
"""Config keys that name the dtype of a model's weights. The second is the older one."""

SHORT_NAMES = {
    "half": "float16", "float": "float32", "double": "float64", "bf16": "bfloat16", "fp16": "float16",
    "fp32": "float32",
}  # fmt: skip
"""torch's names of dtypes, by further names that people write, such as `half`."""

STORED_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""torch's names of the dtypes that weights can have, by safetensors' names."""

LOST_BELOW = {"bfloat16": "1/256", "float16": "1/2048"}
"""Ratio of update to weight below which adding the update does not change the weight, by the 16-bit dtype of
both.

The dtypes have 8 and 11 significant bits. Micikevicius et al. (arXiv 1710.03740, section 3.1) therefore keep
a copy of the weights in fp32 under mixed precision.
"""


def dtype_name(dtype: object) -> str:
    """Return torch's own name for a dtype: `float16` for `torch.float16` and for `half`."""
    name = str(dtype).removeprefix("torch.")
    return SHORT_NAMES.get(name, name)


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a config.json names; None if it names none.

    The config of a model with several parts may name it only in its text model.
    """
    # The config of a model with several parts may name it only in its text model.
    for part in (config, config.get("text_config") or {}):
        for key in KEYS:
            if name := part.get(key):
                return dtype_name(name)
    return None


def file_dtype(file: Path) -> str | None:
    """Return the dtype of the first floating-point tensor in a file of safetensors.

    It is None if the file has none, or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            # transformers takes the first floating-point tensor's dtype if the config names none.
            kinds = (tensors.get_slice(name).get_dtype() for name in tensors.keys())  # noqa: SIM118
            return next((STORED_NAMES[kind] for kind in kinds if kind in STORED_NAMES), None)
    except (SafetensorError, OSError):
        return None


def main_dtype(module: nn.Module) -> str | None:
    """Return the dtype of most of a module's floating-point weights; None if it has none. Weights of a lazy
    module have no size yet.
    """
    from torch.nn.parameter import is_lazy

    sizes: Counter[str] = Counter()
    for parameter in module.parameters():
        # A lazy parameter has no shape yet.
        if parameter.is_floating_point() and not is_lazy(parameter):
            sizes[dtype_name(parameter.dtype)] += parameter.numel()
    return max(sizes, key=lambda name: sizes[name], default=None)


def cast_weights(module: nn.Module, dtype: str) -> nn.Module:
    """Cast the floating-point weights of a module in place, and return it.

    Adapters of a model that peft has adapted stay as they are. peft makes them fp32 next to weights of 16
    bits too (`autocast_adapter_dtype`), and its layers cast their inputs. Trained copies of whole modules
    (`modules_to_save`) are cast like the modules that they replace, since no code casts their inputs. The
    frequencies of transformers' rotary embeddings stay fp32, as in a model that is built in 16 bits. With 8
    significant bits, they would rotate queries and keys by other angles.
    """
    import torch

    adapters = _adapter_weights(module)
    frequencies = {
        id(buffer)
        # With 8 significant bits, rotary frequencies would rotate queries and keys by other angles.
        for part in module.modules()
        if type(part).__module__.startswith("transformers.")
        for name, buffer in part.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    }

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        # peft keeps adapters in fp32 next to 16-bit weights. Their layers cast the inputs.
        is_adapter = tensor.requires_grad and id(tensor) in adapters
        stays = is_adapter or not tensor.is_floating_point() or id(tensor) in frequencies
        return tensor if stays else tensor.to(getattr(torch, dtype))

    return module._apply(cast)  # type: ignore[no-any-return]  # as `module.to` does, tensor by tensor


def _adapter_weights(module: nn.Module) -> set[int]:
    """Return the ids of the weights that peft adds to a model: those of its layers, and of prompts."""
    from torch import nn

    parts = [
        getattr(layer, name, None)
        for layer in module.modules()
        for name in (*getattr(layer, "adapter_layer_names", ()), "prompt_encoder")
        # No code casts inputs for modules that are trained as copies (`modules_to_save`), so they have the
        # model's dtype.
        if name != "modules_to_save"
    ]
    dicts = [part for part in parts if isinstance(part, nn.ModuleDict | nn.ParameterDict)]
    return {id(weight) for part in dicts for weight in part.parameters()}

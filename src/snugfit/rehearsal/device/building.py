"""Building as on a device: what libraries leave out when they see `meta`, and what allocates nevertheless.

A model that is built on a GPU initialises its weights there, and a model that is built on `meta` is taken to
get them later. Most of that happens in place, but some of it makes tensors of its own (Whisper's sinusoids,
rotary frequencies), which come and go among the weights and leave gaps between them: on a measured Whisper
half a per cent of what it reserved. Likewise peft makes its adapters in fp32, casts them to the dtype of what
they adapt, and back again, so that a model in bfloat16 has gaps that `meta` would not have.

An initialisation that reads values fails here, as there are none, and the rest of it is left out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

DEVICE_OF_CONTEXT = "get_torch_context_manager_or_global_device"
"""The function by which transformers finds out whether it builds on `meta`."""


@contextlib.contextmanager
def built_as_on_a_device() -> Iterator[None]:
    """Within it, models and adapters that are built on `meta` are initialised and cast."""
    from transformers import modeling_utils

    with contextlib.ExitStack() as undo:
        if hasattr(modeling_utils, DEVICE_OF_CONTEXT):  # else this transformers initialises on any device
            import torch

            undo.enter_context(patch.object(modeling_utils, DEVICE_OF_CONTEXT, lambda: torch.device("cuda")))
        model: Any = modeling_utils.PreTrainedModel
        if hasattr(model, "initialize_weights"):
            undo.enter_context(
                patch.object(model, "initialize_weights", _as_far_as_it_goes(model.initialize_weights))
            )
        if (tuners := sys.modules.get("peft.tuners.tuners_utils")) is not None:
            layer = tuners.BaseTunerLayer
            name = "_move_adapter_to_device_of_base_layer"
            undo.enter_context(patch.object(layer, name, _cast_too(getattr(layer, name))))
        yield


def _as_far_as_it_goes(initialize: Any) -> Any:
    def initialize_what_goes(model: Any) -> None:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            initialize(model)

    return initialize_what_goes


def _cast_too(move: Any) -> Any:
    """peft's move of an adapter to the device and dtype of its base layer, which passes over `meta`."""
    import torch

    def move_and_cast(layer: Any, adapter_name: str, *arguments: Any, **keywords: Any) -> None:
        move(layer, adapter_name, *arguments, **keywords)
        weight = getattr(layer.get_base_layer(), "weight", None)
        if weight is None or not weight.is_meta or not weight.is_floating_point():
            return
        for name in layer.adapter_layer_names:
            part = getattr(layer, name, None)
            if isinstance(part, torch.nn.ModuleDict) and adapter_name in part:
                part[adapter_name] = part[adapter_name].to(dtype=weight.dtype)

    return move_and_cast

"""Models with weights of 4 or 8 bits in their linear layers, as bitsandbytes and transformers build them.

From a folder, `from_pretrained` quantizes tensor by tensor as it loads. transformers cannot do so with random
weights, so this module does. It builds the model without data, and transformers' own quantizer replaces the
linear layers. Then it draws one weight after another on the device, quantizes it, and drops the original. A
simulation takes the same path on shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import ModelError
from snugfit.features.quantized.fields import MXFP4
from snugfit.features.quantized.packed_experts import has_packed_experts, is_of_experts, pack, pack_experts
from snugfit.job.build import Construction

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

SPREAD = 0.02
"""Standard deviation of random weights if the config has none (`initializer_range`)."""

HEADS = ("classifier", "score")
"""Attribute names of the output heads of transformers' classification models."""


@dataclass(frozen=True, kw_only=True)
class QuantizedConstruction(Construction):
    """Builds a model whose linear layers are quantized, to NF4 in blocks of 64 or to 8-bit integers."""

    bits: int
    """Number of bits of a weight: 4 or 8."""

    double: bool
    """True if the scales of blocks are quantized too."""

    experts: bool | str = False
    """True if the weights of experts are quantized too (`packed_experts.py`); `mxfp4` for that format
    (`mxfp4.py`).
    """

    def config(self, model: Any) -> Any:
        """Return the `BitsAndBytesConfig` of transformers that quantizes this model.

        Its `llm_int8_skip_modules` are transformers' own exceptions, and classifiers, which peft trains
        whole.
        """
        import torch
        from transformers import BitsAndBytesConfig
        from transformers.quantizers.base import get_keys_to_not_convert

        # peft trains the classifier's weights, so they are not quantized.
        whole = [*get_keys_to_not_convert(model), *HEADS]
        if self.bits == 8:
            return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=whole)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            llm_int8_skip_modules=whole,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=getattr(torch, self.loaded_dtype),
        )

    @property
    def loaded_dtype(self) -> str:
        """Dtype of the matrix products, in which weights are loaded before they are quantized."""
        # Weights are quantized from the dtype of the matrix products.
        return self.autocast or self.dtype

    def loading_arguments(self, model: Any) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` that quantize this model."""
        import torch

        arguments = {"quantization_config": self.config(model)}
        if self.experts == MXFP4:
            from snugfit.features.quantized.mxfp4 import loading_arguments

            arguments = loading_arguments(self.config(model), getattr(torch, self.loaded_dtype))
        # With a device map, transformers quantizes tensor by tensor on the device.
        return {**arguments, "device_map": {"": torch.get_default_device()}}

    def doubts(self, config: Mapping[str, Any]) -> Sequence[str]:
        """Return no warning for experts that are built in the format of their files."""
        return () if self.experts == MXFP4 and is_mxfp4(config) else super().doubts(config)

    def refuse_weights(self, weights: Path, config: Mapping[str, Any]) -> None:
        """Raise `ModelError` for a folder whose weights have another format."""
        if self.experts != MXFP4:
            super().refuse_weights(weights, config)
        elif not is_mxfp4(config):
            raise ModelError(
                f"{weights}: experts=mxfp4 needs weights in that format, and its config.json names none. "
                "Give a folder of gpt-oss's own files, or try experts=true."
            )

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the model that `make` creates, quantized and with random weights, on the current default
        device.
        """
        import torch
        from torch.utils._python_dispatch import _disable_current_modes
        from transformers.quantizers import AutoHfQuantizer

        device = torch.get_default_device()
        # Without data, and without recording: only sizes are needed here.
        with _disable_current_modes(), torch.device("meta"), _without_initialization():
            model: Any = make()
            quantizer = AutoHfQuantizer.from_config(self.config(model))
            quantizer.preprocess_model(model=model, device_map=None)
        with _own_code_books(model, device) if self.bits == 4 else contextlib.nullcontext():
            self._materialize(model, device)
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
        for module in model.modules():
            # transformers would initialize quantized weights as ordinary numbers.
            module._is_hf_initialized = _is_quantized(module) or has_packed_experts(module)
        model.initialize_weights()
        return self.finish(model)

    def _materialize(self, model: Any, device: torch.device) -> None:
        """Allocate each tensor of a model on `meta` on the device, module by module."""
        import torch

        spread = getattr(model.config.get_text_config(), "initializer_range", SPREAD)
        new: dict[nn.Parameter, nn.Parameter] = {}  # tied weights appear twice
        # Packing the weights of experts adds modules and removes parameters.
        for module in list(model.modules()):
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if self.experts == MXFP4 and is_of_experts(module, parameter):
                    from snugfit.features.quantized.mxfp4 import random_blocks, store_packed

                    packed = random_blocks(parameter, device, spread)
                    store_packed(module, name, packed, getattr(torch, self.loaded_dtype))
                    continue
                if self.experts and is_of_experts(module, parameter):
                    values = torch.empty_like(parameter, device=device)
                    torch.nn.init.normal_(values, std=spread)
                    module._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
                    # Only the parameter refers to the values, so that packing frees them.
                    del values
                    pack(module, name, double=self.double)
                    continue
                if parameter not in new and name == "weight" and _is_quantized(module):
                    new[parameter] = self._random_weight(parameter, device, spread)
                elif parameter not in new:
                    data = torch.empty_like(parameter, device=device)
                    new[parameter] = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
                    # Biases of linear layers and of experts are zeros in transformers.
                    if _is_quantized(module) or has_packed_experts(module):
                        torch.nn.init.zeros_(data)
                # Both names of a tied weight get the same new parameter.
                module._parameters[name] = new[parameter]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device)

    def _random_weight(self, parameter: Any, device: torch.device, spread: float) -> nn.Parameter:
        """Return a quantized weight of random numbers, in place of a parameter on `meta`.

        bitsandbytes calls `_quantize` when such a weight first moves to a device other than `meta`.
        """
        import torch
        from bitsandbytes.nn import Int8Params, Params4bit

        values = torch.empty(parameter.shape, dtype=getattr(torch, self.loaded_dtype), device=device)
        torch.nn.init.normal_(values, std=spread)
        kind = Params4bit if self.bits == 4 else Int8Params
        weight: Any = kind(values, requires_grad=False, **vars(parameter))._quantize(device)
        weight._is_hf_initialized = True  # otherwise an outer module would initialize it
        return weight  # type: ignore[no-any-return]

    def finish(self, model: Any) -> nn.Module:
        """Return the model with unquantized weights cast to `dtype`. Its attribute for the device map is
        removed.
        """
        import torch

        vars(model).pop("hf_device_map", None)
        if self.experts is True:
            # Experts that were loaded from a folder.
            pack_experts(model, double=self.double)
        dtype, computed = getattr(torch, self.dtype), getattr(torch, self.loaded_dtype)
        for parameter in model.parameters():
            # peft casts unquantized weights to fp32 too (`prepare_model_for_kbit_training`).
            if parameter.dtype == computed != dtype:
                parameter.data = parameter.data.to(dtype)
        return model  # type: ignore[no-any-return]


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return True if a model's config states weights in MXFP4."""
    stored = config.get("quantization_config")
    return isinstance(stored, dict) and stored.get("quant_method") == MXFP4


def scales_in_order(weight: Any) -> list[tuple[Any, str]]:
    """Return the objects and attribute names of the tensors that bitsandbytes stores beside a quantized
    weight, such as scales.

    The order is that of `QuantState.to` (bitsandbytes 0.50): code book and scales, then those of the scales.
    The list is empty for any other weight.
    """
    state = getattr(weight, "quant_state", None)
    if state is None:
        return []
    # With nested scales, `state2` has the scales of scales.
    nested = [(state, "offset"), (state.state2, "absmax"), (state.state2, "code")] if state.nested else []
    return [(state, "code"), (state, "absmax"), *nested]


def _is_quantized(module: nn.Module) -> bool:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    return isinstance(module, Linear4bit | Linear8bitLt)


@contextlib.contextmanager
def _without_initialization() -> Iterator[None]:
    """Context in which transformers does not initialize the weights of a model on `meta`.

    A simulation needs this too, because there transformers is given a device to build on.
    """
    from unittest.mock import patch

    from transformers import PreTrainedModel

    with patch.object(PreTrainedModel, "initialize_weights", lambda model: None):
        yield


@contextlib.contextmanager
def _own_code_books(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which a model on `meta` gets an 8-bit code book (table of values) of its own.

    bitsandbytes caches the first 8-bit code book for the rest of a process, on its first device. A real model
    would then use a code book without data. The code book of a `meta` model stays unwritten, because
    `torch.tensor`, which creates it elsewhere, is no operator in a trace.
    """
    import torch
    from bitsandbytes import functional

    if device.type != "meta":
        yield
        return
    # bitsandbytes caches the first code book for the process, which must not be one without data.
    book = vars(model)["code_book"] = torch.empty(256, dtype=torch.float32, device=device)
    from unittest.mock import patch

    with patch.dict(functional.name2qmap, {"dynamic": book}):
        yield

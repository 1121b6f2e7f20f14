"""Construction of a job's real model: transformers' own class, built from the values of its config.

The model is built under the ambient `torch.device`. On `meta` it has shapes and no data. On a GPU it has
random weights or those of a folder. An exception inside transformers becomes an error about its usual cause:
a config that the installed version cannot use. The message names the offending key.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

from snugfit.errors import ModelError, RecipeError, SnugfitError, missing_package_message, one_line
from snugfit.hub_kernels import only_errors
from snugfit.job.architectures import class_of, heads, transformers_version
from snugfit.job.clone import clone_to_device
from snugfit.job.config import ignored_keys
from snugfit.job.dtype import cast_weights
from snugfit.job.job import Job, refuse_lengths
from snugfit.job.model import Model
from snugfit.job.weights import LoadedWeights, check_loaded, freeze_as

if TYPE_CHECKING:
    import torch
    from torch import nn


OnLoaded = Callable[[LoadedWeights], None]
"""Callback that receives the differences between a folder of weights and the model."""


@dataclass(frozen=True, kw_only=True)
class Construction:
    """Builder of a job's transformers model. A feature may replace it, for example to quantize weights."""

    dtype: str
    """Dtype of the model's weights, by torch's name."""

    autocast: str | None
    """Dtype of the autocast regions in which the model will run; None without autocast."""

    @property
    def loaded_dtype(self) -> str:
        """The dtype in which transformers loads the model's weights."""
        return self.dtype

    def doubts(self, config: Mapping[str, Any]) -> Sequence[str]:
        """Return a warning if the weights that this config describes are quantized, and are not built so."""
        quantization = ignored_keys(config).get("quantization_config")
        if not quantization:
            return ()
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        return (
            'Its config is for quantized weights ("quantization_config": '
            f"{method or 'no method named'}). The prediction is for the unquantized model, with its "
            "weights as the recipe sets them.",
        )

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Build the model by `make` and return it, with random weights, on the ambient device."""
        return make()

    def loading_arguments(self, model: Any) -> dict[str, Any]:
        """Return further arguments of `from_pretrained` to load a model like this one."""
        return {}

    def refuse_weights(self, weights: Path, config: Mapping[str, Any]) -> None:
        """Raise `ModelError` for a folder of weights that cannot be trained. `config` is its model's."""
        if "quantization_config" in ignored_keys(config):
            raise ModelError(
                f'{weights}: its weights are quantized ("quantization_config" in config.json), which snugfit '
                "does not train. Give a folder with the unquantized weights."
            )

    def finish(self, model: nn.Module) -> nn.Module:
        """Return the model to train in place of `model`, after its weights are loaded."""
        return model


def instantiate(
    job: Job,
    *,
    dtype: str | None,
    attention: str,
    autocast: str | None = None,
    construct: Callable[..., Construction] | None = None,
    weights: Path | None = None,
    on_loaded: OnLoaded = lambda loaded: None,
) -> nn.Module:
    """Return the real model of a job on the ambient `torch.device`, in train or eval mode.

    Weights have the dtype `dtype`, or the job's own dtype for None. `construct(dtype=, autocast=)` returns a
    feature's `Construction`. Weights are random, or those of the folder `weights` (`find_weights`). Raises
    `ModelError` for a config that transformers cannot use or weights that the folder does not have. Raises
    `RecipeError` for an attention that the architecture does not have.
    """
    import torch
    from safetensors import SafetensorError

    module = job.model.module
    if module is not None:
        # The user's module stays as it is; each run trains a copy.
        clone = clone_to_device(module).train(job.trains)
        return clone if dtype is None else cast_weights(clone, dtype)
    dtype = dtype or job.dtype
    refuse_lengths(job, job.config_to_read().to_dict())
    construction = (construct or Construction)(dtype=dtype, autocast=autocast)

    def build(attention: str) -> nn.Module:
        return _from_facts(job, attention, weights, on_loaded, construction).train(job.trains)

    try:
        with without_package_checks(attention, torch.get_default_device()):
            return build(attention)
    except SafetensorError as damage:
        raise ModelError(
            f"{weights} has weights that cannot be read: {one_line(damage, 1000)}. Save them again with "
            "save_pretrained, or name another folder."
        ) from None
    except Exception as error:
        # transformers names this argument in its errors about attention.
        if "attn_implementation" not in str(error):
            _blame_config(job.model, error)
        if attention != "sdpa":
            message = f"{job.model.name} cannot use the attention {attention!r}: {one_line(error, 1000)}"
            raise RecipeError(message) from None
    # transformers makes the same choice by default, since some architectures (Gemma 2) have no
    # scaled_dot_product_attention. `model.config._attn_implementation` is the model's choice.
    return build("eager")


@contextlib.contextmanager
def without_package_checks(attention: str, device: torch.device) -> Iterator[None]:
    """Context in which a model on `meta` may name an attention implementation of a missing package, and no
    kernel is downloaded from the hub.

    On `meta` no kernel runs, so the package is not needed.
    """
    if not attention.startswith("flash_attention") or device.type != "meta":
        yield
        return
    from unittest.mock import patch

    from transformers import modeling_utils as models

    # transformers' own check would import the package and require a GPU.
    def can_dispatch(model: Any, *_: Any, **__: Any) -> bool:
        if not model._supports_flash_attn:
            raise ValueError(f"attn_implementation: transformers has none for {type(model).__name__}")
        return True

    with contextlib.ExitStack() as undo:
        undo.enter_context(patch.object(models.PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch))
        # With this package, transformers would fetch a kernel from the hub.
        undo.enter_context(patch.object(models, "lazy_import_flash_attention", lambda *_, **__: None))
        undo.enter_context(patch.object(models, "is_kernels_available", lambda *_, **__: False))
        yield


def _from_facts(
    job: Job, attention: str, weights: Path | None, on_loaded: OnLoaded, construction: Construction
) -> nn.Module:
    import torch
    import transformers

    config = job.transformers_config()
    if config.model_type in job.added_task.classes:
        auto_class = class_of(job.task, config)
    else:
        auto_class = getattr(transformers, heads()[job.task][0])
    dtype = getattr(torch, construction.loaded_dtype)
    arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    model: nn.Module
    if weights is None:
        return construction.build(lambda: _from_config(job, auto_class, config, arguments))
    construction.refuse_weights(weights, job.model.config)
    # The same model without data is built for the names of frozen weights and further loading arguments.
    with torch.device("meta"):
        built = _from_config(job, auto_class, config, arguments)
    try:
        # `check_loaded` returns sentences that replace this table of weights.
        with patch.object(logging.getLogger("transformers.modeling_utils"), "warning"):
            model, loaded = auto_class.from_pretrained(
                weights,
                config=config,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_loaded` refuses them by name
                **arguments,
                **construction.loading_arguments(built),
            )
    # transformers raises this for fused weights of which parts are missing.
    except RuntimeError as error:
        if "automatic conversion" not in str(error):
            raise
        raise ModelError(
            f"{weights}: the weights of {job.model.name} cannot be loaded from its files: parts are "
            "missing or have other shapes (an expert, a half of a fused matrix). Give a complete folder."
        ) from None
    on_loaded(check_loaded(model, weights, loaded))
    freeze_as(built, model)
    return construction.finish(model)


def _from_config(job: Job, auto_class: Any, config: Any, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the model that transformers builds from a config alone. Its head and dtypes are as after loading
    a checkpoint.

    FLAN-T5, T5 1.1 and mT5 were trained with a head of their own: their configs have `tie_word_embeddings:
    false`. transformers 5 nevertheless ties the head (`configuration_t5.py`). It unties the head when it
    loads weights and finds two different ones (`tie_weights`), and that is the model that people fine-tune.
    """
    import torch

    with only_errors(once=(auto_class, type(config))):  # the code of a model may import torchao
        if hasattr(auto_class, "from_config"):
            model: nn.Module = auto_class.from_config(config, trust_remote_code=False, **arguments)
        else:
            # Auto classes call the same method of the class that they choose.
            model = auto_class._from_config(config, **arguments)
    _keep_in_fp32(model, arguments["dtype"])
    head = getattr(model, "lm_head", None)
    untied = config.is_encoder_decoder and job.model.config.get("tie_word_embeddings") is False
    if untied and isinstance(head, torch.nn.Linear):
        head.weight = torch.nn.Parameter(_copy_of(head.weight))
        getattr(model, "all_tied_weights_keys", {}).pop("lm_head.weight", None)
    return model


def _copy_of(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a weight. If DeepSpeed's `zero.Init` has partitioned it, fetch its values first."""
    if not hasattr(weight, "ds_id"):
        return weight.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters(weight):
        return weight.detach().clone()


def _keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast to fp32 the weights that `from_pretrained` leaves in fp32 when weights of 16 bits are requested.

    `from_config` does not do so (`_get_dtype_plan` and `core_model_loading.py` of transformers). Some weights
    overflow in fp16, such as `wo` of T5. Others are strictly fp32, such as the bias of DeepSeek-V3's router.
    """
    import torch

    # In bfloat16, which has fp32's range, only the weights that are strictly fp32 stay in fp32.
    suffixes = {torch.float16: ("", "_strict"), torch.bfloat16: ("_strict",)}.get(dtype, ())
    names = (f"_keep_in_fp32_modules{suffix}" for suffix in suffixes)
    parts = [part for name in names for part in getattr(model, name, None) or ()]
    pattern = re.compile("|".join(part.replace("*", ".*") for part in parts))
    for name, tensor in model.state_dict(keep_vars=True).items() if parts else ():
        if tensor.is_floating_point() and pattern.search(name):
            tensor.data = tensor.data.float()


def _blame_config(model: Model, error: Exception) -> NoReturn:
    """Raise `ModelError` that names the model's config, on which a constructor of transformers failed.

    An out-of-memory error, a subclass of `RuntimeError`, passes unchanged. Errors of snugfit's own code,
    which a simulation runs while a model is built, pass unchanged too.
    """
    # Subclasses are errors of the device, such as torch's out of memory.
    narrower = isinstance(error, RuntimeError) and type(error) is not RuntimeError
    if narrower or isinstance(error, SnugfitError) or _is_from("snugfit", error):
        raise error
    if isinstance(error, KeyError) and (key := _key_of(error.args[0], model.config)):
        message = f'"{key}" is {json.dumps(error.args[0])}, which transformers {transformers_version()}'
        raise ModelError(
            f"{model.name}: {message} does not know. Correct that value in the config.json, or install "
            "another version of transformers."
        ) from error
    if lacking := missing_package_message(model.name, error):
        raise ModelError(lacking) from error
    kind = type(error).__name__
    if _is_from("deepspeed", error):
        raise ModelError(
            f"{model.name}: DeepSpeed failed while it was built ({kind}): {one_line(error, 1000)}. It "
            "compiles operators when they are first used: install a compiler, and set "
            "TORCH_CUDA_ARCH_LIST to versions such as 9.0, not 9.0a."
        ) from error
    raise ModelError(
        f"{model.name}: transformers cannot build it ({kind}): {one_line(error, 1000)} Correct the value in "
        f"the config.json, or try another version than transformers {transformers_version()}."
    ) from error


def _is_from(package: str, error: Exception) -> bool:
    """Return True if code of `package` itself raised the error, and not a library that it calls."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The last frame is the one that raised.
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith(f"{package}.")


def _key_of(value: object, config: Mapping[str, Any]) -> str | None:
    """Return the config key, or the dotted path to it, whose value is this text; None if there is none."""
    for key, content in config.items():
        if isinstance(content, dict) and (inner := _key_of(value, content)):
            return f"{key}.{inner}"
        if isinstance(value, str) and content == value:
            return key
    return None

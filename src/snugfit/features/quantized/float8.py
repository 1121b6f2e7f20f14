"""Conversion of linear layers to torchao's `Float8Linear`, which multiplies in 8-bit floats.

The linear layers inside the model's repeated (transformer) layers are converted. The head and the modules
around them stay unchanged, as in torchtitan. A converted layer has the same parameter under the same name, so
optimizers and checkpoints need no change.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from snugfit.errors import RecipeError
from snugfit.features.quantized.fields import FLOAT8, FLOAT8_MULTIPLE
from snugfit.hub_kernels import import_torchao
from snugfit.step.checkpointing import layer_names, layer_stacks
from snugfit.step.wishes.handler import Handler, LiveTraining, ScriptContext
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.features.quantized.fields import Float8Wish
    from snugfit.job.job import Job


class Float8Handler(Handler):
    """Handler that applies the field `float8`: it replaces linear layers by torchao's, which multiply in
    8-bit floats.
    """

    wish, slot, stage = FLOAT8.name, Slot.PRECISION, InstallStage.REPLACE
    change_words = "products of linear layers are those of"

    def import_code(self, value: Float8Wish) -> None:
        """Import torchao before a simulation or a measurement starts."""
        import_torchao()

    def wrap(self, value: Float8Wish, model: Any) -> None:
        """Replace the model's linear layers by torchao's, with the same parameters."""
        convert(model, value)

    def undo(self, live: LiveTraining) -> None:
        """Restore the original linear layers of a model in training."""
        put_back(live.model)

    def script(self, value: Float8Wish, context: ScriptContext) -> dict[str, Any]:
        """Return the lines of an exported script that call torchao's conversion on the same layers."""
        return {"converting": script_lines(value, context.job)}


def convert(model: torch.nn.Module, wish: Float8Wish) -> None:
    """Replace this model's linear layers by torchao's. Raises `RecipeError` if none can be converted."""
    import_torchao()
    from torch.utils._python_dispatch import _disable_current_modes
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if reason := why_unconverted(model):
        raise RecipeError(f"{reason}. Try 'bf16'.")
    chosen = {id(module) for module in convertible(model)}
    # The number of tokens is the inner dimension for a weight's gradient, and may not be a multiple of 16.
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(wish.recipe), pad_inner_dim=True)
    # The original layers are stored before the conversion, in order to undo it.
    before = {name: module for name, module in model.named_modules() if id(module) in chosen}
    # torchao creates each layer on `meta` first, and a simulation would count it as a device tensor
    with _disable_current_modes():
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda submodule, name: id(submodule) in chosen
        )
    for name, module in before.items():
        converted = model.get_submodule(name)
        # torchao's converted layers are in training mode at first.
        converted.train(module.training)
        _ORIGINAL_LINEARS[converted] = module


def convertible(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the linear layers that may be converted: plain `nn.Linear` with trained weights, inside of the
    repeated layers.
    """
    import torch

    # The output head stays in 16 bits, as in torchtitan.
    for layers in layer_stacks(model):
        for module in (submodule for layer in layers for submodule in layer.modules()):
            if (
                # A subclass may compute a different result.
                type(module) is torch.nn.Linear
                and module.weight.requires_grad
                and not any(size % FLOAT8_MULTIPLE for size in module.weight.shape)
            ):
                yield module


def why_unconverted(model: torch.nn.Module) -> str:
    """Return the reason why no linear layer of a model can be converted to 8-bit floats; empty if some
    can.
    """
    if any(convertible(model)):
        return ""
    return (
        f"{type(model).__name__} has no torch.nn.Linear that trains in a stack of equal layers. Its sizes "
        f"must be multiples of {FLOAT8_MULTIPLE}, else no product is computed in 8-bit floats"
    )


def put_back(model: torch.nn.Module) -> None:
    """Restore the original linear layers of a converted model. Layers that the user converted stay
    converted.
    """
    if "torchao" not in sys.modules:
        return
    # A list, because the loop changes the modules.
    for name, module in list(model.named_modules()):
        if module in _ORIGINAL_LINEARS:
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, _ORIGINAL_LINEARS.pop(module))


_ORIGINAL_LINEARS: WeakKeyDictionary[torch.nn.Module, torch.nn.Module] = WeakKeyDictionary()
"""The original linear layer of each converted one."""


def script_lines(wish: Float8Wish, job: Job) -> tuple[str, ...]:
    """Return Python lines that convert the same layers of this job's `model`, for scripts without snugfit."""
    return (
        "from dataclasses import replace",
        "",
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training",
        "",
        "chosen = {",
        "    id(linear)",
        "    for layer in model.modules()",
        f"    if type(layer).__name__ in {layer_names(job)!r}",
        "    for linear in layer.modules()",
        "    if type(linear) is torch.nn.Linear",
        f"    and not any(size % {FLOAT8_MULTIPLE} for size in linear.weight.shape)",
        "}",
        f'config = replace(Float8LinearConfig.from_recipe_name("{wish.recipe}"), pad_inner_dim=True)',
        "convert_to_float8_training(",
        "    model, config=config, module_filter_fn=lambda module, name: id(module) in chosen",
        ")",
    )

"""A recipe, done to a live model, optimizer and loader.

    weights_dtype, attention, checkpoint   to the model
    optimizer                              made from the user's groups, where the recipe names one
    loader                                 torch's `DataLoader` once more, with workers or page-locked memory
    autocast, scale_gradients, matmul,     in the step
    micro_batches
    adapt                                  refused: adapters decide which parameters the optimizer is given

Everything that can be refused is refused before anything is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError, UsageError
from snugfit.frontends.custom_loop.batches import is_plain, made_like
from snugfit.step.checkpointing import checkpoint_layers, stop_own_checkpointing
from snugfit.step.install import call, dtype_of, resolve
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup

WRAPPED = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Classes that train a model on several devices."""

ALIKE = ("lr", "initial_lr", "weight_decay", "maximize")
"""What a group says that means the same to every optimizer that knows the word."""


def device_of_model(model: Any, optimizer: Any) -> torch.device:
    """Where all of the model is. Raises `UsageError` for what cannot be trained by hand here: a model that is
    wrapped or spread over devices, an optimizer of other parameters."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"accelerate takes a model, an nn.Module, first, and not {_kind(model)}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"accelerate takes a torch optimizer second, and not {_kind(optimizer)}.")
    if any(each.__name__ in WRAPPED for each in type(model).__mro__):
        raise UsageError(
            f"The model is wrapped in {type(model).__name__}; accelerate trains one model on one device. Give"
            " the model itself."
        )
    places = sorted({str(each.device) for each in model.parameters()})
    if len(places) != 1 or places == ["meta"]:
        where = "has no parameters" if not places else f"is on {', '.join(places)}"
        raise UsageError(
            f"The model {where}; accelerate trains a model on one device. Move it: model.to(...)."
        )
    own = {id(each) for each in model.parameters()}
    strange = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]
    if strange:
        raise UsageError(
            f"The optimizer holds {len(strange)} parameters that are not this model's. Make it from"
            " model.parameters() after the last change of the model (adapters, tied weights)."
        )
    return torch.device(places[0])


def _kind(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


def refuse(model: Any, optimizer: Any, loader: Any, recipe: Recipe, scheduler: Any) -> None:
    """Raises `RecipeError` for wishes that these cannot be given, by name."""
    wrong = list(_refusals(model, optimizer, loader, recipe, recipe.setup()))
    if not _is_plain(recipe, Slot.OPTIMIZER) and hasattr(scheduler, "state_dict"):
        wrong.append(
            f"{recipe[Slot.OPTIMIZER]}: the scheduler belongs to the optimizer whose place this one takes."
            " Give a function that makes it: scheduler=lambda optimizer: LambdaLR(optimizer, ...)."
        )
    if wrong:
        raise RecipeError("\n".join([f"{recipe} cannot be given to this model:", *wrong]))


def _refusals(model: Any, optimizer: Any, loader: Any, recipe: Recipe, setup: Setup) -> Iterator[str]:
    if setup.adapt is not None and not hasattr(model, "peft_config"):
        yield (
            f"{recipe[Slot.ADAPTERS]}: the optimizer was made for all parameters. Adapt the model first"
            " (peft.get_peft_model), make the optimizer from what trains then, and leave this out."
        )
    if getattr(model, "is_quantized", False) and dtype_of(model) != setup.weights_dtype:
        yield f"{recipe[Slot.PRECISION]}: the model's weights are quantized and stay what they are."
    if not _is_plain(recipe, Slot.ATTENTION) and not hasattr(model, "set_attn_implementation"):
        yield f"{recipe[Slot.ATTENTION]}: {type(model).__name__} lets nobody choose its attention."
    changes = not _is_plain(recipe, Slot.OPTIMIZER) or dtype_of(model) != setup.weights_dtype
    if changes and optimizer.state:
        yield "The optimizer has taken steps already. Call accelerate before the first."
    if not _is_plain(recipe, Slot.OPTIMIZER) and (lost := _lost_decay(optimizer, setup)):
        yield f"{recipe[Slot.OPTIMIZER]} knows no weight decay, and a group of the optimizer has {lost:g}."
    if _asks_for_another(loader, setup) and not is_plain(loader):
        yield (
            f"{recipe[Slot.LOADING]}: the loader is {_kind(loader)}, which snugfit cannot make once more."
            " Have it do that itself, and leave this out."
        )


def _is_plain(recipe: Recipe, slot: Slot) -> bool:
    return bool(recipe[slot] == roster.plain(slot))


def _lost_decay(optimizer: Any, setup: Setup) -> float:
    if setup.optimizer.weight_decay:
        return 0.0
    return max((float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups), default=0.0)


def apply(model: Any, recipe: Recipe) -> list[str]:
    """Does to the model what the recipe asks; gives a line for each thing that is another now."""
    import torch

    setup, told = recipe.setup(), []
    now = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not _is_plain(recipe, Slot.ATTENTION) and now != setup.attention:
        _choose_attention(model, setup.attention)  # first: only this may be refused yet
        told.append(f"attention was {now} and is {setup.attention}")
    if (before := dtype_of(model)) != setup.weights_dtype:
        model.to(getattr(torch, setup.weights_dtype))
        told.append(f"weights were {before} and are {setup.weights_dtype}")
    stop_own_checkpointing(model)
    if setup.checkpoint is not None:
        checkpoint_layers(model, setup.checkpoint)
        told.append(f"activations are those of {recipe[Slot.CHECKPOINTING]}")
    return told


def _choose_attention(model: Any, wanted: str) -> None:
    try:
        model.set_attn_implementation(wanted)
    except ValueError as refusal:
        line = " ".join(str(refusal).split())
        raise RecipeError(f"{type(model).__name__} cannot use the attention {wanted!r}: {line}") from None


def optimizer_for(model: Any, given: Any, recipe: Recipe) -> Any:
    """The recipe's optimizer over the user's groups, with their numbers as far as it knows them; the user's
    own where the recipe names none."""
    if _is_plain(recipe, Slot.OPTIMIZER):
        return given
    wish = recipe.setup().optimizer
    if wish.prepare:
        call(wish.prepare, model)
    accepted = {*inspect.signature(resolve(wish.factory.path)).parameters, "params", "initial_lr"}
    alike = {"params", *ALIKE, *(("betas", "eps") if "betas" in accepted else ())}
    taken = (alike & accepted) - set(wish.factory.arguments)
    return call(
        wish.factory, [{name: group[name] for name in taken & set(group)} for group in given.param_groups]
    )


def loader_for(loader: Any, setup: Setup, device: torch.device) -> Any:
    """The user's loader; torch's own once more where the recipe wants workers or page-locked memory."""
    if not _asks_for_another(loader, setup):
        return loader
    pinned = loader.pin_memory or (setup.loader.pinned and device.type == "cuda")
    return made_like(loader, num_workers=setup.loader.workers or loader.num_workers, pin_memory=pinned)


def _asks_for_another(loader: Any, setup: Setup) -> bool:
    wish = setup.loader
    return bool(
        (wish.workers and wish.workers != getattr(loader, "num_workers", None))
        or (wish.pinned and not getattr(loader, "pin_memory", False))
    )

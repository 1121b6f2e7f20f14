"""Apply a recipe to a live model, optimizer and loader by the one applier (`step/applier.py`).

Slots that the recipe does not name stay the user's: attention, optimizer, existing adapters, a loader. A
named optimizer is created from the user's groups. Torch's own `DataLoader` is recreated for workers or
page-locked memory. All refusals precede the first change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.frontends.loader import is_plain, made_like
from snugfit.step.applier import change_live, loader_arguments, objections
from snugfit.step.applier import refuse as refuse_for
from snugfit.step.wishes.handler import LiveTraining
from snugfit.step.wishes.model import dtype_of
from snugfit.step.wishes.optimizer import known_numbers, make_optimizer
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot
from snugfit.training.checkpoint.optimizer_state import refuse_optimizer, refuse_schedule
from snugfit.training.checkpoint.state import refuse_unpackable

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup

WRAPPED = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Classes that train a model on several devices."""


def device_of_model(model: Any, optimizer: Any) -> torch.device:
    """Return the device of the whole model.

    Raises `UsageError` for a wrapped model, one spread over devices, or an optimizer of other parameters.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"The first argument of accelerate must be a model (nn.Module), not {_kind(model)}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"The second argument of accelerate must be a torch optimizer, not {_kind(optimizer)}."
        )
    rates = [group.get("lr") for group in optimizer.param_groups]
    if None in rates:
        raise UsageError(
            f"{_kind(optimizer, 'The')} has the learning rate None and computes its own. A run reads the "
            "rate of each step from the optimizer. Create it with a number, as in lr=1e-3 (Adafactor: "
            "relative_step=False too)."
        )
    if any(kind.__name__ in WRAPPED for kind in type(model).__mro__):
        raise UsageError(
            f"The model is wrapped in {type(model).__name__}. accelerate trains one model on one device. "
            "Give the model itself."
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        where = "has no parameters" if not devices else f"is on {', '.join(devices)}"
        raise UsageError(
            f"The model {where}. accelerate trains a model on one device. Move it: model.to(...)."
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [parameter for parameter in held if id(parameter) not in own]
    if strange:
        raise UsageError(
            f"The optimizer has {len(strange)} parameters that do not belong to this model. Create it from "
            "model.parameters() after the last change of the model (adapters, tied weights)."
        )
    return torch.device(devices[0])


def _kind(given: Any, article: str = "a") -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"{article} {type(given).__name__}"


def live_of(model: Any, recipe: Recipe, device: torch.device) -> LiveTraining:
    """Return the user's model in the applier's format."""
    return LiveTraining(front_end="custom_loop", recipe=recipe, model=model, device=device)


def user_slots(live: LiveTraining) -> frozenset[Slot]:
    """Return the slots that stay the user's: those without a technique in the recipe, and existing
    adapters."""
    unnamed = {slot for slot in (Slot.ATTENTION, Slot.OPTIMIZER) if live.is_plain(slot)}
    return frozenset(unnamed | {Slot.ADAPTERS} if hasattr(live.model, "peft_config") else unnamed)


def is_schedule(given: Any) -> bool:
    """Return True for a schedule, False for a class or a function that creates one."""
    return not isinstance(given, type) and hasattr(given, "state_dict") and hasattr(given, "step")


def refuse(live: LiveTraining, optimizer: Any, loader: Any, scheduler: Any, *, keeps: bool) -> None:
    """Refuse unsupported settings, optimizers and schedules.

    Raises `RecipeError` with the names of unsupported settings. Raises `UsageError` for an optimizer or a
    schedule that cannot step, or that a run with checkpoints (`keeps`) cannot save.
    """
    refuse_optimizer(optimizer, keeps=keeps)
    setup = live.recipe.setup()
    reasons = [*objections(live, setup, user_slots(live)), *_objections(live, setup, optimizer, loader)]
    if not live.is_plain(Slot.OPTIMIZER) and is_schedule(scheduler):
        reasons.append(
            f"{live.technique(Slot.OPTIMIZER)}: the scheduler belongs to the optimizer that the recipe "
            "replaces. Give a function that creates it: scheduler=lambda optimizer: LambdaLR(optimizer, "
            "...)."
        )
    refuse_for(live, "model", reasons)
    if scheduler is not None:
        of = optimizer if is_schedule(scheduler) else _trial_optimizer(optimizer, live.recipe)
        schedule = scheduler if is_schedule(scheduler) else scheduler(of)
        refuse_schedule(schedule)
        if keeps:
            refuse_unpackable("scheduler", schedule, schedule.state_dict(), of)


def _trial_optimizer(given: Any, recipe: Recipe) -> Any:
    """Return the run's optimizer over dummy parameters, to create and check a schedule with it."""
    import torch

    trial = copy(given)
    trial.state = defaultdict(dict)
    trial.param_groups = [
        {**group, "params": [torch.nn.Parameter(torch.zeros(1))]} for group in given.param_groups
    ]
    return optimizer_for(None, trial, recipe)


def _objections(live: LiveTraining, setup: Setup, optimizer: Any, loader: Any) -> Iterator[str]:
    """Yield conflicts of the recipe with the optimizer and the loader."""
    another = not live.is_plain(Slot.OPTIMIZER)
    is_cast = setup.weights_dtype not in (None, dtype_of(live.model))
    if (another or is_cast) and _has_stepped(optimizer):
        yield "The optimizer has already taken steps. Call accelerate before the first step."
    elif is_cast and not another and optimizer.state:  # Adagrad creates its states in its constructor
        yield (
            f"{live.technique(Slot.PRECISION)}: {_kind(optimizer, 'the')} has states for "
            f"{dtype_of(live.model)} weights already. Convert the model before the optimizer is created, or "
            "leave the precision out."
        )
    if another and (lost := _lost_decay(optimizer, setup)):
        name = live.technique(Slot.OPTIMIZER)
        yield f"{name} has no weight decay, but a group of the optimizer has {lost:g}."
    if _changed_arguments(loader, setup, live.device) and not is_plain(loader):
        yield (
            f"{live.technique(Slot.LOADING)}: the loader is {_kind(loader)}, which snugfit cannot rebuild. "
            "Set this up in the loader, and leave it out of the recipe."
        )


def _has_stepped(optimizer: Any) -> bool:
    """Return True if a step created a state; a state with step 0 dates from the constructor."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def _lost_decay(optimizer: Any, setup: Setup) -> float:
    if setup.optimizer.weight_decay:
        return 0.0
    return max((float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups), default=0.0)


def apply(live: LiveTraining) -> list[str]:
    """Apply the recipe to the model; return one line for each replaced part."""
    return change_live(live, live.recipe.setup(), user_slots(live))


def optimizer_for(model: Any, given: Any, recipe: Recipe) -> Any:
    """Return the recipe's optimizer over the user's groups, with the hyperparameters that it supports.

    Return the user's optimizer if the recipe names none. Without a model, nothing is prepared in it.
    """
    if recipe[Slot.OPTIMIZER] == roster.plain(Slot.OPTIMIZER):
        return given
    wish = recipe.setup().optimizer
    groups = [
        {name: group[name] for name in ("params", "initial_lr") if name in group} | known_numbers(wish, group)
        for group in given.param_groups
    ]
    return make_optimizer(wish, model, groups)


def loader_for(loader: Any, setup: Setup, device: torch.device) -> Any:
    """Return the user's loader, or a new torch `DataLoader` for the recipe's workers or page-locked
    memory."""
    changed = _changed_arguments(loader, setup, device)
    return made_like(loader, **changed) if changed else loader


def _changed_arguments(loader: Any, setup: Setup, device: torch.device) -> dict[str, Any]:
    """Return the loader arguments of the recipe that this loader lacks."""
    asked = loader_arguments(setup, device)
    return {name: value for name, value in asked.items() if value and value != getattr(loader, name, None)}

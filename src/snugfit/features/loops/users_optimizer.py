"""A user's optimizer and learning-rate schedule: the refusal of those that cannot be resumed, and the facts
by which a checkpoint recognizes the others (`training/checkpoint/facts.py`).

Values that cannot be saved (an object, a function, another optimizer) raise an error that names them. An
optimizer that updates weights within the backward pass is refused too: a rejected step would already have
changed weights.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.training.checkpoint.facts import FACTOR, NO_FACT, Facts, flatten, plain_value

if TYPE_CHECKING:
    import torch

_STEPS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000)
"""Step numbers at which a learning rate schedule is evaluated for comparison (chosen)."""

_NO_GROUP_FACTS = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Fields of an optimizer's parameter group that are not compared, since they only select an implementation.
"""

_PROGRESS = frozenset({"last_epoch", "base_lrs", "lr_lambdas", "verbose"})
"""Fields of a schedule's state that are progress, not settings. Fields with a leading `_` are no settings
either."""


def refuse_optimizer(optimizer: Any, *, keeps: bool) -> None:
    """Raise `UsageError` for an optimizer whose steps cannot be checked or repeated.

    If the run `keeps` checkpoints, an optimizer that wraps other optimizers is refused too.
    """
    kind = type(optimizer).__name__
    # The first attribute identifies transformers' layerwise optimizers, the second one LOMO.
    if hasattr(optimizer, "optimizer_dict") or hasattr(optimizer, "fused_backward"):
        raise UsageError(
            f"{kind} updates weights during the backward pass. Then no step can be stopped before its "
            "update, or repeated. Use an optimizer that updates after it (not a layerwise one), or train "
            "without snugfit."
        )
    if (needed := _argument_of_step(optimizer)) is not None:
        raise UsageError(
            f"{kind}.step() needs {needed!r}, because it computes the loss several times per step, but "
            "snugfit computes it once. Use another optimizer, or train without snugfit."
        )
    inner = [name for name, value in vars(optimizer).items() if _holds_optimizers(value)]
    if keeps and inner:
        raise UsageError(
            f"{kind} contains other optimizers ({', '.join(inner)}), whose states no checkpoint would "
            "contain. Give only the inner one, or train without snugfit."
        )


def _argument_of_step(owner: Any) -> str | None:
    """Return the name of the first required argument of an optimizer's or a schedule's `step`; None without
    one.
    """
    try:  # of the class, since schedules wrap the object's method
        parameters = list(inspect.signature(type(owner).step).parameters.values())[1:]
    except (AttributeError, TypeError, ValueError):
        return None
    flexible = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return next(
        (part.name for part in parameters if part.default is part.empty and part.kind not in flexible), None
    )


def _holds_optimizers(value: Any) -> bool:
    import torch

    if isinstance(value, Mapping):
        value = list(value.values())
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(part, torch.optim.Optimizer) for part in values)


def refuse_schedule(scheduler: Any) -> None:
    """Raise `UsageError` for a schedule whose `step` needs arguments."""
    if (needed := _argument_of_step(scheduler)) is not None:
        raise UsageError(
            f"{type(scheduler).__name__}.step() needs {needed!r}, but snugfit steps a scheduler once per "
            "step, without arguments. Leave scheduler out and step it in your loop. Checkpoints then save "
            "the learning rate that it set, but not its own state."
        )


# ---- facts -------------------------------------------------------------------------------------------------


def optimizer_facts(optimizer: torch.optim.Optimizer) -> Facts:
    """Return properties that identify a new optimizer: its class, and the numbers in its parameter groups.

    After a first step this is its class alone, because some optimizers count steps in their groups.
    """
    facts: Facts = {"optimizer.class": type(optimizer).__name__}
    if optimizer.state:
        return facts
    names = dict.fromkeys(name for group in optimizer.param_groups for name in group)
    for name in (name for name in names if name not in _NO_GROUP_FACTS):
        source = [
            # A new schedule changes `lr`, so `initial_lr` is recorded.
            group.get("initial_lr", group.get("lr")) if name == "lr" else group.get(name)
            for group in optimizer.param_groups
        ]
        values = [plain_value(value) for value in source]
        if not any(value is NO_FACT for value in values):
            facts[f"optimizer.{name}"] = values[0] if values.count(values[0]) == len(values) else values
    return facts


def schedule_facts(scheduler: Any, prefix: str = "schedule") -> Facts:
    """Return properties that identify a new schedule: its class, its settings, its factors, and those of its
    inner schedules.

    After a first step this is its class alone.
    """
    facts: Facts = {f"{prefix}.class": type(scheduler).__name__}
    if getattr(scheduler, "last_epoch", 0) not in (0, -1):
        return facts
    settings = {name: value for name, value in scheduler.state_dict().items() if name not in _PROGRESS}
    facts |= flatten(prefix, settings)
    for number, part in enumerate(getattr(scheduler, "_schedulers", ())):
        facts |= schedule_facts(part, f"{prefix}.{number}")
    return facts | _factors(scheduler, prefix)


def _factors(scheduler: Any, prefix: str) -> Facts:
    """Return the learning-rate factors that a schedule's functions compute for some steps.

    Callable objects are not called, because they may have a state.
    """
    facts: Facts = {}
    for number, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        if not isinstance(getattr(function, "func", function), types.FunctionType):
            continue
        group = f", group {number}" if number else ""
        for step in _STEPS:
            try:
                facts[f"{prefix}{FACTOR} {step}{group}"] = float(function(step))
            except Exception:  # such as the end of a table; training will raise it again
                break
    return facts


def settings_of(prefix: str, owner: Any) -> Facts:
    """Return the class and the plain public attributes of a user's object, such as a collator's mask rate, to
    compare runs.

    A function has no such attributes.
    """
    if owner is None or isinstance(owner, types.FunctionType | types.MethodType | functools.partial):
        return {}
    return {f"{prefix}.class": type(owner).__name__, **flatten(prefix, getattr(owner, "__dict__", {}))}

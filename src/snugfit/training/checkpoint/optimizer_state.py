"""Saving and restoring of an optimizer's state.

States are saved and restored unchanged. torch's own `load_state_dict` casts each state to its parameter's
dtype, which would round Adafactor's fp32 moments of bf16 weights. bitsandbytes' `state_dict` changes the form
of its states for FSDP.

Some optimizers store more than torch requires: states under names instead of parameters, numbers and tensors
as attributes. These are saved too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.techniques.registry import hooks
from snugfit.training.checkpoint.parts import state_parts, updated_elsewhere

if TYPE_CHECKING:
    import torch

_TORCHS_OWN = frozenset({"defaults", "state", "param_groups"})
"""Attributes that every torch optimizer has. A checkpoint saves them separately from a subclass's own."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters in all groups of the optimizer."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's states, its groups without their parameters, and its own numbers and tensors.

    States are stored by their parameter's index over all groups, or by name if they belong to no parameter.
    States that are spread over processes are this process's own, with groups of all weights.
    """
    parameters = parameters_of(optimizer)
    own = {id(weight) for weight in parameters}
    local = state_parts().local_optimizer(optimizer)
    return {
        "states": {
            index: dict(local.state[weight])
            for index, weight in enumerate(parameters)
            if weight in local.state
        },
        "named_states": {key: value for key, value in local.state.items() if id(key) not in own},
        "attributes": dict(_own_attributes(local)),
        "groups": [{**group, "params": len(group["params"])} for group in optimizer.param_groups],
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore an optimizer's saved state, as `optimizer_state` returned it; this process restores only the
    states of its own weights.

    Raises `SnugfitError` for another optimizer's state.
    """
    parameters = parameters_of(optimizer)
    counts, before = (
        [_count(group) for group in groups] for groups in (optimizer.param_groups, saved["groups"])
    )
    if counts != before:
        raise SnugfitError(
            f"The checkpoint's optimizer has groups of {before} parameters, but this run's has {counts}. "
            "Another job or recipe wrote it, or groups were added during the run. Add them before."
        )
    local = state_parts().local_optimizer(optimizer)
    elsewhere = {id(weight) for weight in updated_elsewhere(optimizer)}
    # Optimizer states that a constructor creates (Adagrad's) must not stay beside the loaded ones.
    local.state.clear()
    for index, state in saved["states"].items():
        if id(weight := parameters[index]) not in elsewhere:
            local.state[weight] = dict(state)
            # Some features move optimizer states into CUDA managed memory again.
            for place_state in hooks("place_state"):
                place_state(local, weight)
    local.state.update(saved.get("named_states", {}))
    vars(local).update(saved.get("attributes", {}))
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})


def _count(group: Mapping[str, Any]) -> int:
    parameters = group["params"]
    return parameters if isinstance(parameters, int) else len(parameters)


def _own_attributes(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield numbers and tensors in the optimizer's attributes, such as its count of steps, but no flags."""
    import torch

    for name, value in vars(optimizer).items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in _TORCHS_OWN and (number or isinstance(value, torch.Tensor)):
            yield name, value

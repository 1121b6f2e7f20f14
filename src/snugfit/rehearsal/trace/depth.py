"""Find the number of layers of a model, and create the same model with fewer layers.

This is possible under two conditions. Its config counts its layers once. The layers between the first and the
last repeat with a period: either all are of one kind, or kinds alternate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.job.build import instantiate
from snugfit.job.config import LAYERS
from snugfit.step.applier import model_arguments

if TYPE_CHECKING:
    from torch import nn

    from snugfit.job.job import Job
    from snugfit.techniques.setup import CheckpointWish, Setup


@dataclass(frozen=True)
class Depth:
    """Number of layers of a model, and the config keys by which this number can be changed."""

    keys: tuple[str, ...]
    """Config keys that count the layers."""
    layers: int
    """Number of layers in each stack, which is the common value of these keys."""
    period: int
    """Number of layers after which the pattern of layer types repeats."""

    def shallower(self, job: Job, layers: int) -> Job:
        """Return the job with a model of this many layers; config lists with an entry per layer are
        truncated.
        """
        facts = {
            key: value[:layers] if isinstance(value, list) and len(value) == self.layers else value
            for key, value in job.model.config.items()
        }
        model = type(job.model).from_config(
            facts | dict.fromkeys(self.keys, layers), name=job.model.name, origin=job.model.origin
        )
        return replace(job, model=model)


def depth_of(job: Job, setup: Setup) -> Depth | None:
    """Return the number of layers of the job's model as a `Depth`. Return None if its config has no such
    number, or if different layers do not alternate regularly.
    """
    config = job.model.config
    keys = tuple(sorted(key for key in LAYERS if isinstance(config.get(key), int)))
    counts = {config[key] for key in keys}
    if job.model.module is not None or len(counts) != 1:
        return None
    layers = counts.pop()
    # Only the complete config has the layer types for the forward pass (`layer_types`).
    complete = job.config_to_read().to_dict()
    per_layer = [value for value in complete.values() if isinstance(value, list) and len(value) == layers]
    period = math.lcm(*(_period_of(value) for value in per_layer)) if per_layer else 1
    # At least four periods: three in the shallow model, and one more in the deeper one.
    if period * 4 > layers or not is_periodic(_meta_model(job, setup), layers, period):
        return None
    return Depth(keys, layers, period)


def _periodic_checkpoint(wish: CheckpointWish | None, layers: int) -> tuple[CheckpointWish | None, int]:
    """Return checkpointing settings that divide a model of any depth in the same way as `wish` divides
    `layers` layers. Return also the period: the number of layers after which they repeat.

    Settings for the first few layers have the whole depth as their period.
    """
    if wish is None:
        return None, 1
    # The first layers do not repeat, so the whole depth counts as one period.
    if wish.first is not None:
        return wish, layers
    if wish.layers_per_span:
        return wish, wish.layers_per_span * wish.every
    # The number of spans is fixed at that of the full depth; `count` more layers lengthen each by one.
    count = len(replace(wish, every=1).cut(layers))
    return replace(wish, spans=count), count


class PeriodicSetup(NamedTuple):
    """Training settings whose checkpointing divides a model of any depth in the same way."""

    setup: Setup
    period: int
    """Number of layers after which the pattern of checkpointed layers repeats."""
    equal_layers: int
    """Number of layers in one group. Checkpointing treats all groups alike."""


def periodic_setup(setup: Setup, layers: int) -> PeriodicSetup:
    """Return the Setup with checkpointing that divides a model of any depth as it divides one of `layers`
    layers."""
    wish, period = _periodic_checkpoint(setup.checkpoint, layers)
    equal_layers = period if wish and wish.layers_per_span else 1
    return PeriodicSetup(setup.with_fields(checkpoint=wish), period, equal_layers)


def _period_of(values: Sequence[Any]) -> int:
    """Return the number of entries after which a list repeats itself, or its length if it does not."""
    return next(
        period for period in range(1, len(values) + 1) if list(values[period:]) == list(values[:-period])
    )


def _meta_model(job: Job, setup: Setup) -> nn.Module:
    import torch

    with torch.device("meta"):
        return instantiate(job, **{**model_arguments(setup), "construct": None})


def is_periodic(model: nn.Module, layers: int, period: int) -> bool:
    """Return True if layers repeat with this period: each equals the one a period later, except in the first
    and the last period.
    """
    import torch

    stacks = [
        list(module)
        for module in model.modules()
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) == layers
    ]
    for stack in stacks:
        kinds = [_description(layer) for layer in stack]
        # Each shallow model has a first, a last and one period between, so only those between must be equal.
        if any(kinds[at] != kinds[at + period] for at in range(period, layers - 2 * period)):
            return False
    return bool(stacks)


def _description(layer: nn.Module) -> list[Any]:
    """Return the modules, shapes and scalar attributes of a layer, without its layer number."""
    return [
        (
            name,
            type(module),
            [(key, tensor.shape, tensor.dtype) for key, tensor in module.named_parameters(recurse=False)],
            [(key, tensor.shape, tensor.dtype) for key, tensor in module.named_buffers(recurse=False)],
            {
                key: value
                for key, value in vars(module).items()
                # Layer numbers differ in every layer, so the comparison excludes them.
                if isinstance(value, (bool, int, float, str, type(None))) and not _is_number(key)
            },
        )
        for name, module in layer.named_modules()
    ]


def _is_number(key: str) -> bool:
    """Return True if an attribute of this name contains the layer number."""
    return key.endswith(("idx", "index", "layer_id"))

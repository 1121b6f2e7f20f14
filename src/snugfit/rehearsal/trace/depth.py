"""How deep a model is, and the same model with fewer layers.

A model can be made shallower when its config counts its layers once, and when the layers between the first
and the last repeat with a period: one kind of layer all through, or kinds that alternate. The kinds show in
two places. The complete config lists them (`layer_types`), where forward passes look them up. And the whole
model, built without data, shows each layer's modules, shapes and switches; a config key that makes the first
three layers dense, or every fourth one another, shows there whatever the key is called.
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
    """The layers of a model whose depth can be changed."""

    keys: tuple[str, ...]
    """Config keys that count the layers."""
    layers: int
    """Their one value: layers of each stack."""
    period: int
    """Layers after which their kinds repeat."""

    def shallower(self, job: Job, layers: int) -> Job:
        """The job on a model with this many layers; lists with an entry for each layer are cut."""
        facts = {
            key: value[:layers] if isinstance(value, list) and len(value) == self.layers else value
            for key, value in job.model.config.items()
        }
        model = type(job.model).from_config(
            facts | dict.fromkeys(self.keys, layers), name=job.model.name, origin=job.model.origin
        )
        return replace(job, model=model)


def depth_of(job: Job, setup: Setup) -> Depth | None:
    """The depth of the job's model; None when its config does not tell it, or its layers have no period."""
    config = job.model.config
    keys = tuple(sorted(key for key in LAYERS if isinstance(config.get(key), int)))
    counts = {config[key] for key in keys}
    if job.model.module is not None or len(counts) != 1:
        return None
    layers = counts.pop()
    complete = job.transformers_config().to_dict()
    per_layer = [value for value in complete.values() if isinstance(value, list) and len(value) == layers]
    period = math.lcm(*(_period_of(value) for value in per_layer)) if per_layer else 1
    if period * 4 > layers or not is_periodic(_meta_model(job, setup), layers, period):
        return None
    return Depth(keys, layers, period)


class PeriodicCheckpoint(NamedTuple):
    """Checkpointing that is the same for any number of layers."""

    wish: CheckpointWish | None
    period: int
    """Layers after which it repeats."""


def periodic_checkpoint(wish: CheckpointWish | None, layers: int) -> PeriodicCheckpoint:
    """The checkpointing of a model of any depth that cuts it as this wish cuts one of so many layers. A wish
    for the first few layers has no period but the whole depth."""
    if wish is None:
        return PeriodicCheckpoint(None, 1)
    if wish.first is not None:
        return PeriodicCheckpoint(wish, layers)
    if wish.layers_per_span:
        return PeriodicCheckpoint(wish, wish.layers_per_span * wish.every)
    count = len(replace(wish, every=1).cut(layers))
    return PeriodicCheckpoint(replace(wish, spans=count), count)


def _period_of(values: Sequence[Any]) -> int:
    """The fewest entries after which a list repeats itself; its length when it does not."""
    return next(
        period for period in range(1, len(values) + 1) if list(values[period:]) == list(values[:-period])
    )


def _meta_model(job: Job, setup: Setup) -> nn.Module:
    import torch

    with torch.device("meta"):
        return instantiate(job, **{**model_arguments(setup), "construct": None})


def is_periodic(model: nn.Module, layers: int, period: int) -> bool:
    """Whether each stack's layers, but for the first period and the last, are as those one period on."""
    import torch

    stacks = [
        list(module)
        for module in model.modules()
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) == layers
    ]
    for stack in stacks:
        kinds = [_description(layer) for layer in stack]
        if any(kinds[at] != kinds[at + period] for at in range(period, layers - 2 * period)):
            return False
    return bool(stacks)


def _description(layer: nn.Module) -> list[Any]:
    """What a layer is made of: modules, shapes and switches, but for its own number."""
    return [
        (
            name,
            type(module),
            [(key, tensor.shape, tensor.dtype) for key, tensor in module.named_parameters(recurse=False)],
            [(key, tensor.shape, tensor.dtype) for key, tensor in module.named_buffers(recurse=False)],
            {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, (bool, int, float, str, type(None))) and not _is_number(key)
            },
        )
        for name, module in layer.named_modules()
    ]


def _is_number(key: str) -> bool:
    """Whether an attribute of this name says which layer it is in."""
    return key.endswith(("idx", "index", "layer_id"))

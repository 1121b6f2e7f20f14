"""Models of few layers that stand for a deep one.

A deep model's figures follow from two shallower ones, whose layers repeat as its own do, and whose
checkpointing cuts them as it cuts the deep one. Where there are no two that are less work than the whole, the
whole one stands for itself.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.trace.depth import Depth, depth_of, periodic_checkpoint
from snugfit.techniques.feature import hooks

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

FEWEST = 2
"""Layers of the shallowest model that is rehearsed, of those that checkpointing treats alike: a first and
another. What the first one makes for all (T5's bias of attention) only the checkpoints of later ones keep."""

SMOKE_TEST_PERIODS = 2
"""Periods of layers in the model on which something is tested before it is relied on."""


@dataclass(frozen=True)
class ShallowJob:
    """A job with fewer layers."""

    job: Job
    setup: Setup
    """With its checkpointing as the deep model has it."""
    layers: int


class ShallowJobs:
    """The shallow models of one job. `few` is whether there may be any."""

    def __init__(self, job: Job, *, few: bool) -> None:
        self.job, self.few = job, few
        self._depths: dict[Hashable, Depth | None] = {}

    def of(self, setup: Setup) -> list[ShallowJob]:
        """Two models of few layers that are less work than the whole one; else the whole one."""
        depth = self.depth(setup)
        if depth is not None and self.few:
            checkpoint, repeats = periodic_checkpoint(setup.checkpoint, depth.layers)
            further = (period(setup, depth.layers) for period in hooks("layer_period"))
            period = math.lcm(depth.period, repeats, *further)
            alike = repeats if checkpoint and checkpoint.layers_per_span else 1  # of so many layers one
            whole_periods = math.ceil(FEWEST * alike / period) * period
            least = whole_periods + (depth.layers - whole_periods) % period
            if 2 * least + period < depth.layers:
                asked = replace(setup, checkpoint=checkpoint)
                return [
                    ShallowJob(depth.shallower(self.job, layers), asked, layers)
                    for layers in (least, least + period)
                ]
        return [ShallowJob(self.job, setup, self.layers(setup))]

    def smoke_test_job(self, setup: Setup, samples: int) -> Job | None:
        """The job on a model of so few layers that anything can be tested on it, with so large a batch; None
        where the whole model is not deeper."""
        depth = self.depth(setup)
        layers = SMOKE_TEST_PERIODS * depth.period if depth else 0
        if depth is None or layers >= depth.layers:
            return None
        return replace(depth.shallower(self.job, layers), batch_size=samples)

    def depth(self, setup: Setup) -> Depth | None:
        """How deep the whole model is; None where that cannot be changed."""
        if setup.attention not in self._depths:
            self._depths[setup.attention] = depth_of(self.job, setup)
        return self._depths[setup.attention]

    def layers(self, setup: Setup) -> int:
        """How many the whole model has."""
        depth = self.depth(setup)
        return depth.layers if depth else 1


def linear_extrapolate(points: Sequence[float], values: Sequence[Any], at: float) -> Any:
    """The value at `at` on the straight line through one or two points; values are numbers, or arrays of one
    shape."""
    if len(points) == 1:
        return values[0]
    return values[0] + (values[1] - values[0]) * (at - points[0]) / (points[1] - points[0])

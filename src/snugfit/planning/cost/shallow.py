"""Create models with few layers that represent a model of many layers in simulations.

The bytes and seconds of the deep model are extrapolated from two shallow ones. Their layers repeat in the
same order, with the same checkpointing pattern. If two shallow models are no less work than the deep one,
that is simulated itself.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.trace.depth import Depth, depth_of, periodic_setup
from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

FEWEST = 2
"""Smallest number of layers to simulate for each group of layers with the same checkpointing.

The first layer's shared results (T5's attention bias) are kept only by the checkpoints of later layers.
"""

SMOKE_TEST_PERIODS = 2
"""Number of periods (repeated groups of layer types) in the small model on which an assumption is tested."""


@dataclass(frozen=True)
class ShallowJob:
    """A job whose model has fewer layers than the original, and its training settings."""

    job: Job
    setup: Setup
    """Training settings with the checkpointing pattern of the full model."""
    layers: int


class ShallowJobs:
    """Create copies of one job with few layers, which are faster to simulate. Without `few`, use only the
    whole model.
    """

    def __init__(self, job: Job, *, few: bool) -> None:
        self.job, self.few = job, few
        self._depths: dict[Hashable, Depth | None] = {}

    def of(self, setup: Setup) -> list[ShallowJob]:
        """Return two jobs with fewer layers, from which bytes and seconds are extrapolated. If the model
        already has few layers, return only the whole job.
        """
        depth = self.depth(setup)
        if depth is not None and self.few:
            periodic, repeats, equal_layers = periodic_setup(setup, depth.layers)
            further = (period(setup, depth.layers) for period in hooks("layer_period"))
            period = math.lcm(depth.period, repeats, *further)
            whole_periods = math.ceil(FEWEST * equal_layers / period) * period
            # The remainder of the period stays, so that the last layers have the same types.
            least = whole_periods + (depth.layers - whole_periods) % period
            if 2 * least + period < depth.layers:
                return [
                    ShallowJob(depth.shallower(self.job, layers), periodic, layers)
                    for layers in (least, least + period)
                ]
        return [ShallowJob(self.job, setup, self.layers(setup))]

    def smoke_test_job(self, setup: Setup, samples: int) -> Job | None:
        """Return the job with so few layers and `samples` samples that a simulation of it is fast.

        Return None if the whole model is not deeper.
        """
        depth = self.depth(setup)
        layers = SMOKE_TEST_PERIODS * depth.period if depth else 0
        if depth is None or layers >= depth.layers:
            return None
        return replace(depth.shallower(self.job, layers), batch_size=samples)

    def depth(self, setup: Setup) -> Depth | None:
        """Return the model's number of layers, and the period after which its layer types repeat. None if the
        number of layers cannot be changed.
        """
        if setup.attention not in self._depths:
            self._depths[setup.attention] = depth_of(self.job, setup)
        return self._depths[setup.attention]

    def layers(self, setup: Setup) -> int:
        """Return the number of layers of the whole model."""
        depth = self.depth(setup)
        return depth.layers if depth else 1


def linear_extrapolate(points: Sequence[float], values: Sequence[Any], at: float) -> Any:
    """Return the value at `at` on the straight line through one or two points. Values are numbers, or arrays
    of one shape."""
    if len(points) == 1:
        return values[0]
    return values[0] + (values[1] - values[0]) * (at - points[0]) / (points[1] - points[0])

"""What one recipe takes on so many GPUs, from models of few layers and few micro-batches.

A step's bytes and seconds grow evenly with layers, and with micro-batches of one size; so those of a deep
model, whose batch is cut into many, follow from two shallow ones, whose batches are cut into two and three.
What is found so is simulated in full before it is answered. Questions are asked in other processes, so each
is plain data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from snugfit.errors import SnugfitError
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.cost.shallow import linear_extrapolate
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import context_of, policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.prediction.rates import rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.prediction.several_gpus.communication import communication_bytes
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.depth import Depth, depth_of, periodic_checkpoint
from snugfit.results.prediction import Prediction
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus

FEWEST = 4
"""Layers of the shallower model (chosen): with fewer, weights are gathered ahead that the deep model does not
hold at once, and the bytes of many layers come out too small."""

FEW_PIECES = (2, 3)
"""Micro-batches of the two that stand for more."""


class Judged(NamedTuple):
    """What a recipe takes on each GPU."""

    needed_bytes: int
    """What must be free on each GPU."""
    step_seconds: float
    why_not: str = ""
    """Why it cannot be simulated; empty where it can."""


class Judge:
    """Judges recipes for one job on GPUs of one kind."""

    def __init__(self, job: Job, gpu: Gpu) -> None:
        self._job, self._gpu, self._software = job, gpu, Software()
        self._depths: dict[str, Depth | None] = {}

    def judge(self, gpus: int, recipe: Recipe) -> Judged:
        """Bytes and seconds of a recipe, by models of few layers where the job's has such."""
        setup = on_gpus(recipe.setup(), gpus)
        part = job_of_rank(self._job, setup)
        try:
            needed, seconds = self._by_layers(part, setup)
        except SnugfitError as refused:
            return Judged(0, 0.0, str(refused))
        return Judged(int(needed), seconds)

    def in_full(self, gpus: int, recipe: Recipe, memory_bytes: int) -> Prediction:
        """The prediction of a recipe with so many bytes of each GPU. Raises `SnugfitError` as `predict`
        does."""
        return predict(self._job, recipe, gpu=self._gpu, gpus=gpus, memory_bytes=memory_bytes)

    def _by_layers(self, part: Job, setup: Setup) -> tuple[float, float]:
        depth = self._depth(part, setup)
        if depth is None:
            return self._by_pieces(part, setup)
        checkpoint, repeats = periodic_checkpoint(setup.checkpoint, depth.layers)
        period = math.lcm(depth.period, repeats)
        least = math.ceil(FEWEST / period) * period
        more = least + max(period, 2 // period * period)
        if least + more >= depth.layers:
            return self._by_pieces(part, setup)
        asked = replace(setup, checkpoint=checkpoint)
        return _on_a_line(
            (least, more), lambda layers: self._by_pieces(depth.shallower(part, layers), asked), depth.layers
        )

    def _by_pieces(self, part: Job, setup: Setup) -> tuple[float, float]:
        """`part` is a GPU's, on whatever depth."""
        if setup.micro_batches <= FEW_PIECES[-1]:
            return self._simulate(part, setup)
        samples = part.batch_size // setup.micro_batches

        def of_pieces(pieces: int) -> tuple[float, float]:
            return self._simulate(
                replace(part, batch_size=samples * pieces), replace(setup, micro_batches=pieces)
            )

        return _on_a_line(FEW_PIECES, of_pieces, setup.micro_batches)

    def _simulate(self, part: Job, setup: Setup) -> tuple[float, float]:
        trace = rehearse(part, setup, policy_for(self._gpu, self._software))
        after = replay(trace, expandable=setup.expandable_segments)
        gpus = setup.parallel.ranks if setup.parallel else 1
        group = communication_bytes(trace, gpus)
        context, _ = context_of(self._gpu, self._software, trace, group=group)
        timing = step_seconds(
            trace,
            self._gpu,
            batch_size=part.batch_size,
            rates=rates_for(self._gpu, gpus),
            workers=setup.loader.workers,
        )
        return context + after.reserved_peak, timing.step_seconds

    def _depth(self, part: Job, setup: Setup) -> Depth | None:
        if setup.attention not in self._depths:
            self._depths[setup.attention] = depth_of(part, setup)
        return self._depths[setup.attention]


def _on_a_line(
    points: Sequence[int], of: Callable[[int], tuple[float, float]], at: int
) -> tuple[float, float]:
    """Bytes and seconds at `at` on the straight lines through those at two points."""
    needed, seconds = zip(*(of(point) for point in points), strict=True)
    return linear_extrapolate(points, needed, at), linear_extrapolate(points, seconds, at)

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
from snugfit.prediction.several_gpus.communication import communication_bytes, doubts_about_exchanges
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
    doubts: tuple[str, ...] = ()
    """Sentences on what is uncertain about exchanges between the GPUs."""


class Judge:
    """Judges recipes for one job, on GPUs of one kind or of several. Kinds that are asked about at once run
    the same kernels and share the rehearsals, which are by the policy of the one that takes most scratch."""

    def __init__(self, job: Job, gpu: Gpu, *others: Gpu) -> None:
        self._job, self._gpu, self._software = job, gpu, Software()
        self._kinds = (gpu, *others)
        self._depths: dict[str, Depth | None] = {}

    def judge(self, gpus: int, recipe: Recipe) -> Judged:
        """Bytes and seconds of a recipe, by models of few layers where the job's has such."""
        return self.judge_kinds(gpus, recipe, (0,))[0]

    def judge_kinds(self, gpus: int, recipe: Recipe, kinds: Sequence[int]) -> list[Judged]:
        """The same on so many GPUs of each of these kinds, by their places in the order of the Judge."""
        setup = on_gpus(recipe.setup(), gpus)
        part = job_of_rank(self._job, setup)
        one = _OneQuestion(tuple(self._kinds[kind] for kind in kinds), self._software)
        try:
            figures = self._by_layers(part, setup, one)
        except SnugfitError as refused:
            return [Judged(0, 0.0, str(refused))] * len(kinds)
        return [
            Judged(int(needed), seconds, "", tuple(doubts))
            for (needed, seconds), doubts in zip(figures, one.doubts, strict=True)
        ]

    def in_full(self, gpus: int, recipe: Recipe, memory_bytes: int | None) -> Prediction:
        """The prediction of a recipe with so many bytes of each GPU, or all that it has. Raises
        `SnugfitError` as `predict` does."""
        return predict(self._job, recipe, gpu=self._gpu, gpus=gpus, memory_bytes=memory_bytes)

    def _by_layers(self, part: Job, setup: Setup, one: _OneQuestion) -> list[_Figures]:
        depth = self._depth(part, setup)
        if depth is None:
            return self._by_pieces(part, setup, one)
        checkpoint, repeats = periodic_checkpoint(setup.checkpoint, depth.layers)
        period = math.lcm(depth.period, repeats)
        least = math.ceil(FEWEST / period) * period
        more = least + max(period, 2 // period * period)
        if least + more >= depth.layers:
            return self._by_pieces(part, setup, one)
        asked = replace(setup, checkpoint=checkpoint)
        return _on_a_line(
            (least, more),
            lambda layers: self._by_pieces(depth.shallower(part, layers), asked, one),
            depth.layers,
        )

    def _by_pieces(self, part: Job, setup: Setup, one: _OneQuestion) -> list[_Figures]:
        """`part` is a GPU's, on whatever depth."""
        if setup.micro_batches <= FEW_PIECES[-1]:
            return one.simulate(part, setup)
        samples = part.batch_size // setup.micro_batches

        def of_pieces(pieces: int) -> list[_Figures]:
            return one.simulate(
                replace(part, batch_size=samples * pieces), replace(setup, micro_batches=pieces)
            )

        return _on_a_line(FEW_PIECES, of_pieces, setup.micro_batches)

    def _depth(self, part: Job, setup: Setup) -> Depth | None:
        if setup.attention not in self._depths:
            self._depths[setup.attention] = depth_of(part, setup)
        return self._depths[setup.attention]


_Figures = tuple[float, float]
"""Bytes and seconds on one kind of GPU."""


class _OneQuestion:
    """Kinds of GPU that are asked about at once, and what is uncertain about each."""

    def __init__(self, kinds: Sequence[Gpu], software: Software) -> None:
        self._kinds, self._software = kinds, software
        policies = [policy_for(gpu, software) for gpu in kinds]
        self._policy = max(policies, key=lambda policy: policy.scratch_size)
        self.doubts: list[dict[str, None]] = [{} for _ in kinds]

    def simulate(self, part: Job, setup: Setup) -> list[_Figures]:
        """Bytes and seconds of a step on each kind, from one rehearsal."""
        trace = rehearse(part, setup, self._policy)
        after = replay(trace, expandable=setup.expandable_segments)
        gpus = setup.parallel.ranks if setup.parallel else 1
        group = communication_bytes(trace, gpus)
        figures: list[_Figures] = []
        for gpu, doubts in zip(self._kinds, self.doubts, strict=True):
            context, _ = context_of(gpu, self._software, trace, group=group)
            rates = rates_for(gpu, gpus)
            workers = setup.loader.workers
            timing = step_seconds(trace, gpu, batch_size=part.batch_size, rates=rates, workers=workers)
            doubts.update(dict.fromkeys(doubts_about_exchanges(trace, gpu, rates)))
            figures.append((context + after.reserved_peak, timing.step_seconds))
        return figures


def _on_a_line(points: Sequence[int], of: Callable[[int], list[_Figures]], at: int) -> list[_Figures]:
    """Bytes and seconds of each kind at `at`, on the straight lines through those at two points."""
    lines = []
    for on_kind in zip(*map(of, points), strict=True):
        needed, seconds = zip(*on_kind, strict=True)
        lines.append((linear_extrapolate(points, needed, at), linear_extrapolate(points, seconds, at)))
    return lines

"""Prediction of a pipeline's step from simulated stages with few layers and few micro-batches.

Stages differ: the first, a middle one and the last are simulated, each with few layers. Bytes and seconds
grow linearly with layers, so a deep model's stages follow from these. Once the micro-batches slightly
outnumber the stages, each further one is like the one before. It takes as long, and adds the buffers for its
transfer.

The seconds of all stages together follow from the order of the schedule, for any number of micro-batches
(`features/distributed/price/stages.py`). The bytes of a step are those of its largest stage. Some schedules
give a GPU several stages, or split backward passes. They run micro-batches in rounds, so all of them are
simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from snugfit.features.distributed.apply.stages import layers_at
from snugfit.features.distributed.fields import PARALLEL
from snugfit.features.distributed.price.communication import (
    communication_bytes,
    doubts_about_exchanges,
    interconnect_of,
)
from snugfit.features.distributed.price.stages import (
    FURTHER,
    IN_TURN,
    StageWork,
    orders_of,
    rank_of,
    simulate_stages,
    stage_work,
    stages_to_rehearse,
    transfer_seconds,
)
from snugfit.planning.cost.shallow import linear_extrapolate
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import context_of
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import rates_for
from snugfit.prediction.seconds import MODELS_OWN
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.depth import periodic_setup
from snugfit.rehearsal.trace.trace import COLLECTIVES

if TYPE_CHECKING:
    from snugfit.features.distributed.fields import ParallelWish
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.profile import Software
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.trace.depth import Depth
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.setup import Setup

FEWEST = 4
"""Number of layers of the shallower of two simulated models or stages (chosen). With fewer, FSDP gathers
weights ahead that a deep model does not hold at once. The bytes of many layers then come out too small.
"""

STEPS = 2
"""Number of simulated steps. Permanent allocations, such as optimizer states, exist from the end of the first
one.
"""


def few_layers(depth: Depth | None, setup: Setup, stages: int = 1) -> tuple[int, ...]:
    """Return two small numbers of layers per pipeline stage to simulate, or 0 for the whole model.

    The whole model is simulated if two models with few layers are no less work.
    """
    if depth is None:
        return (0,)
    # Recomputed layers form a pattern, which a shallower model must contain as a whole.
    period = math.lcm(depth.period, periodic_setup(setup, depth.layers).period)
    least = math.ceil(FEWEST / period) * period
    more = least + max(period, 2 // period * period)
    return (least, more) if stages * (least + more) < depth.layers else (0,)


class _StageFigures(NamedTuple):
    """Predicted bytes and seconds of one GPU's pipeline stages, for one GPU model. All fields but the first
    grow linearly with layers.
    """

    unused_bytes: float
    """Bytes that the allocator reserves without use, plus bytes outside of the allocator."""
    allocated_bytes: float
    after: float
    """Seconds of clipping and the update, after the last pass."""
    model_seconds: float
    """Total seconds of the kernels of forward and backward passes, without exchanges."""
    passes: tuple[float, ...]
    """Seconds of each kind of pass in each stage, for all micro-batches, in a fixed order."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return all fields as one flat sequence of numbers, for linear extrapolation."""
        return (*self[:-1], *self.passes)

    @classmethod
    def of(cls, numbers: Sequence[float]) -> _StageFigures:
        """Return the object whose fields are these numbers, the inverse of the method `numbers`."""
        unused, allocated, after, model, *passes = numbers
        return cls(unused, allocated, after, model, tuple(passes))


class StagesStep(NamedTuple):
    """Predicted bytes of the GPUs with the largest pipeline stage, and seconds of a step."""

    needed_bytes: int
    step_seconds: float
    model_seconds: float
    """Total seconds of the slowest stage's kernels of forward and backward passes, without exchanges."""
    exposed_seconds: float
    """Seconds by which transfers between stages lengthen the step."""


_Place = tuple[bool, bool]
"""The type of a stage's position: True for the first stage, and True for the last."""

_OfStages = dict[_Place, _StageFigures]


class StagesQuestion:
    """Prediction of a pipeline-parallel step for several GPU models; it is extrapolated from `few` simulated
    micro-batches.
    """

    def __init__(
        self, kinds: Sequence[Gpu], software: Software, policy: Policy, part: Job, setup: Setup
    ) -> None:
        wish = PARALLEL.of(setup)
        assert wish is not None
        self._kinds, self._software, self._policy = kinds, software, policy
        self._part, self._setup, self._wish = part, setup, wish
        self._transfer, self._clips = [0.0] * len(kinds), False
        self._passes: dict[_Place, list[tuple[str, int]]] = {}  # kind and stage, by position
        self.doubts: list[dict[str, None]] = [{} for _ in kinds]

    def judge(self, depth: Depth | None) -> list[StagesStep]:
        """Return the predicted bytes and seconds of the step on each GPU model. `part` is the job of one data
        rank; `depth` sets the number of simulated layers.
        """
        pieces = self._setup.micro_batches
        # Once every stage is filled, each further micro-batch adds the same.
        few = min(pieces, self._wish.stages + FURTHER) if self._wish.schedule in IN_TURN else pieces
        points = few_layers(depth, self._setup, self._wish.all_stages)
        by_depth = [self._simulate(depth, layers, few) for layers in points]
        # A simulation with one more micro-batch shows the increase for each.
        longer = self._simulate(depth, points[0], few + 1) if pieces > few else by_depth[0]
        return [
            self._together(kind, points, [one[kind] for one in by_depth], longer[kind], few)
            for kind in range(len(self._kinds))
        ]

    def _simulate(self, depth: Depth | None, layers: int, pieces: int) -> list[_OfStages]:
        """Simulate each pipeline stage with `layers` layers and `pieces` micro-batches, and return bytes and
        seconds by GPU model.
        """
        # The batch is reduced in proportion, so that a micro-batch keeps its size.
        part, setup = self._setup.in_pieces(pieces, self._part)
        if depth is not None and layers:
            part = depth.shallower(part, layers * self._wish.all_stages)
            setup = periodic_setup(setup, depth.layers).setup
        known: list[_OfStages] = [{} for _ in self._kinds]
        for stage in stages_to_rehearse(self._wish, part.model.layers):
            trace = rehearse(part, setup, self._policy, steps=STEPS, rank=rank_of(stage, self._wish))
            for kind, figures in enumerate(self._figures(trace, setup, stage)):
                # The longer stages come first, so the first one at a position is the largest.
                known[kind].setdefault(_place(stage, self._wish), figures)
        return known

    def _figures(self, trace: Trace, setup: Setup, stage: int) -> list[_StageFigures]:
        after = replay(trace, expandable=setup.expandable_segments)
        group = communication_bytes(trace, self._wish.ranks)
        self._clips = self._clips or any(kernel.phase == "clip" for kernel in trace.kernels)
        figures: list[_StageFigures] = []
        for kind, gpu in enumerate(self._kinds):
            context, _ = context_of(gpu, self._software, trace, group=group)
            rates = rates_for(gpu, self._wish.ranks)
            order = orders_of(self._wish, setup.micro_batches)[stage]
            work = stage_work(trace, order, gpu, rates, workers=setup.loader.workers)
            # Sorted, so that figures of several depths have the same order.
            passes = self._passes[_place(stage, self._wish)] = sorted(work.passes)
            clock = KernelClock(rates, interconnect_of(gpu, rates))
            sent = transfer_seconds(trace, interconnect_of(gpu, rates))
            self._transfer[kind] = max(self._transfer[kind], sent)
            self.doubts[kind].update(dict.fromkeys(doubts_about_exchanges(trace, gpu, rates)))
            figures.append(
                _StageFigures(
                    unused_bytes=context + after.reserved_peak - after.allocated_peak,
                    allocated_bytes=after.allocated_peak,
                    after=work.after,
                    model_seconds=sum(
                        # Exchanges are counted separately, together with the waits for other stages.
                        clock.seconds(kernel)
                        for kernel in trace.kernels
                        if kernel.phase in MODELS_OWN and kernel.operator not in COLLECTIVES
                    ),
                    passes=tuple(work.passes[one] * setup.micro_batches for one in passes),
                )
            )
        return figures

    # ---- all stages ----------------------------------------------------------------------------------------

    def _together(
        self, kind: int, points: Sequence[int], by_depth: Sequence[_OfStages], longer: _OfStages, few: int
    ) -> StagesStep:
        """Return the predicted step of all stages on one GPU model, extrapolated from few layers and few
        micro-batches.
        """
        wish, pieces = self._wish, self._setup.micro_batches
        stages = [self._deep(stage, points, by_depth, longer, few) for stage in range(wish.stages)]
        work = [
            StageWork(
                passes={
                    kind: seconds / pieces
                    for kind, seconds in zip(self._passes_at(stage), one.passes, strict=True)
                },
                after=one.after,
            )
            for stage, one in enumerate(stages)
        ]
        tied = self._part.ties_embeddings()
        orders = orders_of(wish, pieces)
        step = simulate_stages(work, orders, transfer=self._transfer[kind], clips=self._clips, tied=tied)
        return StagesStep(
            needed_bytes=int(max(one.unused_bytes + one.allocated_bytes for one in stages)),
            step_seconds=step.step_seconds,
            model_seconds=max(one.model_seconds for one in stages),
            exposed_seconds=step.exposed_seconds,
        )

    def _passes_at(self, stage: int) -> list[tuple[str, int]]:
        return self._passes.get(_place(stage, self._wish)) or next(iter(self._passes.values()))

    def _deep(
        self, stage: int, points: Sequence[int], by_depth: Sequence[_OfStages], longer: _OfStages, few: int
    ) -> _StageFigures:
        """Return the bytes and seconds of one pipeline stage with all its layers and micro-batches, by linear
        extrapolation.
        """
        kind, pieces = _place(stage, self._wish), self._setup.micro_batches
        layers = len(layers_at(stage, self._wish, self._part.model.layers))
        # A GPU has `chunks` stages with this number of layers.
        points = [count * self._wish.chunks for count in points]
        shallow = [one.get(kind) or next(iter(one.values())) for one in by_depth]
        by_number = zip(*(one.numbers for one in shallow), strict=True)
        deep = [linear_extrapolate(points, values, layers) for values in by_number]
        # Unused bytes do not grow with the number of layers, so the largest value is taken.
        known = _StageFigures.of((max(one.unused_bytes for one in shallow), *deep[1:]))
        if pieces == few:
            return known
        more = longer.get(kind) or next(iter(longer.values()))
        further = [late - early for early, late in zip(shallow[0].numbers, more.numbers, strict=True)]
        with_all = _StageFigures.of([
            _of_pieces(values, layers / (points[0] or layers), few, pieces)
            for values in zip(shallow[0].numbers, further, known.numbers, strict=True)
        ])  # fmt: skip
        return known._replace(
            # Each further micro-batch adds buffers for its transfers.
            allocated_bytes=known.allocated_bytes + (pieces - few) * further[1],
            passes=with_all.passes,
            model_seconds=with_all.model_seconds,
        )


def _of_pieces(values: tuple[float, float, float], deeper: float, few: int, pieces: int) -> float:
    """Return the seconds of a whole pipeline stage with `pieces` micro-batches, extrapolated from three
    values. These are a stage of few layers with few micro-batches, its increase per micro-batch, and the
    whole stage with few. The constant part (weights that are gathered once for all micro-batches) grows with
    layers.
    """
    shallow, further, deep = values
    once = max(0.0, shallow - few * further) * deeper
    return once + (deep - once) / few * pieces


def _place(stage: int, wish: ParallelWish) -> _Place:
    return stage == 0, stage == wish.stages - 1

"""A prediction whose ranks differ, each with its stage of the layers: what each takes, and all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.features.distributed.apply.stages import EMBEDDING, HEAD, layers_at
from snugfit.features.distributed.fields import PARALLEL
from snugfit.features.distributed.price.communication import interconnect_of
from snugfit.features.distributed.price.stages import (
    PipelinedStep,
    pipelined_step,
    stages_to_rehearse,
    stand_in,
    without_other_stages,
)
from snugfit.prediction.exchanges import weight_bytes
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.trace.trace import RECEIVE, SEND
from snugfit.results.footprint import Kind
from snugfit.results.prediction import RankPredicted
from snugfit.results.step_seconds import PIPELINE, StepSeconds

if TYPE_CHECKING:
    from snugfit.features.distributed.fields import ParallelWish
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.exchanges import ForeseenRank
    from snugfit.prediction.rates import Rates
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.setup import Setup

PIPELINE_BOUND_ABOVE = 0.15
"""Share of the step in which a GPU waits for other stages, above which the step is called bound by that. A
choice, as for the host."""


class PipelinedRanks:
    """Ranks that each have a stage of the layers (`DifferingRanks`)."""

    def __init__(self, ranks: Sequence[ForeseenRank], job: Job, setup: Setup, gpu: Gpu | None) -> None:
        wish = PARALLEL.of(setup)
        assert wish is not None
        self._ranks, self._job, self._setup, self._gpu, self._wish = ranks, job, setup, gpu, wish
        stages = stages_to_rehearse(self._wish, job.model.layers)
        self._stages = {one.rank: stage for one, stage in zip(ranks, stages, strict=True)}
        self._step: PipelinedStep | None = None

    def seconds(self, rank: int, batch_size: int, rates: Rates) -> StepSeconds:
        """Predict the step of a rank's pipeline stage. `step_seconds` is the whole pipeline's, `idle_seconds`
        are the waits for other stages."""
        assert self._gpu is not None
        trace = next(one.trace for one in self._ranks if one.rank == rank)
        workers = self._setup.loader.workers
        alone = step_seconds(
            without_other_stages(trace), self._gpu, batch_size=batch_size, rates=rates, workers=workers
        )
        link = interconnect_of(self._gpu, rates)
        # `alone` has no transfers between stages, so their seconds are added.
        sent = sum(link.seconds(kernel) for kernel in trace.kernels if kernel.operator in (SEND, RECEIVE))
        self._step = step = pipelined_step(
            {self._stages[one.rank]: one.trace for one in self._ranks},
            self._wish,
            self._job.model.layers,
            self._gpu,
            rates,
            micro_batches=self._setup.micro_batches,
            workers=workers,
            tied=self._job.ties_embeddings(),
        )
        length, idle = step.step_seconds, step.idle[self._stages[rank]]
        # The rest of the step beside device and other stages is the wait for the host.
        waits = idle > max(length - idle - alone.device_seconds, PIPELINE_BOUND_ABOVE * length)
        return replace(
            alone,
            step_seconds=length,
            samples_per_second=batch_size / length if length else 0.0,
            bound=PIPELINE if waits else alone.bound,
            communication_seconds=alone.communication_seconds + sent,
            exposed_communication_seconds=alone.exposed_communication_seconds + step.exposed_seconds,
            idle_seconds=idle,
            bubble=step.bubble,
        )

    def predictions(self) -> tuple[RankPredicted, ...]:
        """Return the prediction of each rank. Waits are those of the last call of `seconds`."""
        return tuple(
            RankPredicted(
                rank=one.rank,
                stage=self._stages[one.rank],
                layers=len(layers_at(self._stages[one.rank], self._wish, self._job.model.layers)),
                requested_bytes=one.after.requested_peak,
                allocated_bytes=one.after.allocated_peak,
                reserved_bytes=one.after.reserved_peak,
                nvml_bytes=one.needed_bytes if one.context else None,
                idle_seconds=self._step.idle[self._stages[one.rank]] if self._step else None,
            )
            for one in self._ranks
        )


def weights_of_stages(job: Job, wish: ParallelWish, traces: Sequence[Trace]) -> int:
    """Return the bytes of the weights of all stages. A matrix that two stages share counts once."""
    own = map(weight_bytes, traces)
    by_stage = dict(zip(stages_to_rehearse(wish, job.model.layers), own, strict=True))
    last = [block for block in traces[-1].blocks if block.kind == Kind.WEIGHTS]
    copies = [block.nbytes for block in last if block.module.endswith((EMBEDDING, HEAD))]
    twice = sum(copies) if job.ties_embeddings() else 0
    return sum(by_stage[stand_in(stage, wish, job.model.layers)] for stage in range(wish.stages)) - twice

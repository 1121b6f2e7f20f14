"""A prediction whose ranks differ, each with its stage of the layers: what each takes, and all together."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from snugfit.errors import GpuError
from snugfit.features.distributed.apply.stages import EMBEDDING, HEAD, layers_at
from snugfit.prediction.rates import Rates, rates_for
from snugfit.prediction.several_gpus.stages import (
    PipelinedStep,
    pipelined_step,
    rank_of,
    stages_to_rehearse,
    stand_in,
)
from snugfit.rehearsal.trace.trace import RECEIVE, SEND
from snugfit.results.footprint import Kind
from snugfit.results.prediction import RankPredicted
from snugfit.results.step_seconds import PIPELINE, StepSeconds

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.allocator import Replay
    from snugfit.prediction.several_gpus.communication import Interconnect
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.setup import Setup

PIPELINE_BOUND_ABOVE = 0.15
"""Share of the step in which a GPU waits for other stages, above which the step is called bound by that. A
choice, as for the host."""


class RankForeseen(NamedTuple):
    """One of the ranks that are rehearsed."""

    rank: int
    trace: Trace
    after: Replay
    context: int
    communication: int
    doubts: list[str]

    @property
    def needed_bytes(self) -> int:
        """Bytes that its GPU must have."""
        return self.context + self.after.reserved_peak


class PipelinedSteps(NamedTuple):
    """The steady step of all stages."""

    real: PipelinedStep
    at_once: PipelinedStep
    """The same step with free transfers."""


def stages_by_rank(job: Job, setup: Setup) -> dict[int, int]:
    """Return the ranks to rehearse, each with its stage of the layers."""
    wish = setup.parallel
    if wish is None or wish.stages == 1:
        return {0: 0}
    return {rank_of(stage, wish): stage for stage in stages_to_rehearse(wish, job.model.layers)}


def pipelined_steps(
    ranks: Sequence[RankForeseen],
    stages: Mapping[int, int],
    job: Job,
    setup: Setup,
    gpu: Gpu | None,
    rates: Rates | None,
) -> PipelinedSteps | None:
    """Return the step of all stages, and the same with free transfers; None for a single stage."""
    wish = setup.parallel
    if wish is None or len(stages) == 1 or gpu is None:
        return None
    try:
        rates = rates or rates_for(gpu, wish.ranks)
    except GpuError:
        return None
    steps = functools.partial(
        pipelined_step, {stages[one.rank]: one.trace for one in ranks}, wish, job.model.layers, gpu, rates,
        micro_batches=setup.micro_batches, workers=setup.loader.workers, tied=job.ties_embeddings(),
    )  # fmt: skip
    return PipelinedSteps(steps(), steps(transfer_takes=0.0))


def differing(
    ranks: Sequence[RankForeseen],
    stages: Mapping[int, int],
    job: Job,
    setup: Setup,
    pipelined: PipelinedSteps | None,
) -> tuple[RankPredicted, ...]:
    """Return the predictions of ranks that differ."""
    wish = setup.parallel
    if wish is None or len(ranks) == 1:
        return ()
    return tuple(
        RankPredicted(
            rank=one.rank,
            stage=stages[one.rank],
            layers=len(layers_at(stages[one.rank], wish, job.model.layers)),
            requested_bytes=one.after.requested_peak,
            allocated_bytes=one.after.allocated_peak,
            reserved_bytes=one.after.reserved_peak,
            nvml_bytes=one.needed_bytes if one.context else None,
            idle_seconds=pipelined.real.idle[stages[one.rank]] if pipelined else None,
        )
        for one in ranks
    )


def among_stages(
    alone: StepSeconds,
    trace: Trace,
    link: Interconnect,
    job: Job,
    pipelined: PipelinedSteps,
    stage: int,
) -> StepSeconds:
    """Return the seconds of a stage's step, from those without any wait for other stages."""
    sent = sum(link.seconds(kernel) for kernel in trace.kernels if kernel.operator in (SEND, RECEIVE))
    real, at_once = pipelined
    length, idle = real.step_seconds, real.idle[stage]
    exposed = max(0.0, length - at_once.step_seconds)
    waits = idle > max(length - idle - alone.device_seconds, PIPELINE_BOUND_ABOVE * length)
    return replace(
        alone,
        step_seconds=length,
        samples_per_second=job.batch_size / length if length else 0.0,
        bound=PIPELINE if waits else alone.bound,
        communication_seconds=alone.communication_seconds + sent,
        exposed_communication_seconds=alone.exposed_communication_seconds + exposed,
        idle_seconds=idle,
        bubble=real.bubble,
    )


def weights_on_host(job: Job, setup: Setup, ranks: Sequence[RankForeseen]) -> int:
    """Return the bytes of the weights that a process builds on the host, if it builds any there.

    They cover all stages. A matrix that two stages share counts once.
    """
    weights = [[block for block in one.trace.blocks if block.kind == Kind.WEIGHTS] for one in ranks]
    own = [sum(block.nbytes for block in blocks) for blocks in weights]
    wish = setup.parallel
    if wish is None or wish.stages == 1:
        return own[0]
    by_stage = dict(zip(stages_to_rehearse(wish, job.model.layers), own, strict=True))
    copies = [block.nbytes for block in weights[-1] if block.module.endswith((EMBEDDING, HEAD))]
    twice = sum(copies) if job.ties_embeddings() else 0
    return sum(by_stage[stand_in(stage, wish, job.model.layers)] for stage in range(wish.stages)) - twice

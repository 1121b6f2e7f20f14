"""Predicted bytes and seconds of a step of several processes, or of DeepSpeed's engine.

Code that uses a tensor of one stream in another marks it (`record_stream`). DeepSpeed does so for weights
that one stream gathers and another computes with. It also does so for gradients that it averages during the
backward pass. When such a tensor is dropped, the allocator records an event in those streams. The block is
free at the first allocation that finds these events completed (`insert_events`, `process_events` of
`CUDACachingAllocator.cpp`).

So the host's lead over the device decides which further bytes are reserved, and the times are those of the
simulated queue. From the drop on, torch no longer counts the block as allocated. It counts as requested until
it is free.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import GpuError
from snugfit.features.distributed.apply.stages import EMBEDDING, HEAD, layers_at
from snugfit.features.distributed.fields import PARALLEL, SHARDING
from snugfit.features.distributed.price.communication import (
    communication_bytes,
    doubts_about_exchanges,
    interconnect_of,
)
from snugfit.features.distributed.price.stages import (
    PipelinedStep,
    orders_of,
    rank_of,
    simulate_stages,
    stage_work,
    stages_to_rehearse,
    stand_in,
    transfer_seconds,
    without_other_stages,
)
from snugfit.features.distributed.price.streams import SimulatedStreams
from snugfit.prediction.exchanges import Exchanges, weight_bytes
from snugfit.prediction.rates import rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.prediction.timeline import time_kernels
from snugfit.rehearsal.trace.trace import RECEIVE, SEND
from snugfit.results.footprint import Kind
from snugfit.results.prediction import RankPredicted
from snugfit.results.step_seconds import PIPELINE, StepSeconds
from snugfit.step.applier import group_bytes
from snugfit.techniques.several_gpus import ranks_of

if TYPE_CHECKING:
    from snugfit.features.distributed.fields import ParallelWish
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.exchanges import ForeseenRank
    from snugfit.prediction.rates import Rates
    from snugfit.prediction.timeline import TimedKernel
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.setup import Setup


def late_frees(trace: Trace, gpu: Gpu | None, setup: Setup, rates: Rates | None) -> dict[int, int]:
    """Return blocks that are freed late, because another stream still uses them, in the form of `Frees`
    (`last_step.py`).

    The blocks are those of the trace's last step. The result is empty without such blocks, or if the GPU's
    rates are unknown.
    """
    if gpu is None or not trace.awaited:
        return {}
    try:
        rates = rates or rates_for(gpu, ranks_of(setup))
    except GpuError:
        return {}
    connected = interconnect_of(gpu, rates)
    return _by_moments(trace, time_kernels(trace, rates, connected, workers=setup.loader.workers))


def _by_moments(trace: Trace, timed: Sequence[TimedKernel]) -> dict[int, int]:
    ends = [kernel.start + kernel.device_seconds for kernel in timed]
    launches = [kernel.launch for kernel in timed]
    late = {}
    for event, number in enumerate(trace.events):
        # Negative numbers are frees.
        awaited = trace.awaited.get(-number - 1) if number < 0 else None
        if not awaited:
            continue
        done = max(ends[kernel] for kernel in awaited)
        first = bisect.bisect_left(launches, done)  # of the kernels that are launched after `done`
        # Allocations before the last launch that precedes `done` find the block still in use.
        back = trace.launched[first - 1] if 0 < first < len(launches) else len(trace.events) * bool(first)
        if back > event:
            late[event] = back
    return late


class DistributedExchanges(Exchanges):
    """Predicts bytes and seconds of a step in several processes, such as the stages of a pipeline."""

    modules = (
        "snugfit.features.distributed.simulate.ranks",
        "snugfit.features.distributed.plan.judge",
    )

    group_bytes = staticmethod(group_bytes)
    communication_bytes = staticmethod(communication_bytes)
    late_frees = staticmethod(late_frees)
    link = staticmethod(interconnect_of)
    run_in_streams = staticmethod(SimulatedStreams)
    doubts = staticmethod(doubts_about_exchanges)

    def ranks_to_rehearse(self, job: Job, setup: Setup) -> Sequence[int]:
        """Return the ranks to simulate: one for each distinct pipeline stage, since the ranks of one stage
        are alike.
        """
        wish = PARALLEL.of(setup)
        if wish is None:
            return (0,)
        return [rank_of(stage, wish) for stage in stages_to_rehearse(wish, job.model.layers)]

    def weights_on_host(self, job: Job, setup: Setup, traces: Sequence[Trace], loop: str) -> int:
        """Return the total bytes of the weights that each process builds: those of all stages, or of all
        shards.
        """
        wish, engine = PARALLEL.of(setup), SHARDING.of(setup)
        if engine is not None and engine.stage == 3 and loop != "plain":
            return 0  # `built_by_transformers`: weights are created on the device, part by part
        # Each process of these loops builds the whole model, while the trace has one shard of it.
        copies = (wish.shards or wish.ranks) if wish and loop != "plain" and wish.weights == "sharded" else 1
        if wish is not None and len(traces) > 1:
            return copies * weights_of_stages(job, wish, traces)
        if copies > 1:
            return copies * weight_bytes(traces[0])
        return super().weights_on_host(job, setup, traces, loop)

    def weights_dtype(self, setup: Setup) -> str | None:
        """Return the dtype in which DeepSpeed's engine keeps the model's weights; None if the recipe does not
        use the engine.
        """
        engine = SHARDING.of(setup)
        return super().weights_dtype(setup) if engine is None else engine.dtype

    def differing(
        self, ranks: Sequence[ForeseenRank], job: Job, setup: Setup, gpu: Gpu | None
    ) -> PipelinedRanks | None:
        """Return an object that predicts ranks with different pipeline stages (`PipelinedRanks`); None if all
        ranks do the same work.
        """
        return PipelinedRanks(ranks, job, setup, gpu) if len(ranks) > 1 else None


# ---- pipelines --------------------------------------------------------------------------------------------


PIPELINE_BOUND_ABOVE = 0.15
"""Limit of the share of a step in which a GPU waits for other stages. Above it, the step is bound by the
pipeline (chosen, as for the host).
"""


class PipelinedRanks:
    """Ranks with different pipeline stages, predicted together (`DifferingRanks`)."""

    def __init__(self, ranks: Sequence[ForeseenRank], job: Job, setup: Setup, gpu: Gpu | None) -> None:
        wish = PARALLEL.of(setup)
        assert wish is not None
        self._ranks, self._job, self._setup, self._gpu, self._wish = ranks, job, setup, gpu, wish
        stages = stages_to_rehearse(self._wish, job.model.layers)
        self._stages = {one.rank: stage for one, stage in zip(ranks, stages, strict=True)}
        self._step: PipelinedStep | None = None

    def seconds(self, rank: int, batch_size: int, rates: Rates) -> StepSeconds:
        """Return the predicted seconds of a rank. `step_seconds` is the whole pipeline's, `idle_seconds` are
        the waits for other stages."""
        assert self._gpu is not None
        trace = next(one.trace for one in self._ranks if one.rank == rank)
        workers = self._setup.loader.workers
        alone = step_seconds(
            without_other_stages(trace), self._gpu, batch_size=batch_size, rates=rates, workers=workers
        )
        link = interconnect_of(self._gpu, rates)
        # Steps of `alone` contain no transfers between stages, so their seconds are added.
        sent = sum(link.seconds(kernel) for kernel in trace.kernels if kernel.operator in (SEND, RECEIVE))
        wish, layers = self._wish, self._job.model.layers
        orders = orders_of(wish, self._setup.micro_batches)
        work = {}
        for one in self._ranks:
            stage = self._stages[one.rank]
            work[stage] = stage_work(one.trace, orders[stage], self._gpu, rates, workers=workers)
        self._step = step = simulate_stages(
            [work[stand_in(stage, wish, layers)] for stage in range(wish.stages)],
            orders,
            transfer=max(transfer_seconds(one.trace, link) for one in self._ranks),
            clips=any(kernel.phase == "clip" for one in self._ranks for kernel in one.trace.kernels),
            tied=self._job.ties_embeddings(),
        )
        length, idle = step.step_seconds, step.idle[self._stages[rank]]
        # The rest of the step, without the device's work and waits for other stages, is a wait for the host.
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
        """Return the prediction of each rank. Waits are those that the last call of `seconds` computed."""
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

"""Figures of a step that several processes, or DeepSpeed's engine, take."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import GpuError
from snugfit.features.distributed.price.communication import (
    communication_bytes,
    doubts_about_exchanges,
    interconnect_of,
)
from snugfit.features.distributed.price.late_frees import late_frees
from snugfit.features.distributed.price.pipelined import PipelinedRanks, weights_of_stages
from snugfit.features.distributed.price.stages import FURTHER, IN_TURN, rank_of, stages_to_rehearse
from snugfit.features.distributed.price.streams import SimulatedStreams
from snugfit.prediction.exchanges import Exchanges, weight_bytes
from snugfit.prediction.rates import rates_for
from snugfit.step.wishes.engine.config import group_bytes
from snugfit.step.wishes.mesh.by_accelerate import is_spread
from snugfit.techniques.several_gpus import ranks_of

if TYPE_CHECKING:
    from snugfit.features.distributed.price.communication import Interconnect
    from snugfit.features.distributed.price.few_stages import StagesQuestion
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.exchanges import ForeseenRank
    from snugfit.prediction.rates import HostLaunchCosts, Rates
    from snugfit.rehearsal.trace.trace import Kernel, Trace
    from snugfit.techniques.setup import Setup


class DistributedExchanges(Exchanges):
    """Figures of several processes."""

    modules = ("snugfit.features.distributed.simulate.ranks",)

    def ranks_to_rehearse(self, job: Job, setup: Setup) -> Sequence[int]:
        """Return one rank of each kind of pipeline stage; ranks of one stage are alike."""
        wish = setup.parallel
        if wish is None:
            return (0,)
        return [rank_of(stage, wish) for stage in stages_to_rehearse(wish, job.model.layers)]

    def group_bytes(self, setup: Setup, loop: str) -> int:
        """Return the NVML bytes of the group of one process with DeepSpeed's engine."""
        return group_bytes(setup, loop)

    def communication_bytes(self, trace: Trace, gpus: int) -> int:
        """Return the NVML bytes that NCCL takes."""
        return communication_bytes(trace, gpus)

    def late_frees(self, trace: Trace, gpu: Gpu | None, setup: Setup, rates: Rates | None) -> dict[int, int]:
        """Return the late frees; none if this GPU's seconds are unknown."""
        if gpu is None or not trace.awaited:
            return {}
        with contextlib.suppress(GpuError):
            rates = rates or rates_for(gpu, ranks_of(setup))
        return late_frees(trace, rates, interconnect_of(gpu, rates), workers=setup.loader.workers)

    def weights_on_host(self, job: Job, setup: Setup, traces: Sequence[Trace], loop: str) -> int:
        """Return the bytes that each process builds: those of all stages, or of all shards."""
        wish, engine = setup.parallel, setup.sharding
        if engine is not None and engine.stage == 3 and loop != "plain":
            return 0  # `built_by_transformers`: they are made on the device, part by part
        copies = (wish.shards or wish.ranks) if wish and loop != "plain" and is_spread(setup) else 1
        if wish is not None and len(traces) > 1:
            return copies * weights_of_stages(job, wish, traces)
        if copies > 1:
            return copies * weight_bytes(traces[0])
        return super().weights_on_host(job, setup, traces, loop)

    def weights_dtype(self, setup: Setup) -> str | None:
        """Return the dtype in which DeepSpeed's engine keeps the model's weights."""
        return super().weights_dtype(setup) if setup.sharding is None else setup.sharding.dtype

    def link(self, gpu: Gpu, rates: Rates | None = None) -> Interconnect:
        """Return the connection within a host, and between hosts."""
        return interconnect_of(gpu, rates)

    def run_in_streams(
        self,
        kernels: Sequence[Kernel],
        device: Sequence[float],
        launches: Sequence[float],
        syncs: Sequence[int],
        host: HostLaunchCosts,
    ) -> SimulatedStreams:
        """Return the simulated steady step."""
        return SimulatedStreams(kernels, device, launches, syncs, host)

    def differing(
        self, ranks: Sequence[ForeseenRank], job: Job, setup: Setup, gpu: Gpu | None
    ) -> PipelinedRanks | None:
        """Return the step of all pipeline stages."""
        return PipelinedRanks(ranks, job, setup, gpu) if len(ranks) > 1 else None

    def doubts(self, trace: Trace, gpu: Gpu | None, rates: Rates | None = None) -> list[str]:
        """Return sentences on links that were not measured."""
        return doubts_about_exchanges(trace, gpu, rates)

    def few_layers_question(
        self, kinds: Sequence[Gpu], software: Any, policy: Any, part: Job, setup: Setup
    ) -> StagesQuestion | None:
        """Return a question about stages of few layers."""
        from snugfit.features.distributed.price.few_stages import StagesQuestion

        in_stages = setup.parallel is not None and setup.parallel.stages > 1
        return StagesQuestion(kinds, software, policy, part, setup) if in_stages else None

    def micro_batches_in_full(self, setup: Setup) -> float:
        """Return one or two micro-batches more than stages; infinity for a schedule that runs in rounds."""
        wish = setup.parallel
        if wish is None or wish.stages == 1:
            return super().micro_batches_in_full(setup)
        return wish.stages + FURTHER + 1 if wish.schedule in IN_TURN else math.inf

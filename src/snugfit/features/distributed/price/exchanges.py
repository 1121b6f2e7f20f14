"""Figures of a step that several processes, or DeepSpeed's engine, take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.fields import PARALLEL, SHARDING
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
from snugfit.step.applier import group_bytes

if TYPE_CHECKING:
    from snugfit.features.distributed.price.few_stages import StagesQuestion
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.exchanges import ForeseenRank
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.setup import Setup


class DistributedExchanges(Exchanges):
    """Figures of several processes."""

    modules = ("snugfit.features.distributed.simulate.ranks",)

    group_bytes = staticmethod(group_bytes)
    communication_bytes = staticmethod(communication_bytes)
    late_frees = staticmethod(late_frees)
    link = staticmethod(interconnect_of)
    run_in_streams = staticmethod(SimulatedStreams)
    doubts = staticmethod(doubts_about_exchanges)

    def ranks_to_rehearse(self, job: Job, setup: Setup) -> Sequence[int]:
        """Return one rank of each kind of pipeline stage; ranks of one stage are alike."""
        wish = PARALLEL.of(setup)
        if wish is None:
            return (0,)
        return [rank_of(stage, wish) for stage in stages_to_rehearse(wish, job.model.layers)]

    def weights_on_host(self, job: Job, setup: Setup, traces: Sequence[Trace], loop: str) -> int:
        """Return the bytes that each process builds: those of all stages, or of all shards."""
        wish, engine = PARALLEL.of(setup), SHARDING.of(setup)
        if engine is not None and engine.stage == 3 and loop != "plain":
            return 0  # `built_by_transformers`: they are made on the device, part by part
        # Each process of these loops builds the whole model, of which the trace has one shard.
        copies = (wish.shards or wish.ranks) if wish and loop != "plain" and wish.weights == "sharded" else 1
        if wish is not None and len(traces) > 1:
            return copies * weights_of_stages(job, wish, traces)
        if copies > 1:
            return copies * weight_bytes(traces[0])
        return super().weights_on_host(job, setup, traces, loop)

    def weights_dtype(self, setup: Setup) -> str | None:
        """Return the dtype in which DeepSpeed's engine keeps the model's weights."""
        engine = SHARDING.of(setup)
        return super().weights_dtype(setup) if engine is None else engine.dtype

    def differing(
        self, ranks: Sequence[ForeseenRank], job: Job, setup: Setup, gpu: Gpu | None
    ) -> PipelinedRanks | None:
        """Return the step of all pipeline stages."""
        return PipelinedRanks(ranks, job, setup, gpu) if len(ranks) > 1 else None

    def few_layers_question(
        self, kinds: Sequence[Gpu], software: Any, policy: Any, part: Job, setup: Setup
    ) -> StagesQuestion | None:
        """Return a question about stages of few layers."""
        from snugfit.features.distributed.price.few_stages import StagesQuestion

        wish = PARALLEL.of(setup)
        in_stages = wish is not None and wish.stages > 1
        return StagesQuestion(kinds, software, policy, part, setup) if in_stages else None

    def micro_batches_in_full(self, setup: Setup) -> float:
        """Return one or two micro-batches more than stages; infinity for a schedule that runs in rounds."""
        wish = PARALLEL.of(setup)
        if wish is None or wish.stages == 1:
            return super().micro_batches_in_full(setup)
        return wish.stages + FURTHER + 1 if wish.schedule in IN_TURN else math.inf

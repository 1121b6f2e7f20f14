"""A step of a pipeline-parallel model: the ranks to simulate, and the seconds of all stages together.

Ranks of one stage are alike, and middle stages differ little. So only the ranks that differ in memory or
seconds are simulated. The first has the embedding and, under 1F1B, holds the activations of the most
micro-batches. The second holds the most of the middle ones. The last has the head. If layers cannot be cut
evenly, one of the shorter stages is added.

The seconds are those of a schedule: each stage runs its micro-batches in its order. A forward pass waits for
the stage before, a backward pass for the stage behind. Their seconds follow from the stage's own trace,
without any such wait (`seconds.py`). The rest of a step, mostly the update, begins when all of the stage's
passes are done. With clipping it begins when those of all stages are. If the head is tied to the embedding,
the first stage and the last one wait for each other. A GPU that waits is idle: the bubble.

A GPU has a position among those of one copy of the model, and one stage, or several (`interleaved`). With n
GPUs the first has the stages 0, n, 2n, ... torch's own schedule gives the order of their forward and backward
passes.
"""

from __future__ import annotations

import bisect
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.features.distributed.apply.stages import layers_of, stages_at
from snugfit.features.distributed.price.communication import Interconnect, interconnect_of
from snugfit.features.distributed.price.streams import SimulatedStreams
from snugfit.prediction.seconds import SIMULATED_STEPS, queue_of
from snugfit.rehearsal.trace.trace import ALONE, RECEIVE, SEND

if TYPE_CHECKING:
    from snugfit.features.distributed.fields import ParallelWish
    from snugfit.job.gpu import Gpu
    from snugfit.prediction.rates import Rates
    from snugfit.rehearsal.trace.trace import Trace

ONE_FORWARD_ONE_BACKWARD, GPIPE = "1F1B", "GPipe"
"""torch's names of the pipeline schedules with one stage on each GPU."""

FURTHER = 1
"""Micro-batches of the smallest simulation in addition to one for each stage.

With one for each stage, the first stage holds all of them at once. With one more, it frees one before the
next (1F1B).
"""

IN_TURN = frozenset({ONE_FORWARD_ONE_BACKWARD, GPIPE})
"""Schedules in which, after the first micro-batches, each one repeats the pattern of the one before."""

FORWARD, BACKWARD, INPUTS, WEIGHTS = "forward", "backward", "inputs' gradients", "weights' gradients"

KINDS = {
    "FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD, "BACKWARD_INPUT": INPUTS, "BACKWARD_WEIGHT": WEIGHTS,
}  # fmt: skip
"""Kinds of passes (forward or backward) by torch's names in schedules. A backward pass is one entry, or split
into gradients of inputs and of weights.
"""

_PASSES = frozenset({FORWARD, BACKWARD})


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch in one stage, as an entry of a pipeline schedule."""

    kind: str
    """Kind of the pass, one of `KINDS`."""

    stage: int
    """Index of the stage among all stages of the model."""

    micro_batch: int


def stages_to_rehearse(wish: ParallelWish, layers: int) -> tuple[int, ...]:
    """Return the pipeline positions to simulate, one rank for each distinct stage. A model without stages has
    a single position.
    """
    firsts: dict[tuple[Any, ...], int] = {}
    for position in range(wish.stages):
        firsts.setdefault(_kind(position, wish, layers), position)
    return tuple(sorted(firsts.values()))


def stand_in(position: int, wish: ParallelWish, layers: int) -> int:
    """Return the pipeline position that is simulated in place of this one, because its rank has the same
    work.
    """
    kind = _kind(position, wish, layers)
    return next(one for one in stages_to_rehearse(wish, layers) if _kind(one, wish, layers) == kind)


def _kind(position: int, wish: ParallelWish, layers: int) -> tuple[Any, ...]:
    """Return a key that is equal for pipeline positions with the same work: the ends of the model, and the
    number of layers in each stage.
    """
    lengths = [len(layers_of(stage, wish.all_stages, layers)) for stage in stages_at(position, wish)]
    return position == 0, position == wish.stages - 1, *lengths


def rank_of(position: int, wish: ParallelWish) -> int:
    """Return the first rank at a pipeline position, because stages are the first axis of the device mesh."""
    return position * (wish.ranks // wish.stages) if wish.ranks else 0


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Seconds that one GPU of a pipeline computes in a step, without waits for other stages."""

    passes: Mapping[tuple[str, int], float]
    """Seconds of one micro-batch in a pass. Keys are the kind of pass and the index of the stage on this GPU,
    from 0.
    """

    before: float = 0.0
    """Seconds before the first pass, in which the batch is copied to the GPU."""

    after: float = 0.0
    """Seconds after the last pass, for clipping, the update, and the gradient sum of weights that two stages
    share.
    """


@dataclass(frozen=True, kw_only=True)
class PipelinedStep:
    """Predicted seconds of a step of all stages together."""

    step_seconds: float
    """Seconds of the steady step (equal to all later ones), from end to end."""

    idle: Sequence[float]
    """Seconds of a step in which each GPU waits for other stages, for the GPUs of one copy of the model."""

    exposed_seconds: float
    """Seconds by which transfers between stages lengthen the step."""

    @property
    def bubble(self) -> float:
        """Return the share of all GPUs' time in which they wait for other stages."""
        return sum(self.idle) / (len(self.idle) * self.step_seconds) if self.step_seconds else 0.0


def without_other_stages(trace: Trace) -> Trace:
    """Return a copy of a pipeline stage's trace without waits for other stages."""
    kernels = (
        # A send or receive without peers takes no time.
        kernel._replace(peers=ALONE, nbytes=0) if kernel.operator in (SEND, RECEIVE) else kernel
        for kernel in trace.kernels
    )
    return replace(trace, kernels=tuple(kernels))


def stage_work(trace: Trace, order: Sequence[Pass], gpu: Gpu, rates: Rates, *, workers: int = 0) -> StageWork:
    """Return the seconds of a GPU's own work, from a trace without waits for other stages.

    The GPU runs its forward and backward passes in this order. The time between two kernels' ends counts for
    the later kernel. It includes the GPU's wait for its own host.
    """
    queue = queue_of(without_other_stages(trace), rates, interconnect_of(gpu, rates), workers=workers)
    moments = SimulatedStreams(*queue[:-1]).moments
    # Passes are found by the index of the stage on this GPU.
    numbers = {stage: number for number, stage in enumerate(sorted({one.stage for one in order}))}
    kinds = [(one.kind, numbers[one.stage]) for one in order]
    seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
    before = after = 0.0
    reached = moments[0][1] if moments else 0.0
    for kernel, at, (_, _, end) in zip(queue.kernels, _pass_of_each(trace), moments, strict=True):
        # A kernel may end before one that was launched earlier, in another stream.
        took = max(0.0, end - reached)
        if kernel.phase in _PASSES and kinds:
            # Kernels before the first pass belong to the loop's forward phase.
            seconds[kinds[max(0, at)]] += took
        elif at < 0:
            before += took
        else:
            after += took
        reached = max(reached, end)
    of_each_pass = {kind: seconds[kind] / kinds.count(kind) for kind in kinds}
    return StageWork(passes=of_each_pass, before=before, after=after)


def _pass_of_each(trace: Trace) -> list[int]:
    """Return for each kernel the index of the forward or backward pass that it belongs to; -1 for kernels
    before the first pass.
    """
    # The first mark is from the loop, before torch's first pass.
    begins = trace.passes[1:]
    return [bisect.bisect_right(begins, number) - 1 for number in range(len(trace.kernels))]


def transfer_seconds(trace: Trace, link: Interconnect) -> float:
    """Return the seconds of the longest transfer from one stage to another."""
    return max((link.seconds(kernel) for kernel in trace.kernels if kernel.operator == SEND), default=0.0)


def orders_of(wish: ParallelWish, micro_batches: int) -> Sequence[Sequence[Pass]]:
    """Return for each pipeline GPU the order of its forward and backward passes, for one copy of the
    model.
    """
    if wish.schedule not in (ONE_FORWARD_ONE_BACKWARD, GPIPE):
        return _orders_of_torch(wish.schedule, wish.stages, wish.chunks, micro_batches)
    return [[*_order_of(stage, wish, micro_batches)] for stage in range(wish.stages)]


def _order_of(stage: int, wish: ParallelWish, micro_batches: int) -> Iterator[Pass]:
    """Yield the forward and backward passes of a pipeline stage in its schedule's order (torch's
    `ScheduleGPipe`, `Schedule1F1B`).
    """
    waiting = min(micro_batches, wish.stages - stage)
    first = micro_batches if wish.schedule == GPIPE else waiting
    yield from (Pass(FORWARD, stage, number) for number in range(first))
    for number in range(micro_batches):
        yield Pass(BACKWARD, stage, number)
        if first + number < micro_batches:
            yield Pass(FORWARD, stage, first + number)


@functools.lru_cache(maxsize=16)
def _orders_of_torch(schedule: str, ranks: int, chunks: int, micro_batches: int) -> list[list[Pass]]:
    """Return the forward and backward passes of each rank, in the order of torch's own class of this name."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    # torch's class reads only the numbers of the stages.
    asked = {"num_stages": ranks * chunks, "group_size": ranks, "group_rank": 0, "submod": None}
    stages: Any = [SimpleNamespace(stage_index=ranks * number, **asked) for number in range(chunks)]
    of_torch: Any = get_schedule_class(schedule)(stages, micro_batches, scale_grads=False)
    return [
        [
            Pass(KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in of_torch.pipeline_order[rank]
            if action is not None
        ]
        for rank in range(ranks)
    ]


def simulate_stages(
    work: Sequence[StageWork],
    orders: Sequence[Sequence[Pass]],
    *,
    transfer: float,
    clips: bool,
    tied: bool = False,
) -> PipelinedStep:
    """Return the seconds of a step of all pipeline GPUs, from the seconds of each pass and its order on each
    GPU.

    Output of a stage arrives after `transfer` seconds. With `clips` all wait for each other before they
    update, with `tied` the first and the last.
    """
    length = _step_length(work, orders, transfer, clips=clips, tied=tied)
    # The same step with instant transfers. The difference of both is the exposed time of transfers.
    at_once = _step_length(work, orders, 0.0, clips=clips, tied=tied)
    busy = [
        own.before + own.after + sum(own.passes[one.kind, one.stage // len(work)] for one in order)
        for own, order in zip(work, orders, strict=True)
    ]
    return PipelinedStep(
        step_seconds=length,
        idle=[max(0.0, length - own) for own in busy],
        exposed_seconds=max(0.0, length - at_once),
    )


def _step_length(
    work: Sequence[StageWork], orders: Sequence[Sequence[Pass]], transfer: float, *, clips: bool, tied: bool
) -> float:
    free = [0.0] * len(work)
    end = last = 0.0
    # The first steps fill the pipeline, and the last one is steady.
    for _ in range(SIMULATED_STEPS):
        last = end
        free = _run_passes(work, orders, transfer, free)
        if tied:
            free[0] = free[-1] = max(free[0], free[-1])
        if clips:
            free = [max(free)] * len(work)
        free = [moment + own.after for moment, own in zip(free, work, strict=True)]
        end = max(free)
    return end - last


def _run_passes(
    work: Sequence[StageWork], orders: Sequence[Sequence[Pass]], transfer: float, free: Sequence[float]
) -> list[float]:
    """Run the schedule's passes in simulated time, and return the time in seconds at which each GPU has
    finished. `free` has the times at which the GPUs may begin.
    """
    ranks = len(work)
    last = max(one.stage for order in orders for one in order)
    now = [moment + own.before for moment, own in zip(free, work, strict=True)]
    done: dict[tuple[bool, int, int], float] = {}  # ends of forward passes, and of backward ones that send
    nexts = [0] * ranks
    waiting = list(range(ranks))
    while waiting:
        rank = waiting.pop()
        while nexts[rank] < len(orders[rank]):
            one = orders[rank][nexts[rank]]
            forward = one.kind == FORWARD
            source = one.stage - 1 if forward else one.stage + 1
            given = 0.0
            # The gradients of weights need no tensor from another stage.
            if 0 <= source <= last and one.kind != WEIGHTS:
                if (forward, source, one.micro_batch) not in done:
                    break
                # Two stages on one GPU transfer nothing.
                given = done[forward, source, one.micro_batch] + transfer * (source % ranks != rank)
            now[rank] = max(now[rank], given) + work[rank].passes[one.kind, one.stage // ranks]
            nexts[rank] += 1
            if one.kind != WEIGHTS:
                done[forward, one.stage, one.micro_batch] = now[rank]
                # The stage that waits for this pass can continue.
                other = (one.stage + (1 if forward else -1)) % ranks
                if other not in waiting and other != rank:
                    waiting.append(other)
    return now

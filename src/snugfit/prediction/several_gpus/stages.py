"""A step whose layers are cut into stages: which ranks to rehearse, and how long all of them take together.

Ranks of one stage are alike, and middle stages differ little: of all, those are rehearsed that may need the
most or take another time. The first has the embedding and, under 1F1B, keeps the most micro-batches; the
second keeps the most of those between; the last has the head; and where layers cannot be cut evenly, one of
the shorter stages.

The seconds are those of a schedule: each stage runs its micro-batches in its order, a forward pass when the
stage before has sent what it needs, a backward pass when the stage behind has. How long a stage takes for
each follows from its own trace, as if it had all it waits for (`seconds.py`); the rest of a step, which is
mostly the update, begins when all of its passes are done, and where gradients are clipped when those of all
stages are; where the head is tied to the embedding, the first stage and the last one wait for each other. A GPU that waits is idle: the bubble.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.seconds import launch_seconds, sync_points, with_worker_batches
from snugfit.prediction.several_gpus.communication import Interconnect, interconnect_of
from snugfit.prediction.several_gpus.streams import SIMULATED_STEPS, simulate_streams
from snugfit.rehearsal.trace.trace import ALONE, RECEIVE, SEND
from snugfit.step.wishes.mesh.stages import layers_of

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.prediction.rates import Rates
    from snugfit.rehearsal.trace.trace import Kernel, Trace
    from snugfit.techniques.setup import ParallelWish

GPIPE = "GPipe"
"""The schedule that runs all forward passes first, by torch's name."""

FORWARD, BACKWARD = "forward", "backward"

_PASSES = frozenset({FORWARD, BACKWARD})


def stages_to_rehearse(wish: ParallelWish, layers: int) -> tuple[int, ...]:
    """The stages that stand for all, in order; of a model that is not cut the only one."""
    lengths = [len(layers_of(stage, wish.stages, layers)) for stage in range(wish.stages)]
    kinds = {stage: (stage == 0, stage == wish.stages - 1, length) for stage, length in enumerate(lengths)}
    firsts: dict[tuple[bool, bool, int], int] = {}
    for stage, kind in kinds.items():
        firsts.setdefault(kind, stage)
    return tuple(sorted(firsts.values()))


def stand_in(stage: int, wish: ParallelWish, layers: int) -> int:
    """The stage that was rehearsed for this one."""
    length = len(layers_of(stage, wish.stages, layers))
    alike = [
        other
        for other in stages_to_rehearse(wish, layers)
        if len(layers_of(other, wish.stages, layers)) == length
        and (other == 0, other == wish.stages - 1) == (stage == 0, stage == wish.stages - 1)
    ]
    return alike[0]


def rank_of(stage: int, wish: ParallelWish) -> int:
    """The first rank of a stage: stages are the first axis of the mesh."""
    return stage * (wish.ranks // wish.stages) if wish.ranks else 0


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Seconds of one stage's own work in a step."""

    forward: float
    """Of each micro-batch's forward pass."""

    backward: float
    """Of each micro-batch's backward pass."""

    before: float
    """Of what comes before the first pass: the batch is copied."""

    after: float
    """Of what comes after the last: sums of what two stages have, clipping, the update."""


@dataclass(frozen=True, kw_only=True)
class PipelinedStep:
    """How long all stages together take a step."""

    step_seconds: float
    """Between the ends of two steady steps."""

    idle: Sequence[float]
    """Of each stage: seconds of the step in which it waits for others."""

    @property
    def bubble(self) -> float:
        """The share of all GPUs' time in which they wait for other stages."""
        return sum(self.idle) / (len(self.idle) * self.step_seconds) if self.step_seconds else 0.0


def without_other_stages(trace: Trace) -> Trace:
    """The trace of a stage as if it had all that it waits for."""
    kernels = (
        kernel._replace(peers=ALONE, nbytes=0) if kernel.operator in (SEND, RECEIVE) else kernel
        for kernel in trace.kernels
    )
    return replace(trace, kernels=tuple(kernels))


def stage_work(trace: Trace, gpu: Gpu, rates: Rates, *, micro_batches: int, workers: int = 0) -> StageWork:
    """The seconds of a stage's own work, of a trace that waits for no other. Between two kernels' ends lies
    what the later one takes, and what the GPU waits for its own host."""
    clock = KernelClock(rates, interconnect_of(gpu))
    kernels = with_worker_batches(workers, without_other_stages(trace).kernels)
    device = [clock.seconds(kernel) for kernel in kernels]
    launches = [launch_seconds(kernel, rates.host) for kernel in kernels]
    syncs = sync_points(kernels, trace.waits)
    _, moments = simulate_streams(kernels, device, launches, syncs, rates.host)
    seconds: defaultdict[str, float] = defaultdict(float)
    before, reached = True, moments[0][1] if moments else 0.0
    for kernel, (_, _, end) in zip(kernels, moments, strict=True):
        before = before and kernel.phase not in _PASSES
        part = kernel.phase if kernel.phase in _PASSES else "before" if before else "after"
        seconds[part] += max(0.0, end - reached)
        reached = max(reached, end)
    return StageWork(
        forward=seconds[FORWARD] / micro_batches,
        backward=seconds[BACKWARD] / micro_batches,
        before=seconds["before"],
        after=seconds["after"],
    )


def transfer_seconds(trace: Trace, link: Interconnect) -> float:
    """Seconds of the longest that a stage sends to another at once."""
    return max((link.seconds(kernel) for kernel in trace.kernels if kernel.operator == SEND), default=0.0)


def order_of(stage: int, stages: int, micro_batches: int, schedule: str) -> Iterator[tuple[str, int]]:
    """The passes of a stage, in order, each with the number of its micro-batch (torch's
    `ScheduleGPipe`, `Schedule1F1B`)."""
    first = micro_batches if schedule == GPIPE else min(micro_batches, stages - stage)
    yield from ((FORWARD, number) for number in range(first))
    for number in range(micro_batches):
        yield BACKWARD, number
        if first + number < micro_batches:
            yield FORWARD, first + number


def simulate_stages(
    work: Sequence[StageWork],
    micro_batches: int,
    schedule: str,
    *,
    transfer: float,
    clips: bool,
    tied: bool = False,
) -> PipelinedStep:
    """The steady step of stages that do this work; what one sends is there `transfer` seconds later. With
    `clips` all wait for each other before they update, with `tied` the first and the last."""
    free = [0.0] * len(work)
    end = 0.0
    for _ in range(SIMULATED_STEPS):
        last = end
        free = _run_passes(work, micro_batches, schedule, transfer, free)
        if tied:
            free[0] = free[-1] = max(free[0], free[-1])
        if clips:
            free = [max(free)] * len(work)
        free = [moment + own.after for moment, own in zip(free, work, strict=True)]
        end = max(free)
    length = end - last
    busy = [own.before + own.after + micro_batches * (own.forward + own.backward) for own in work]
    return PipelinedStep(step_seconds=length, idle=[max(0.0, length - own) for own in busy])


def _run_passes(
    work: Sequence[StageWork], micro_batches: int, schedule: str, transfer: float, free: Sequence[float]
) -> list[float]:
    """When each stage has run its passes, of stages that are free from these moments on."""
    now = [moment + own.before for moment, own in zip(free, work, strict=True)]
    orders = [list(order_of(stage, len(work), micro_batches, schedule)) for stage in range(len(work))]
    done: dict[tuple[str, int, int], float] = {}
    nexts = [0] * len(work)
    waiting = list(range(len(work)))
    while waiting:
        stage = waiting.pop()
        own = work[stage]
        while nexts[stage] < len(orders[stage]):
            kind, number = orders[stage][nexts[stage]]
            source = stage - 1 if kind == FORWARD else stage + 1
            given = 0.0
            if 0 <= source < len(work):
                if (kind, source, number) not in done:
                    break
                given = done[kind, source, number] + transfer
            takes = own.forward if kind == FORWARD else own.backward
            now[stage] = max(now[stage], given) + takes
            done[kind, stage, number] = now[stage]
            nexts[stage] += 1
            other = stage + 1 if kind == FORWARD else stage - 1
            if 0 <= other < len(work) and other not in waiting:
                waiting.append(other)
    return now


def pipelined_step(
    traces: Mapping[int, Trace],
    wish: ParallelWish,
    layers: int,
    gpu: Gpu,
    rates: Rates,
    *,
    micro_batches: int,
    workers: int = 0,
    tied: bool = False,
    transfer_takes: float | None = None,
) -> PipelinedStep:
    """The steady step of all stages, by the traces of those that were rehearsed; `tied` where
    the first stage and the last have one matrix; with `transfer_takes` as if what a stage sends took so many
    seconds."""
    own = {
        stage: stage_work(trace, gpu, rates, micro_batches=micro_batches, workers=workers)
        for stage, trace in traces.items()
    }
    link = interconnect_of(gpu)
    transfer = max((transfer_seconds(trace, link) for trace in traces.values()), default=0.0)
    return simulate_stages(
        [own[stand_in(stage, wish, layers)] for stage in range(wish.stages)],
        micro_batches,
        wish.schedule,
        transfer=transfer if transfer_takes is None else transfer_takes,
        clips=any(_clips(trace.kernels) for trace in traces.values()),
        tied=tied,
    )


def _clips(kernels: Sequence[Kernel]) -> bool:
    return any(kernel.phase == "clip" for kernel in kernels)

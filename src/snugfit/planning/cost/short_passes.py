"""Simulate forward and backward in one step of two micro-batches, and expand the trace to two steps of three.

A second step repeats the first, without its permanent allocations: workspaces, a scaler's tensors. A third
micro-batch repeats the second, which begins while the previous one still has its inputs. One step with two
micro-batches therefore gives the result of two steps with three, at a third of the work.

Not every model behaves so: it may keep its last output and replace it. Therefore the expansion is tested
first on a model with few layers. `second_step_is_redundant` records both ways and compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.splice import Part, record_passes, rehearse_passes
from snugfit.rehearsal.trace.relative import Alloc, Free, LiveSet, PhaseStart, RelativeTrace, TraceEvent
from snugfit.rehearsal.trace.repeat import micro_batch_starts, split_steps
from snugfit.rehearsal.trace.trace import Kernel, MarkKind

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.techniques.setup import Setup

MICRO_BATCHES = 2
"""Largest number of micro-batches to record. Further ones are copies of the last."""

EVENT_COUNTS = ("modules", "views", "checkpoints", "intercepted", "programs", "functions")
"""Names of the fields of `Kernel` that count events since the previous kernel."""


def short_passes(job: Job, setup: Setup, policy: Policy) -> Part:
    """Simulate one step of forward and backward, with two micro-batches at most, and return its recording."""
    return record_passes(job, setup, policy, steps=1, micro_batches=MICRO_BATCHES)


def write_out(part: Part) -> Part:
    """Expand a short recording of forward and backward passes to that of `rehearse_passes`, and return it.
    This is valid only if `second_step_is_redundant`.
    """
    return replace(part, trace=_write_out(part.trace))


def second_step_is_redundant(job: Job, setup: Setup, policy: Policy) -> bool:
    """Record the forward and backward passes of this job in one step and in two. Return True if both
    recordings are equivalent.

    The job should have few layers.
    """
    short, full = write_out(short_passes(job, setup, policy)), rehearse_passes(job, setup, policy)
    return _without_first_step_kernels(short) == _without_first_step_kernels(full)


def _without_first_step_kernels(part: Part) -> tuple[Any, ...]:
    """Return a recording as a tuple for comparisons, without the kernels and waits of its first step. No
    trace contains these."""
    events: list[TraceEvent] = []
    step = -1
    for event in part.trace.moves:
        if isinstance(event, PhaseStart):
            step = event.step
        if step > 0 or not (isinstance(event, Kernel) or event is MarkKind.WAIT):
            events.append(event)
    return tuple(events), part.gradients, part.trace.attention


def _write_out(relative: RelativeTrace) -> RelativeTrace:
    """Return the trace of two steps with three micro-batches, from that of one step with two. Steps with a
    single micro-batch keep it.
    """
    build, steps, rest = split_steps(relative.moves)
    first = _with_a_third(steps[0])
    second = [
        event._replace(step=1) if isinstance(event, PhaseStart) else event for event in _again(build, first)
    ]
    return replace(relative, moves=(*build, *first, *second, *rest))


def _with_a_third(events: Sequence[TraceEvent]) -> Sequence[TraceEvent]:
    """Return the events of a step with the second of two micro-batches repeated; a step with a single
    micro-batch stays unchanged.
    """
    starts = micro_batch_starts(events)
    if len(starts) < MICRO_BATCHES:
        return events
    last = next(
        at for at, event in enumerate(events) if isinstance(event, PhaseStart) and event.phase == "update"
    )
    while isinstance(before := events[last - 1], Free) and before.stack.phase == "load":
        last -= 1  # the batch of the last micro-batch: a further micro-batch would replace it first
    return [*events[:last], *events[starts[1] : last], *events[last:]]


def _again(build: Sequence[TraceEvent], step: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return the events (allocations, frees, kernels) of the step after this one. Permanent allocations of
    this step are not repeated, nor are frees of model tensors that it replaced.
    """
    first, second = LiveSet(), LiveSet()
    mapping = dict(zip(first.follow(build), second.follow(build), strict=True))
    blocks = [_block_of(event, first) for event in step]
    freed = {block for event, block in zip(step, blocks, strict=True) if isinstance(event, Free)}
    gone = freed & mapping.keys()
    lasting = set(range(len(first.allocs))) - freed - mapping.keys()
    mapping |= {block: second.alloc(first.allocs[block]) for block in sorted(lasting)}
    for block in sorted(gone):
        second.free_of(mapping[block])
    events: list[TraceEvent] = []
    makers: set[str] = set()  # of the next kernel: operators of permanent blocks, "" for others
    left_out: list[Kernel] = []  # since the last retained kernel
    replaced = 0  # number of the model's tensors, since the last retained kernel
    for event, block in zip(step, blocks, strict=True):
        if type(event) is Alloc:
            makers.add(event.operator if block in lasting else "")
            if block in lasting:
                continue
            mapping[block] = second.alloc(event)
            events.append(event)
        elif type(event) is Kernel:
            makes_only_what_lasts = makers == {event.operator}
            makers = set()
            if makes_only_what_lasts:
                left_out.append(event)
                continue
            events.append(_with_counts_of(left_out, event, replaced))
            left_out, replaced = [], 0
        elif type(event) is Free:
            replaced += block in gone
            if block not in gone:
                events.append(second.free_of(mapping[block]))
        else:
            events.append(event)
    return events


def _with_counts_of(left_out: Sequence[Kernel], kernel: Kernel, replaced: int) -> Kernel:
    """Return this kernel with the counts of host operations (such as views) of the `left_out` kernels before
    it added. One view for each of the `replaced` model tensors is not counted.
    """
    if not left_out:
        return kernel
    counts = {name: sum(getattr(counted, name) for counted in (*left_out, kernel)) for name in EVENT_COUNTS}
    return kernel._replace(**counts | {"views": counts["views"] - replaced})


def _block_of(event: TraceEvent, live: LiveSet) -> int:
    """Return the number of the memory block that this event allocates or frees; -1 for other events."""
    if type(event) is Alloc:
        return live.alloc(event)
    return live.free(event) if type(event) is Free else -1

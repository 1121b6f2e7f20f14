"""Trace of a step with CUDA graphs, joined from the forward and backward passes of an ordinary step and a
recorded update.

A CUDA graph contains the same kernels and allocations as a step that is launched kernel by kernel. So the
forward and backward passes that were simulated for an ordinary step are used here too. Three properties
differ: the memory pool, the number of executions, and the passes that are left out in replays.

The update is simulated alone, with empty gradients, by the code that records a real step (`replay/step.py`).
Unlike in an ordinary update, its scalars, such as the learning rate, are on the device.

The kernels are those of an ordinary step, but this module marks them as replayed. The host launches each
graph with one call. With several micro-batches it also writes the factor of each one's loss to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.features.engine.fields import CAPTURE
from snugfit.rehearsal.rehearse import STEPS, record_step
from snugfit.rehearsal.splice import (
    Part,
    SharedBlock,
    UpdateAlone,
    make_gradients,
    rehearse_update,
    split_update,
)
from snugfit.rehearsal.step_parts import StepParts, UnsupportedStep
from snugfit.rehearsal.trace.relative import Alloc, Free, LiveSet, PhaseStart, RelativeTrace, TraceEvent
from snugfit.rehearsal.trace.repeat import PeriodicRun, Piece, micro_batch_starts, widen
from snugfit.rehearsal.trace.trace import GRAPH_STREAM, Kernel, MarkKind
from snugfit.results.footprint import Kind

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.step.plain_loop import Built
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup

RECORDED = STEPS + 1
"""Number of simulated steps of an update. One launches kernel by kernel, one is recorded as a CUDA graph, and
two replay it."""

MULTIPLIES = "aten::mul"

SHARE_BYTES = 4
"""Bytes of the scalar by which a micro-batch's loss is multiplied, its share of the batch."""


class CapturedParts(StepParts):
    """Simulates the passes and the update of a step that is recorded as CUDA graphs, and joins them to a
    whole run.
    """

    def as_written(self, setup: Setup, *, padded: bool) -> Setup:
        """Return the Setup without CUDA graphs, for a simulation of forward and backward. With `padded`,
        batches keep the padding of recorded steps.
        """
        wish = CAPTURE.of(setup)
        fills = wish.multiple if wish is not None and padded else 0
        return setup.with_fields(capture=None, filled_batches=fills)

    def refuse(self, setup: Setup, waits: int) -> None:
        """Raise `UnsupportedStep` if forward or backward wait for the device, because CUDA graphs cannot
        record a wait.
        """
        # A step that waits for the device cannot be recorded as a CUDA graph.
        if waits and CAPTURE.of(setup) is not None:
            raise UnsupportedStep(
                "it cannot be recorded as CUDA graphs: its code reads a number from the device"
            )

    def rehearse_update(self, job: Job, setup: Setup, *arguments: Any) -> Part:
        """Simulate the optimizer's update, recorded as a CUDA graph. Raises `UnsupportedStep` if it waits for
        the device.
        """
        is_recorded = CAPTURE.of(setup) is not None
        return (rehearse_captured_update if is_recorded else rehearse_update)(job, setup, *arguments)

    def splice(self, passes: Part, update: Part, *, micro_batches: int = 1) -> PeriodicRun | None:
        """Return the trace of steps replayed from CUDA graphs, joined from simulated passes and a simulated
        update. Return None if the two do not match.
        """
        return splice_captured(passes, update, micro_batches=micro_batches)

    def launched_kernels(self, setup: Setup, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """Return the step's kernels, marked as replayed from CUDA graphs instead of launched one by one."""
        if CAPTURE.of(setup) is None:
            return kernels
        return played_back(kernels, has_shares=setup.micro_batches > 1)


class ReleasedParts(CapturedParts):
    """Simulation of a step that updates weights within the backward pass. Backward pass and update cannot be
    simulated separately.
    """

    can_be_spliced = False


# ---- the update ------------------------------------------------------------------------------------------


def rehearse_captured_update(
    job: Job,
    setup: Setup,
    policy: Policy,
    gradients: tuple[int, ...],
    shared: tuple[SharedBlock, ...] = (),
) -> Part:
    """Simulate clipping and the optimizer's step, recorded as a graph.

    `gradients` are the indices of the trained parameters that have a gradient. Some gradients may be views of
    `shared` memory blocks. Raise `UnsupportedStep` if the update waits for the device.
    """
    import torch

    step = _CapturedUpdateAlone(job, setup.for_update(), torch.device("meta"))
    step.gradients, step.shared = gradients, shared
    recording = record_step(step, policy, RECORDED)
    # The update is not steady if its recording failed or will be repeated.
    if step.runner is None or step.runner.why_not or not recording.settled:
        raise UnsupportedStep("its update cannot be recorded as a CUDA graph")
    return Part(RelativeTrace.of(recording.trace, recording.marks), gradients, shared=shared)


class _CapturedUpdateAlone(UpdateAlone):
    """The training loop of recorded steps, on empty gradients that no forward pass computed."""

    loss_of: Callable[[Any, Mapping[str, Any]], Any]
    computed: Callable[[Any], None]

    def _train(self, steps: int, observer: Observer) -> list[float]:
        self.loss_of = lambda model, batch: _Gradients(model, self.gradients, self.shared)
        self.start_runner()
        return super()._train(steps, observer)

    def _accumulate(self, built: Built) -> torch.Tensor | None:
        assert self.runner is not None
        # In a simulated update without passes, the micro-batch is empty, because the placeholder of the loss
        # reads no input.
        return self.runner.run_passes(built, [{}], [None])

    def reads_gradients(self) -> bool:
        """Return False, since the update reads the gradients on the device."""
        return False

    def run_passes(self, built: Built, *_: Any, **__: Any) -> None:
        """Create empty gradients, in the order in which the first step's backward pass creates them."""
        built.observer.phase("backward")
        make_gradients(built.model, self.gradients, self.shared)

    def _clip_and_update(self, built: Built) -> None:
        assert self.runner is not None
        self.runner.update(built)


class _Gradients:
    """A placeholder for a loss, whose backward pass only creates empty gradients."""

    def __init__(self, *gradients: Any) -> None:
        self._gradients = gradients

    def backward(self) -> None:
        """Store empty gradients in the parameters, in place of a backward pass."""
        make_gradients(*self._gradients)


# ---- the step --------------------------------------------------------------------------------------------


def splice_captured(passes: Part, update: Part, *, micro_batches: int = 1) -> PeriodicRun | None:
    """Return the trace of steps replayed from CUDA graphs, joined from simulated passes and a simulated
    update. Return None if the two are of different models.
    """
    if passes.gradients != update.gradients or passes.varies:
        return None
    first, second = passes.split, update.split
    # The trace with an update must begin with the same model, built in the same order, as that of the passes.
    if second.build[: len(first.build)] != first.build or len(second.steps) != RECORDED:
        return None
    try:
        steps = _Splicing(passes, update, micro_batches).steps()
    except LookupError:
        return None
    if steps is None:
        return None
    doubts = tuple(dict.fromkeys((*passes.trace.doubts, *update.trace.doubts)))
    relative = passes.trace
    return PeriodicRun(
        second.build,
        steps,
        RECORDED,
        (),
        relative.attention,
        doubts,
        relative.groups,
    )


class _UpdateStep(NamedTuple):
    """One step of the optimizer's update, simulated alone and recorded as a CUDA graph."""

    before: Sequence[TraceEvent]
    """Allocations, frees and marks before clipping or the update; in a recorded step, before the recording
    begins."""
    after: Sequence[TraceEvent]


class _Splicing:
    """Joins traces of forward, backward and update to steps replayed from CUDA graphs. Methods raise
    `LookupError` if the traces do not match.
    """

    def __init__(self, passes: Part, update: Part, micro_batches: int) -> None:
        self.passes, self.update, self.micro_batches = passes, update, micro_batches
        self._live, self._passing, self._updating = LiveSet(), LiveSet(), LiveSet()
        build = update.split.build
        blocks = self._live.follow(build)
        self._of_update: dict[int, int] = dict(zip(self._updating.follow(build), blocks, strict=True))
        own = passes.split.build
        # The passes were simulated without the optimizer, so the build of the other trace contains theirs.
        self._of_passes: dict[int, int] = dict(zip(self._passing.follow(own), blocks, strict=False))
        # The update runs in the thread of the forward pass, so it uses workspaces that exist already.
        self._taken = {alloc.operator for alloc in passes.workspaces if alloc.phase != "backward"}

    def steps(self) -> list[Sequence[Piece]] | None:
        """Return the trace of each step as repeated lists of events (`Piece`), or None if the micro-batches
        differ.
        """
        (written, nothing), (recorded, nothing_more) = self.passes.cut
        updates = [_UpdateStep(*split_update(step)) for step in self.update.split.steps]
        first = widen([*self._as_written(written)], self.micro_batches)
        played = widen(_kernels_of(recorded), self.micro_batches)
        if first is None or played is None:
            return None
        gradients = self._gradients_of(nothing)
        # Step 0 runs forward and backward in the CUDA graphs' memory pool, and the update in the ordinary
        # pool.
        ends = [*self._update(updates[0], gradients)]
        # Step 1 records forward and backward of the first and last micro-batch, then gradient norm and
        # update.
        second = [*self._record_passes(recorded, _states_of_generator(updates[1]))]
        gradients = self._gradients_of(nothing_more)
        second += self._update(updates[1], gradients)
        # Later steps allocate memory only if the update cannot be recorded.
        third, last = ([*self._update(step, ())] for step in updates[2:])
        return [
            [*first, Piece(ends)],
            [Piece(second)],
            [Piece(third)],
            [*played, Piece(last)],
        ]

    def _as_written(self, events: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
        """Yield the events of the first step's forward and backward passes. They run without CUDA graphs, but
        in the graphs' memory pool.
        """
        for event in events:
            if type(event) is Alloc:
                yield self._alloc(self._passing.alloc(event), event)
            elif type(event) is Free:
                yield self._live.free_of(self._of_passes[self._passing.free(event)])
            # Only the last step's kernels are needed for a prediction.
            elif type(event) is not Kernel and event is not MarkKind.WAIT:
                yield event

    def _alloc(self, block: int, event: Alloc, stream: int = GRAPH_STREAM) -> Alloc:
        placed = event._replace(stream=stream)
        self._of_passes[block] = self._live.alloc(placed)
        return placed

    def _record_passes(
        self, events: Sequence[TraceEvent], of_generator: Sequence[Alloc]
    ) -> Iterator[TraceEvent]:
        """Yield the allocations and kernels of recording forward and backward: the first and the last
        micro-batch.

        The batch is allocated once and is not freed. So are the random generator's states, which the first
        graph allocates.
        """
        several = self.micro_batches > 1
        yield PhaseStart(1, "load")
        if several:
            yield self._allocate_own(Alloc(SHARE_BYTES, "aten::ones", "", "load", Kind.TEMPORARIES))
        cuts = [0, *micro_batch_starts(events)[1:], len(events)]
        pieces = [events[start:end] for start, end in pairwise(cuts)]
        batch: set[int] = set()
        for number, piece in enumerate(pieces):
            # Two graphs suffice for all micro-batches: the first one creates gradients, the second adds to
            # them.
            recorded = number == 0 or (several and number == len(pieces) - 1)
            emitted = [*self._pass(piece, batch, of_generator if number == 0 else None)]
            if recorded:
                # With several micro-batches, each loss is multiplied by the micro-batch's share of the batch.
                yield from _with_cast(emitted) if several else emitted

    def _pass(
        self, events: Sequence[TraceEvent], batch: set[int], of_generator: Sequence[Alloc] | None
    ) -> Iterator[TraceEvent]:
        """Yield the allocations and kernels of one micro-batch in the graphs' memory pool.

        The blocks of its `batch` are not in that pool; the batch of the first micro-batch is not freed. Only
        the first micro-batch has the allocations `of_generator`, the states of the random generator.
        """
        phase = "load"
        for event in events:
            if type(event) is PhaseStart:
                phase = event.phase
                if phase != "load":
                    yield PhaseStart(1, phase)
                    # The allocator frees its cached memory before each recording.
                    yield MarkKind.CACHE_EMPTIED
                if phase == "forward" and of_generator:
                    yield from map(self._allocate_own, of_generator)
            elif type(event) is Alloc and phase == "load":
                batch.add(self._passing.alloc(event))
                if of_generator is not None:
                    # All replays read the same device batch, so it is in the ordinary pool and never freed.
                    yield self._allocate_own(event)
            elif type(event) is Alloc:
                yield self._alloc(self._passing.alloc(event), event)
            # The device batch of the first micro-batch is never freed.
            elif type(event) is Free and (block := self._passing.free(event)) not in batch:
                yield self._live.free_of(self._of_passes[block])

    def _allocate_own(self, alloc: Alloc) -> Alloc:
        """Return a new allocation in the ordinary memory pool, which is never freed."""
        self._live.alloc(alloc)
        return alloc

    def _gradients_of(self, events: Iterable[TraceEvent]) -> list[int]:
        """Return the memory blocks of the gradients that these events free, in order."""
        freed = [self._passing.free(event) for event in events if type(event) is Free]
        allocs = self._passing.allocs
        return [self._of_passes[block] for block in freed if allocs[block].kind == Kind.GRADIENTS]

    def _update(self, step: _UpdateStep, gradients: Sequence[int]) -> Iterator[TraceEvent]:
        """Yield the allocations and kernels of an update; `gradients` are the memory blocks that backward
        created.
        """
        stand_ins: list[int] = []
        for event in step.before:
            if type(event) is Alloc and event.kind == Kind.GRADIENTS:
                stand_ins.append(self._updating.alloc(event))
            elif type(event) is Alloc and event.phase == "forward":
                # Forward and backward have allocated the random generator's states already.
                self._updating.alloc(event)
            elif type(event) in (Alloc, Free):
                yield from self._moves_of_update(event)
        sizes = [self._updating.allocs[block].nbytes for block in stand_ins]
        if sizes != [self._live.allocs[block].nbytes for block in gradients]:
            raise LookupError("the gradients do not match")
        self._of_update |= zip(stand_ins, gradients, strict=True)
        for event in step.after:
            yield from self._moves_of_update(event)

    def _moves_of_update(self, event: TraceEvent) -> Iterator[TraceEvent]:
        """Yield an event of the update's trace (allocation, free, kernel) with its memory block renumbered
        for the joined step.
        """
        if type(event) is Free:
            yield self._live.free_of(self._of_update[self._updating.free(event)])
        elif type(event) is Alloc:
            block = self._updating.alloc(event)
            # The forward pass has allocated this workspace already, in the same thread.
            if event in self.update.workspaces and event.operator in self._taken:
                return
            self._of_update[block] = self._live.alloc(event)
            yield event
        else:
            yield event


def _states_of_generator(update: _UpdateStep) -> list[Alloc]:
    """Return the allocations of the first CUDA graph that belong to no kernel, such as the state of the
    random generator.

    They have the phase "forward", and a simulated update has no other allocation of that phase.
    """
    return [event for event in update.before if type(event) is Alloc and event.phase == "forward"]


def _with_cast(events: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield a recorded micro-batch's events, with the cast of the scalar that multiplies its loss.

    The scalar is float32. It is cast to the dtype of the loss if that is narrower, and saved for the backward
    pass.
    """
    backward = next(
        at for at, event in enumerate(events) if type(event) is PhaseStart and event.phase == "backward"
    )
    # The loss factor is cast just before the last operator of the forward pass, which multiplies the loss by
    # it.
    last = max((at for at in range(backward) if type(events[at]) is Alloc), default=-1)
    product = events[last] if last >= 0 else None
    if type(product) is not Alloc or product.operator != MULTIPLIES or product.nbytes >= SHARE_BYTES:
        yield from events
        return
    cast = product._replace(operator="share in the dtype of the loss")
    used = False
    for at, event in enumerate(events):
        if at == last:
            yield cast
        yield event
        # The first multiplication of the backward pass is that of the loss factor, which is freed after it.
        if at > backward and not used and type(event) is Alloc and event.operator == MULTIPLIES:
            used = True
            yield Free(cast.stack, 0)


def _kernels_of(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the events of forward and backward that a replayed step contains: kernels and starts of
    phases.
    """
    return [event for event in events if type(event) in (Kernel, PhaseStart)]


# ---- launches ---------------------------------------------------------------------------------------------


PASSES = ("forward", "backward")
"""Names of the step's phases that are recorded as CUDA graphs."""

WRITES_SHARE = Kernel("aten::fill_", "", "load", 1, 8, ((),), "torch.float32", 1)
"""Kernel that copies a micro-batch's loss factor to the device."""

CASTS_SHARE = Kernel("aten::_to_copy", "", "forward", 1, 6, ((),), "torch.float32", 1, played=True)
"""Kernel that casts the loss factor to the loss's dtype, if this is narrower."""


def played_back(kernels: tuple[Kernel, ...], *, has_shares: bool) -> tuple[Kernel, ...]:
    """Return the kernels of forward and backward, marked as replayed by CUDA graphs: the host launches each
    pass as one.

    Kernels that are already replayed stay unchanged. With `has_shares`, the host also writes the factor of
    each micro-batch's loss to the device.
    """
    first = next((kernel for kernel in kernels if kernel.phase in PASSES), None)
    # In the simulation of a recorded step, the kernels are marked already.
    if first is None or first.played:
        return kernels
    return tuple(_played_back(kernels, has_shares=has_shares))


def _played_back(kernels: tuple[Kernel, ...], *, has_shares: bool) -> Iterator[Kernel]:
    before, multiplies = "", False
    for kernel, following in zip(kernels, (*kernels[1:], None), strict=True):
        begins = kernel.phase != before
        # The loss factor is written to the device before each forward pass.
        if has_shares and begins and before == "load":
            yield WRITES_SHARE
        before = kernel.phase
        if kernel.phase not in PASSES:
            yield kernel
            continue
        # With a CUDA graph, the host's only launch of a pass is counted at its first kernel.
        played = kernel._replace(played=True, programs=int(begins))
        # A product of two scalars may be that of the loss and its factor.
        if has_shares and kernel.operator == "aten::mul" and kernel.shapes == ((),):
            is_last = kernel.phase == "forward" and following is not None and following.phase == "backward"
            if is_last and kernel.itemsize < WRITES_SHARE.itemsize:
                yield CASTS_SHARE
            # The factor is a device tensor here, so the kernel reads one operand more.
            if is_last or (multiplies and kernel.phase == "backward"):  # the factor is a device tensor
                played = played._replace(nbytes=3 * kernel.itemsize, shapes=((), ()), tensors=2)
                multiplies = is_last
        yield played

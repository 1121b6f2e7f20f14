"""Join a step's trace from its forward and backward passes and its optimizer update, which were recorded
separately (splicing).

A training step consists of passes and an update. The passes are forward and backward of one micro-batch after
the other. The update is gradient clipping, the optimizer's step, and freeing the gradients. The passes depend
on precision, attention, adapters, checkpointing and the size of a micro-batch. The update depends on the
optimizer, the precision of the updated weights, the adapters and clipping. Only the gradients connect the
two: the passes allocate them, the update frees them.

So each part is recorded once with a placeholder for the other. The passes have an optimizer without effect,
the update has empty gradients. A plan that combines m passes with n updates thus records m + n parts, not m x
n steps.

Splicing is valid for the plain loop. The parts do not match if a gradient shares its storage with another, or
has another size than its parameter. Then the result is None, and the caller simulates the step in full.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.errors import RehearsalError
from snugfit.rehearsal.rehearse import STEPS, record_step
from snugfit.rehearsal.trace.relative import Alloc, Free, LiveSet, PhaseStart, RelativeTrace, TraceEvent
from snugfit.rehearsal.trace.repeat import (
    RECORDED_MICRO_BATCHES,
    RECORDED_STEPS,
    PeriodicRun,
    SplitSteps,
    repeat,
    split_steps,
)
from snugfit.rehearsal.trace.trace import MarkKind
from snugfit.results.footprint import Kind
from snugfit.step.applier import run_context
from snugfit.step.plain_loop import Built, OptimizerLoop, PlainStep
from snugfit.techniques.setup import Call, OptimizerWish, Setup

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.step.step import Observer

PLAYED = (
    "Steps that play CUDA graphs back are not put together from parts, as a plan does. Predict the recipe "
    "(snugfit predict)."
)

NOTHING = OptimizerWish(factory=Call(path="snugfit.rehearsal.splice:optimizer_that_does_nothing"))


class GradientView(NamedTuple):
    """Position and size, in elements, of one gradient in a memory block with several."""

    number: int
    """Index of the parameter among the trainable ones."""
    offset: int
    strides: tuple[int, ...]


class SharedBlock(NamedTuple):
    """A memory block that contains several gradients, for example if one matrix product computes those of
    queries, keys and values.
    """

    elements: int
    views: tuple[GradientView, ...]


@dataclass(frozen=True)
class Part:
    """A separately simulated part of a step: forward and backward, or the optimizer update."""

    trace: RelativeTrace
    gradients: tuple[int, ...]
    """Indices of the trainable parameters that have a gradient."""
    varies: bool = False
    """True if micro-batches differ because the model's code depends on tensor values. Then no micro-batch
    represents the others.
    """
    trained: tuple[str, ...] = ()
    """Names of the trainable parameters, in order; empty for an optimizer update."""
    shared: tuple[SharedBlock, ...] = ()
    """Memory blocks that contain several gradients each. Every other gradient has a block of its own."""

    @property
    def gradient_blocks(self) -> int:
        """Number of memory blocks that contain gradients; several gradients may share a block."""
        return len(self.gradients) - sum(len(block.views) - 1 for block in self.shared)

    def has_gradient(self, number: int) -> bool:
        """Return True if the trainable parameter of this index has a gradient."""
        return number in self._with_gradient

    @cached_property
    def _with_gradient(self) -> frozenset[int]:
        return frozenset(self.gradients)

    @property
    def waits(self) -> int:
        """Number of times that the host waits for the device in the last step."""
        return sum(event is MarkKind.WAIT for event in self.trace.moves)

    @cached_property
    def split(self) -> SplitSteps:
        """The events of this simulated part of a run (allocations, frees, kernels), split where steps begin
        and end.
        """
        return split_steps(self.trace.moves)

    @cached_property
    def cut(self) -> Sequence[SplitUpdate]:
        """The steps of a simulated part of a run, each split where its backward pass ends."""
        return [*map(split_update, self.split.steps)]

    @cached_property
    def workspaces(self) -> Sequence[Alloc]:
        """Allocations of workspaces (such as cuBLAS's) in this part that are never freed."""
        return permanent_workspaces(self.trace.moves)


def without_update(setup: Setup) -> Setup:
    """Return the Setup with an optimizer that updates nothing, and records the gradients that it receives."""
    return setup.with_fields(optimizer=NOTHING)


def record_passes(job: Job, setup: Setup, policy: Policy, *, steps: int, micro_batches: int) -> Part:
    """Simulate forward and backward of a job without its optimizer, and return their recording.

    Record `steps` steps, each with the whole batch, or with `micro_batches` micro-batches of the size in
    `setup`. Raise `RehearsalError` if the Setup records CUDA graphs.
    """
    if setup.records_graphs:
        raise RehearsalError(PLAYED)
    # Clipping and groups of parameters belong to the update, so the passes are recorded without them.
    count = micro_batches if setup.micro_batches > 1 else 1
    job, setup = setup.in_pieces(count, replace(job, clip=None, decay_groups=False))
    step = PlainStep(job, without_update(setup), _meta())
    trace, marks, varies, _ = record_step(step, policy, steps)
    optimizer: Any = step.optimizer
    named = step.model.named_parameters() if step.model is not None else ()
    trained = tuple(name for name, parameter in named if parameter.requires_grad)
    return Part(RelativeTrace.of(trace, marks), optimizer.gradients, varies, trained, optimizer.shared)


def rehearse_passes(job: Job, setup: Setup, policy: Policy) -> Part:
    """Simulate two steps of forward and backward of a job, with one or three micro-batches, and return their
    recording.

    `splice` creates any number of micro-batches from three.
    """
    return record_passes(job, setup, policy, steps=RECORDED_STEPS, micro_batches=RECORDED_MICRO_BATCHES)


def rehearse_update(
    job: Job,
    setup: Setup,
    policy: Policy,
    gradients: tuple[int, ...],
    shared: tuple[SharedBlock, ...] = (),
) -> Part:
    """Simulate gradient clipping and the optimizer's step, without forward and backward. Return their
    recording.

    `gradients` are the indices of the trained parameters that have a gradient. Some may be views of `shared`
    blocks.
    """
    step = UpdateAlone(job, setup.for_update(), _meta())
    step.gradients, step.shared = gradients, shared
    recording = record_step(step, policy, RECORDED_STEPS)
    return Part(RelativeTrace.of(recording.trace, recording.marks), gradients, shared=shared)


def splice(passes: Part, update: Part, *, micro_batches: int = 1) -> PeriodicRun | None:
    """Join simulated forward and backward passes with an optimizer update. Return a run of whole steps, or
    None if they do not match. Its trace equals that of `rehearse`.
    """
    # The update frees the gradients in this order, so both parts need the same ones.
    if passes.gradients != update.gradients or passes.varies:
        return None
    first, second = passes.split, update.split
    # The update adds its optimizer at the end of the build; everything before must be equal.
    if second.build[: len(first.build)] != first.build or _frees(first.rest) != _frees(second.rest):
        return None
    try:
        events = (*second.build, *_join(passes, update), *first.rest)
        doubts = tuple(dict.fromkeys((*passes.trace.doubts, *update.trace.doubts)))
        joined = replace(passes.trace, moves=events, doubts=doubts)
        return repeat(joined, steps=STEPS, micro_batches=micro_batches)
    except LookupError:
        return None


def _join(passes: Part, update: Part) -> Iterator[TraceEvent]:
    """Yield the events of each step's forward and backward, then those of its update, which frees the
    gradients. Raise `LookupError` if the gradients differ from those of the recorded update.
    """
    spliced, standalone = LiveSet(), LiveSet()  # the whole run, and the update as recorded
    build = update.split.build
    mapping = dict(zip(standalone.follow(build), spliced.follow(build), strict=True))
    # Backward passes run in a separate thread, so their workspaces are not those of an update.
    taken = {alloc.operator for alloc in passes.workspaces if alloc.phase != "backward"}
    takes = update.workspaces
    for (passed, nothing), (before_update, updating) in zip(passes.cut, update.cut, strict=True):
        yield from passed
        spliced.follow(passed)
        stand_ins = [block for block in standalone.follow(before_update) if _is_gradient(block, standalone)]
        real = _gradients_freed(nothing, spliced)
        sizes = [standalone.allocs[block].nbytes for block in stand_ins]
        # An update of other gradients would free blocks that the passes do not have.
        if len(sizes) != update.gradient_blocks or sizes != [spliced.allocs[block].nbytes for block in real]:
            raise LookupError("the gradients do not match")
        mapping |= zip(stand_ins, real, strict=True)
        for event in updating:
            if isinstance(event, Free):
                # A free refers to its block by the position among live blocks, which changes once the passes'
                # blocks exist.
                yield spliced.free_of(mapping[standalone.free(event)])
                continue
            if isinstance(event, Alloc):
                block = standalone.alloc(event)
                # The forward pass already allocated this workspace in the same thread.
                if event in takes and event.operator in taken:
                    continue
                mapping[block] = spliced.alloc(event)
            yield event


def permanent_workspaces(events: Sequence[TraceEvent]) -> list[Alloc]:
    """Return the workspaces that a thread allocates once and never frees.

    An update runs on the thread of the forward pass, which has allocated its own already.
    """
    kind = str(Kind.WORKSPACES)
    # A workspace that is freed and allocated again (in CUDA graphs) is not permanent.
    freed = {event.stack for event in events if type(event) is Free and event.stack.kind == kind}
    allocs = (event for event in events if type(event) is Alloc and event.kind == kind)
    return [alloc for alloc in allocs if alloc.stack not in freed]


class SplitUpdate(NamedTuple):
    """The events (allocations, frees, kernels) of one step, split where its last backward pass ends."""

    passes: Sequence[TraceEvent]
    update: Sequence[TraceEvent]


def split_update(events: Sequence[TraceEvent]) -> SplitUpdate:
    """Split the events of a step where clipping or the update begins."""
    ends = next(
        at for at, event in enumerate(events) if isinstance(event, PhaseStart) and event.phase in UPDATING
    )
    return SplitUpdate(events[:ends], events[ends:])


UPDATING = ("clip", "update")
"""Phases of a step after its forward and backward passes."""


def _frees(events: Sequence[TraceEvent]) -> Counter[Alloc]:
    return Counter(event.stack for event in events if isinstance(event, Free))


def _is_gradient(block: int, live: LiveSet) -> bool:
    """Return True if this memory block is the gradient of a parameter and is not freed yet."""
    alloc = live.allocs[block]
    return alloc.kind == Kind.GRADIENTS and block in live.stacks[alloc.stack]


def _gradients_freed(events: Sequence[TraceEvent], live: LiveSet) -> list[int]:
    """Return the numbers of the gradients' memory blocks that these events would free, in order. Leave `live`
    unchanged.
    """
    # The search for gradients frees blocks, so it uses a copy of the stacks.
    trial = LiveSet()
    for stack, blocks in live.stacks.items():
        if stack.kind == Kind.GRADIENTS:
            trial.stacks[stack] = list(blocks)
    frees = (event for event in events if isinstance(event, Free) and event.stack.kind == Kind.GRADIENTS)
    return [trial.free(event) for event in frees]


class UpdateAlone(OptimizerLoop):
    """The plain training loop with empty gradients instead of forward and backward, to simulate an optimizer
    update alone.
    """

    gradients: tuple[int, ...] = ()
    shared: tuple[SharedBlock, ...] = ()

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Build the model and run `steps` updates. Return no losses."""
        with run_context(self.setup):
            return self._train(steps, observer)

    def _accumulate(self, built: Built) -> torch.Tensor | None:
        import torch

        built.observer.phase("backward")
        make_gradients(built.model, self.gradients, self.shared)
        # Without a scaled loss, the scaler has no scale tensor and its step fails.
        if built.scaler is not None:
            built.scaler.scale(torch.empty((), device=self.device))
        return None


def make_gradients(
    model: torch.nn.Module, numbers: Iterable[int], shared: Sequence[SharedBlock] = ()
) -> None:
    """Allocate empty gradients for the parameters with these indices.

    A memory block of several gradients is allocated at the position of its last gradient.
    """
    import torch

    training = [parameter for parameter in model.parameters() if parameter.requires_grad]
    blocks = {max(view.number for view in block.views): block for block in shared}
    later = {view.number for block in shared for view in block.views} - blocks.keys()
    for number in numbers:
        parameter = training[number]
        if number in blocks:
            whole = parameter.new_empty(blocks[number].elements)
            for view in blocks[number].views:
                own = training[view.number]
                own.grad = torch.as_strided(whole, own.shape, view.strides, view.offset)
        elif number not in later:
            parameter.grad = torch.empty_like(parameter)


def shared_blocks(parameters: Sequence[torch.nn.Parameter]) -> tuple[SharedBlock, ...]:
    """Return the memory blocks that contain several of these parameters' gradients."""
    # Gradients are views of one block if they share a storage.
    by_storage: dict[int, list[int]] = defaultdict(list)
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None:
            by_storage[parameter.grad.untyped_storage()._cdata].append(number)
    shared = []
    for numbers in by_storage.values():
        if len(numbers) < 2:
            continue
        gradients = [
            (number, gradient) for number in numbers if (gradient := parameters[number].grad) is not None
        ]
        views = [
            GradientView(number, int(view.storage_offset()), view.stride()) for number, view in gradients
        ]
        first = gradients[0][1]
        shared.append(SharedBlock(first.untyped_storage().nbytes() // first.element_size(), tuple(views)))
    return tuple(shared)


def optimizer_that_does_nothing(parameters: Any, **_: Any) -> torch.optim.Optimizer:
    """Return an optimizer that changes no parameter, and records which of them have gradients."""
    import torch

    class Nothing(torch.optim.Optimizer):
        gradients: tuple[int, ...] = ()
        shared: tuple[SharedBlock, ...] = ()

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Record the parameters that have a gradient, and the blocks that several gradients share."""
            # The passes have one group of parameters, since `decay_groups` is off.
            parameters = self.param_groups[0]["params"]
            self.gradients = tuple(n for n, parameter in enumerate(parameters) if parameter.grad is not None)
            self.shared = shared_blocks(parameters)

    return Nothing(parameters, {})


def _meta() -> torch.device:
    import torch

    return torch.device("meta")

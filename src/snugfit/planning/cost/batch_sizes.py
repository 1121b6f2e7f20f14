"""Memory and kernels of forward and backward passes with several micro-batch sizes, from one simulation.

One model is built and runs two steps. The first has the whole batch in one piece, the second has
micro-batches of different sizes. The very first pass makes the permanent allocations (workspaces, a gradient
scaler). They count as if they had always existed. During the whole batch, no gradients exist yet. Every later
micro-batch adds to existing gradients, as all but the first of a step do.

One micro-batch of each size is therefore enough. Its profile has three parts: the increase of allocated
bytes, the bytes left at its end, and its kernels. The kernels of a step's first micro-batch are the same
without the additions. The comparison with the whole batch identifies the additions. Without the whole batch,
or with one size alone, the smallest size runs twice.

An optimizer update, recorded alone (`splice.py`), has the same three parts. A sum and a maximum of both give
the peak of allocated bytes in a step after the first. The first step is omitted, since it has fewer
allocations. The result therefore never exceeds the true peak.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from snugfit.rehearsal.record.first_launches import known_settings
from snugfit.rehearsal.rehearse import record_step
from snugfit.rehearsal.splice import Part, permanent_workspaces, without_update
from snugfit.rehearsal.trace.profile import MicroBatchProfile, profile_micro_batches
from snugfit.rehearsal.trace.relative import Alloc, Free, TraceEvent
from snugfit.rehearsal.trace.trace import Kernel, MarkKind, Work
from snugfit.results.footprint import Kind
from snugfit.step.applier import make_scaler, run_context
from snugfit.step.batches import collator, dataset, micro_batches
from snugfit.step.build import build_model, build_optimizer
from snugfit.step.plain_loop import Built, PlainStep

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup


ADDITIONS = ("aten::add", "aten::add_")
"""Names of operators by which autograd accumulates into an existing gradient."""


class PassProfile(NamedTuple):
    """Bytes and kernels of a step's forward and backward passes, for one micro-batch size."""

    peak_increase: Mapping[str, int]
    """Largest increase of allocated bytes over those between steps, by phase and module that allocates.
    Layers of one stack count as one module.
    """
    residual_bytes: int
    """Bytes of gradients: allocated bytes at the start of the update, minus those between steps."""
    first: Work
    """Kernels of the first micro-batch, and the host's waits for the device."""
    further: Work
    """Kernels of each further micro-batch, and the host's waits for the device; empty if there is only one.
    """
    kept_bytes: Mapping[str, int]
    """Bytes of activations that layers keep for the backward pass, by the operator that allocated them."""


@dataclass(frozen=True)
class PassProfiles:
    """Profiles (bytes and kernels) of one model's forward and backward passes, for several micro-batch
    sizes."""

    whole: PassProfile | None
    """Profile of the batch without a split into micro-batches; None if it was not requested."""
    by_samples: Mapping[int, PassProfile]
    """Profiles by number of samples in a micro-batch, for sizes below the whole batch."""
    baseline_bytes: int
    """Allocated bytes between steps: weights and permanent allocations."""
    gradients: tuple[int, ...]
    """Indices of the trainable parameters that have a gradient."""
    attention: tuple[str, ...]
    """Names of the attention kernels that the step uses."""


class UpdateProfile(NamedTuple):
    """Bytes and kernels of the optimizer update in a step after the first."""

    peak_increase: int
    """Largest increase of allocated bytes over those at the update's start."""
    state_bytes: int
    """Bytes of optimizer states and other allocations that persist from step to step."""
    work: Work


def rehearse_sizes(
    job: Job, setup: Setup, policy: Policy, sizes: Iterable[int], *, whole: bool
) -> PassProfiles:
    """Simulate forward and backward of this job with micro-batches of each of these sizes, in samples, and
    return their profiles.

    With `whole`, add a profile of the batch without micro-batches. The optimizer in `setup` is ignored.
    """
    import torch

    # Clipping and parameter groups concern the optimizer update, which this step does not have.
    job = replace(job, clip=None, decay_groups=False)
    step = _StepsOfSizes(job, without_update(setup.in_one_piece()), torch.device("meta"))
    sizes = sorted(set(sizes))
    step.sizes = [[job.batch_size]] if whole else []
    step.gradients_stand = whole and len(sizes) > 1
    # Without the whole batch, an additional first micro-batch creates the gradients to which the others add.
    step.sizes += [sizes if step.gradients_stand else [sizes[0], *sizes]] if sizes else []
    with known_settings():
        recording = record_step(step, policy, 1)
    optimizer: Any = step.optimizer
    profiles = list(profile_micro_batches(recording))
    # The last update has freed the gradients, so only the bytes between steps remain.
    baseline = profiles[-1].live_after
    passes = [profile for profile in profiles if profile.number]  # the other profiles are those of updates
    before, further = passes[: -len(sizes) or None], passes[len(passes) - len(sizes) :]
    first = before[0]
    added = _additions(before[-1].work, [profile.work for profile in further]) if sizes else Counter()
    return PassProfiles(
        whole=_pass_profile(first, first.work, Work(), baseline) if whole else None,
        by_samples={
            size: _pass_profile(profile, _without(profile.work, added), profile.work, baseline)
            for size, profile in zip(sizes, further, strict=True)
        },
        baseline_bytes=baseline,
        gradients=optimizer.gradients,
        attention=recording.trace.attention,
    )


class _StepsOfSizes(PlainStep):
    """The plain training loop without an optimizer update, in which micro-batches may differ in size."""

    sizes: Sequence[Sequence[int]] = ()
    """Number of samples in each micro-batch, by step."""
    gradients_stand = False
    """True if gradients are not cleared between steps, so that each step adds to those of the previous one.
    """

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Build the model and run the forward and backward passes of all steps. Each is reported as a first
        step. Return an empty list in place of losses.
        """

        with run_context(self.setup):
            observer.phase("build")
            model = build_model(self.job, self.setup, self.device)
            optimizer = build_optimizer(self.job, self.setup, model)
            scaler = make_scaler(self.setup, self.device)
            observer.build_ends(model, optimizer)
            for sizes in self.sizes:
                batch = [self._micro_batch(samples) for samples in sizes]
                observer.step_begins(0)
                self._accumulate(Built(model, model, optimizer, scaler, iter([batch]), observer))
                observer.phase("update")
                optimizer.step()
                if not self.gradients_stand or sizes is self.sizes[-1]:
                    optimizer.zero_grad(set_to_none=True)
                observer.step_ends(0)
        self.model, self.optimizer = model, optimizer
        return []

    def _micro_batch(self, samples: int) -> dict[str, Any]:
        job = replace(self.job, batch_size=samples)
        if job.model.module is None:  # a loader would number millions of samples, of which one is used
            rows: Any = dataset(job, self.setup, self.device)
            batch: dict[str, Any] = collator(job, self.device)(rows.__getitems__(range(samples)))
            return batch
        with contextlib.closing(micro_batches(job, self.setup, self.device, 1)) as batches:
            return next(batches)[0]


def _pass_profile(profile: MicroBatchProfile, first: Work, further: Work, baseline: int) -> PassProfile:
    increase = {phase: peak - baseline for phase, peak in profile.peaks.items()}
    return PassProfile(increase, profile.live_after - baseline, first, further, profile.kept_bytes)


class _KernelKey(NamedTuple):
    """Properties of a kernel that do not depend on the micro-batch size. They identify the kernels that
    accumulate gradients.
    """

    operator: str
    module: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kernel: Kernel) -> Self:
        return cls(kernel.operator, kernel.module, kernel.phase, kernel.shapes)

    @property
    def may_add_to_gradient(self) -> bool:
        """True if the kernel may accumulate a gradient: an addition of two equal shapes in the backward
        pass."""
        return self.operator in ADDITIONS and self.phase == "backward" and len(set(self.shapes)) == 1


def _additions(first: Work, further: Sequence[Work]) -> Counter[_KernelKey]:
    """Count the kernels that accumulate gradients: additions of later micro-batches that the first
    micro-batch lacks.

    The first micro-batch may have another size.
    """
    known = Counter(map(_KernelKey.of, first.kernels))
    more = [Counter(map(_KernelKey.of, work.kernels)) - known for work in further]
    # Only additions that all sizes have in common belong to gradients.
    common = functools.reduce(operator.and_, more)
    return Counter({key: count for key, count in common.items() if key.may_add_to_gradient})


def _without(work: Work, additions: Counter[_KernelKey]) -> Work:
    """Return the first micro-batch's kernels, without those that add to existing gradients. Without an
    existing gradient, autograd takes the new one by a view and adds nothing. That view, and those before the
    addition, count for the next kernel.
    """
    left_out = additions.copy()
    kernels: list[Kernel] = []
    waits: list[int] = []
    before = deque(work.waits)
    views = 0
    for at, kernel in enumerate(work.kernels):
        while before and before[0] <= at:
            waits.append(len(kernels))
            before.popleft()
        if left_out[key := _KernelKey.of(kernel)] > 0:
            left_out[key] -= 1
            views += kernel.views + 1
        else:
            kernels.append(kernel._replace(views=kernel.views + views) if views else kernel)
            views = 0
    return Work(tuple(kernels), (*waits, *(len(kernels) for _ in before)))


def update_of(part: Part) -> UpdateProfile:
    """Return the bytes and kernels of an optimizer update that was simulated alone.

    Allocations before the update belong to the forward and backward passes. Gradients are an exception, since
    the update frees them. In a recorded update, the second step has the largest peak, and the last one
    repeats in all later steps.
    """
    (made_before, makes), (_, steady), *_ = part.cut
    allocs = (event for event in made_before if isinstance(event, Alloc))
    gradients = sum(alloc.nbytes for alloc in allocs if alloc.kind == Kind.GRADIENTS)
    workspaces = sum(
        alloc.nbytes for alloc in permanent_workspaces(makes)
    )  # passes may have taken them already
    states = sum(map(_change, makes)) + gradients - workspaces
    last = part.cut[-1].update
    return UpdateProfile(max(accumulate(map(_change, steady)), default=0), states, _work(last))


def _work(events: Sequence[TraceEvent]) -> Work:
    kernels, waits = [], []
    for event in events:
        if isinstance(event, Kernel):
            kernels.append(event)
        elif event is MarkKind.WAIT:
            waits.append(len(kernels))
    return Work(tuple(kernels), tuple(waits))


def _change(event: TraceEvent) -> int:
    """Return the bytes by which an allocation or a free changes the live memory."""
    if isinstance(event, Alloc):
        return event.nbytes
    return -event.stack.nbytes if isinstance(event, Free) else 0

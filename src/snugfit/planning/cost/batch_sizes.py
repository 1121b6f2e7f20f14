"""Passes of several micro-batch sizes in one rehearsal: what a planner compares before it simulates in full.

One model is built, and two steps run through it: one of the whole batch in one piece, and one whose
micro-batches are each of another size. What is made once (workspaces, a gradient scaler) is made by the very
first of them, and counts as if it had always been there. The whole batch finds no gradients; every later
micro-batch adds its own to those that are there, as all but the first of a step do. So one micro-batch of
each size is enough, and three figures are kept of it: how far the live bytes rise, how many are left at its
end, and its kernels. The kernels of a step's first micro-batch are the same without the additions, and which
those are shows the comparison with the whole batch; where that is not asked for, or one size is, the smallest
runs twice.

An update, recorded alone (`splice.py`), gives the same three figures. Together they tell the live bytes at
the worst moment of a steady step: a sum and a maximum, with nothing left out but the first step, in which
less is alive. So it is never more than the truth.
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

from snugfit.rehearsal.record.first_launches import settings_known
from snugfit.rehearsal.rehearse import record_step
from snugfit.rehearsal.splice import NOTHING, Part, kept_workspaces
from snugfit.rehearsal.trace.profile import MicroBatchProfile, profile_micro_batches
from snugfit.rehearsal.trace.relative import Alloc, Free, Move
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
"""By which autograd adds to a gradient that is there."""


class PassProfile(NamedTuple):
    """The passes of one step, all micro-batches of one size."""

    peak_increase: Mapping[str, int]
    """Most live bytes, above those between steps, at the allocations in each phase and module; layers of one
    stack count as one module."""
    residual_bytes: int
    """Live bytes when the update begins, above those between steps."""
    first: Work
    """Of its first micro-batch."""
    further: Work
    """Of any further one; nothing when it has but one."""
    kept_bytes: Mapping[str, int]
    """Bytes that layers keep for the backward pass, by the operator that made them."""


@dataclass(frozen=True)
class PassProfiles:
    """Passes of several sizes on one model."""

    whole: PassProfile | None
    """Of the whole batch in one piece, when that was asked for."""
    by_samples: Mapping[int, PassProfile]
    """By the samples of a micro-batch, of those that are smaller."""
    baseline_bytes: int
    """Live bytes between steps: weights, and what is made once."""
    gradients: tuple[int, ...]
    """Which of the parameters that train have a gradient, by number."""
    attention: tuple[str, ...]
    """Which attention kernels were chosen."""


class UpdateProfile(NamedTuple):
    """The update of a steady step."""

    peak_increase: int
    """Most live bytes, above those when it begins."""
    state_bytes: int
    """Live bytes that it keeps from step to step."""
    work: Work


def rehearse_sizes(
    job: Job, setup: Setup, policy: Policy, sizes: Iterable[int], *, whole: bool
) -> PassProfiles:
    """The passes of this job with micro-batches of each of these sizes, and with `whole` in one piece, under
    everything in this Setup but its optimizer."""
    import torch

    job = replace(job, clip=None, decay_groups=False)
    step = _StepsOfSizes(job, replace(setup, micro_batches=1, optimizer=NOTHING), torch.device("meta"))
    sizes = sorted(set(sizes))
    step.sizes = [[job.batch_size]] if whole else []
    step.gradients_stand = whole and len(sizes) > 1
    step.sizes += [sizes if step.gradients_stand else [sizes[0], *sizes]] if sizes else []
    with settings_known():
        recording = record_step(step, policy, 1)
    optimizer: Any = step.optimizer
    profiles = list(profile_micro_batches(recording))
    baseline = profiles[-1].live_after
    passes = [profile for profile in profiles if profile.number]  # the others are updates
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
    """The plain loop without an update, each micro-batch of a size of its own."""

    sizes: Sequence[Sequence[int]] = ()
    """Of each step, the samples of its micro-batches."""
    gradients_stand = False
    """Whether a step adds to the gradients of the one before."""

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Builds, and runs its steps, each of which is announced as the first; there is no loss."""

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
        if job.model.module is None:  # a loader would number millions of samples, of which one is made
            rows: Any = dataset(job, self.setup, self.device)
            batch: dict[str, Any] = collator(job, self.device)(rows.__getitems__(range(samples)))
            return batch
        with contextlib.closing(micro_batches(job, self.setup, self.device)) as batches:
            return next(batches)[0]


def _pass_profile(profile: MicroBatchProfile, first: Work, further: Work, baseline: int) -> PassProfile:
    increase = {where: peak - baseline for where, peak in profile.peaks.items()}
    return PassProfile(increase, profile.live_after - baseline, first, further, profile.kept_bytes)


class _KernelKey(NamedTuple):
    """What tells an addition to a gradient from other kernels, however large the micro-batch is."""

    operator: str
    module: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kernel: Kernel) -> Self:
        return cls(kernel.operator, kernel.module, kernel.phase, kernel.shapes)

    @property
    def may_add_to_gradient(self) -> bool:
        """Whether it adds two tensors of one shape in backward."""
        return self.operator in ADDITIONS and self.phase == "backward" and len(set(self.shapes)) == 1


def _additions(first: Work, further: Sequence[Work]) -> Counter[_KernelKey]:
    """What all further micro-batches run and a first one, perhaps of another size, does not: the additions to
    gradients that are there."""
    known = Counter(map(_KernelKey.of, first.kernels))
    more = [Counter(map(_KernelKey.of, work.kernels)) - known for work in further]
    common = functools.reduce(operator.and_, more)
    return Counter({key: count for key, count in common.items() if key.may_add_to_gradient})


def _without(work: Work, additions: Counter[_KernelKey]) -> Work:
    """The first micro-batch's work: where no gradient is there yet, autograd takes a gradient by a view and
    adds nothing. That view, and those before the addition, count for the kernel that comes next."""
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
    """The figures of an update that was recorded alone. What happens before it belongs to the passes, but
    for the gradients, which are dropped here. Of one that is recorded, the second step allocates most, and
    the last is the one that runs ever after."""
    (made_before, makes), (_, steady), *_ = part.cut
    allocs = (move for move in made_before if isinstance(move, Alloc))
    gradients = sum(alloc.nbytes for alloc in allocs if alloc.kind == Kind.GRADIENTS)
    workspaces = sum(alloc.nbytes for alloc in kept_workspaces(makes))  # passes may have taken them already
    states = sum(map(_change, makes)) + gradients - workspaces
    last = part.cut[-1].update
    return UpdateProfile(max(accumulate(map(_change, steady)), default=0), states, _work(last))


def _work(moves: Sequence[Move]) -> Work:
    kernels, waits = [], []
    for move in moves:
        if isinstance(move, Kernel):
            kernels.append(move)
        elif move is MarkKind.WAIT:
            waits.append(len(kernels))
    return Work(tuple(kernels), tuple(waits))


def _change(move: Move) -> int:
    """By how many bytes this move changes what is live."""
    if isinstance(move, Alloc):
        return move.nbytes
    return -move.stack.nbytes if isinstance(move, Free) else 0

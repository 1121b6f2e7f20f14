"""Passes of several micro-batch sizes in one rehearsal: what a planner compares before it rehearses whole.

One model is built, and two steps run through it: one of the whole batch in one piece, and one whose
micro-batches are each of another size. What is made once (workspaces, a gradient scaler) is made by the very
first of them, and counts as if it had always been there. The whole batch finds no gradients; every later
micro-batch adds its own to those that stand, as all but the first of a step do. So one micro-batch of each
size is enough, and three figures are kept of it: how far the live bytes rise, what stands when it has passed,
and its kernels. The kernels of a step's first micro-batch are the same without the additions, and which those
are shows beside the whole batch; where that is not asked for, or one size is, the smallest runs twice.

An update, rehearsed alone (`splice.py`), gives the same three figures. Together they tell the live bytes at
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
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.rehearsal.rehearse import record_step
from snugfit.rehearsal.splice import NOTHING, Part, kept_workspaces, split_update
from snugfit.rehearsal.trace.profile import MicroBatchProfile, profile_micro_batches
from snugfit.rehearsal.trace.relative import Alloc, Free, Move
from snugfit.rehearsal.trace.repeat import split_steps
from snugfit.rehearsal.trace.trace import Kernel, MarkKind, Work
from snugfit.results.footprint import Kind
from snugfit.step.batches import micro_batches
from snugfit.step.install import build_model, build_optimizer, matmul_precision
from snugfit.step.plain_loop import Built, PlainStep

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup


ADDITIONS = ("aten::add", "aten::add_")
"""By which autograd adds to a gradient that stands."""


class Round(NamedTuple):
    """The passes of one step, all micro-batches of one size."""

    rises: Mapping[str, int]
    """Most live bytes, above those between steps, at the births in each phase and module; layers of one stack
    count as one module."""
    left: int
    """Live bytes when the update begins, above those between steps."""
    first: Work
    """Of its first micro-batch."""
    further: Work
    """Of any further one; nothing when it has but one."""


@dataclass(frozen=True)
class Passes:
    """Rounds of passes on one model."""

    whole: Round | None
    """Of the whole batch in one piece, when that was asked for."""
    cut: Mapping[int, Round]
    """By the samples of a micro-batch, of those that are smaller."""
    standing: int
    """Live bytes between steps: weights, and what is made once."""
    gradients: tuple[int, ...]
    """Which of the parameters that train have a gradient, by number."""
    attention: tuple[str, ...]
    """Which attention kernels were chosen."""


class Update(NamedTuple):
    """The update of a steady step."""

    rise: int
    """Most live bytes, above those when it begins."""
    states: int
    """Live bytes that it keeps from step to step."""
    work: Work
    """What the device does."""


def rehearse_sizes(job: Job, setup: Setup, policy: Policy, sizes: Iterable[int], *, whole: bool) -> Passes:
    """The passes of this job with micro-batches of each of these sizes, and with `whole` in one piece, under
    everything in this Setup but its optimizer."""
    import torch

    job = replace(job, clip=None, decay_groups=False)
    step = _Rounds(job, replace(setup, micro_batches=1, optimizer=NOTHING), torch.device("meta"))
    sizes = sorted(set(sizes))
    step.rounds = [[job.batch_size]] if whole else []
    step.gradients_stand = whole and len(sizes) > 1
    step.rounds += [sizes if step.gradients_stand else [sizes[0], *sizes]] if sizes else []
    recording = record_step(step, policy, 1)
    optimizer: Any = step.optimizer
    profiles = list(profile_micro_batches(recording))
    standing = profiles[-1].live_after
    passes = [profile for profile in profiles if profile.number]  # the others are updates
    before, further = passes[: -len(sizes) or None], passes[len(passes) - len(sizes) :]
    first = before[0]
    added = _additions(before[-1].work, [profile.work for profile in further]) if sizes else Counter()
    return Passes(
        whole=_round(first, first.work, Work(), standing) if whole else None,
        cut={
            size: _round(profile, _without(profile.work, added), profile.work, standing)
            for size, profile in zip(sizes, further, strict=True)
        },
        standing=standing,
        gradients=optimizer.gradients,
        attention=recording.trace.attention,
    )


class _Rounds(PlainStep):
    """The plain loop without an update, each micro-batch of a size of its own."""

    rounds: Sequence[Sequence[int]] = ()
    gradients_stand = False
    """Whether a round adds to the gradients of the one before."""

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Builds, and runs a step for each round; all are told as the first, and there is no loss."""
        import torch

        with matmul_precision(self.setup.matmul):
            observer.phase("build")
            model = build_model(self.job, self.setup, self.device)
            optimizer = build_optimizer(self.job, self.setup, model)
            scaler = torch.amp.GradScaler(self.device.type) if self.setup.scale_gradients else None
            observer.built(model, optimizer)
            for sizes in self.rounds:
                pieces = [self._piece(samples) for samples in sizes]
                observer.step_begins(0)
                self._accumulate(Built(model, optimizer, scaler, iter([pieces]), observer))
                observer.phase("update")
                optimizer.step()
                if not self.gradients_stand or sizes is self.rounds[-1]:
                    optimizer.zero_grad(set_to_none=True)
                observer.step_ends(0)
        self.model, self.optimizer = model, optimizer
        return []

    def _piece(self, samples: int) -> dict[str, Any]:
        job = replace(self.job, batch_size=samples)
        with contextlib.closing(micro_batches(job, self.setup, self.device)) as batches:
            return next(batches)[0]


def _round(profile: MicroBatchProfile, first: Work, further: Work, standing: int) -> Round:
    rises = {where: level - standing for where, level in profile.peaks.items()}
    return Round(rises, profile.live_after - standing, first, further)


def _additions(first: Work, further: Sequence[Work]) -> Counter[Any]:
    """What all further micro-batches run and a first one, perhaps of another size, does not: the additions to
    gradients that stand, two tensors of one shape in backward."""
    known = Counter(map(_what, first.kernels))
    more = [Counter(map(_what, work.kernels)) - known for work in further]
    common = functools.reduce(operator.and_, more)
    return Counter({what: count for what, count in common.items() if _adds(*what)})


def _adds(name: str, module: str, phase: str, shapes: Sequence[tuple[int, ...]]) -> bool:
    return name in ADDITIONS and phase == "backward" and len(set(shapes)) == 1


def _without(work: Work, added: Counter[Any]) -> Work:
    """The first micro-batch's work: where nothing stands yet, autograd takes a gradient by a view and adds
    nothing. That view, and those before the addition, count for the kernel that comes next."""
    left = added.copy()
    kept: list[Kernel] = []
    waits: list[int] = []
    before = deque(work.waits)
    views = 0
    for place, kernel in enumerate(work.kernels):
        while before and before[0] <= place:
            waits.append(len(kept))
            before.popleft()
        if left[what := _what(kernel)] > 0:
            left[what] -= 1
            views += kernel.views + 1
        else:
            kept.append(kernel._replace(views=kernel.views + views) if views else kernel)
            views = 0
    return Work(tuple(kept), (*waits, *(len(kept) for _ in before)))


def _what(kernel: Kernel) -> Any:
    return kernel.operator, kernel.module, kernel.phase, kernel.shapes


def update_of(part: Part) -> Update:
    """The figures of an update that was recorded alone. Whatever goes before it belongs to the passes, but
    for the gradients, which are dropped here."""
    (made_before, makes), (_, steady) = map(split_update, split_steps(part.trace.moves).steps)
    allocs = (move for move in made_before if isinstance(move, Alloc))
    gradients = sum(alloc.nbytes for alloc in allocs if alloc.kind == Kind.GRADIENTS)
    workspaces = sum(alloc.nbytes for alloc in kept_workspaces(makes))  # passes may have taken them already
    states = sum(map(_change, makes)) + gradients - workspaces
    return Update(max(accumulate(map(_change, steady)), default=0), states, _work(steady))


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

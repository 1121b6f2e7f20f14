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

from snugfit.rehearsal.rehearse import rehearsed
from snugfit.rehearsal.splice import NOTHING, Part
from snugfit.rehearsal.trace.pieces import Piece, Work, pieces_in
from snugfit.rehearsal.trace.repeat import cut
from snugfit.rehearsal.trace.score import Birth, Death, Entry, Move, Run, Wait
from snugfit.results.footprint import Kind
from snugfit.step.batches import micro_batches
from snugfit.step.install import build_model, build_optimizer, matmul_precision
from snugfit.step.plain_loop import Built, PlainStep

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.trace.trace import Kernel
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup


ADDITIONS = ("aten::add", "aten::add_")
"""By which autograd adds to a gradient that stands."""

UPDATING = ("clip", "update")
"""Phases of a step that come after its passes."""


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
    trace, notes = rehearsed(step, policy, 1)
    optimizer: Any = step.optimizer
    passed = list(pieces_in(trace, notes))
    standing = passed[-1].after
    pieces = [piece for piece in passed if piece.number]  # the others are updates
    before, further = pieces[: -len(sizes) or None], pieces[len(pieces) - len(sizes) :]
    first, cut = before[0], dict(zip(sizes, further, strict=True))
    added = _additions(before[-1].work, [piece.work for piece in further]) if sizes else Counter()
    return Passes(
        whole=_round(first, first.work, Work(), standing) if whole else None,
        cut={
            size: _round(piece, _without(piece.work, added), piece.work, standing)
            for size, piece in cut.items()
        },
        standing=standing,
        gradients=optimizer.gradients,
        attention=trace.attention,
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


def _round(piece: Piece, first: Work, further: Work, standing: int) -> Round:
    rises = {where: level - standing for where, level in piece.levels.items()}
    return Round(rises, piece.after - standing, first, further)


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
    """The figures of an update that was rehearsed alone. Whatever goes before it belongs to the passes, but
    for the gradients, which are dropped here."""
    _, rounds, _ = cut(part.score.moves)
    (held, made), (_, steady) = (_parted(moves) for moves in rounds)
    gradients = [move.nbytes for move in held if isinstance(move, Birth) and move.kind == Kind.GRADIENTS]
    states = _level(made) + sum(gradients) - _kept_workspaces(made)
    return Update(_rise(steady), states, _work(steady))


def _parted(moves: Sequence[Move]) -> tuple[Sequence[Move], Sequence[Move]]:
    """A step's moves before its update, and in it."""
    place = next(n for n, move in enumerate(moves) if isinstance(move, Entry) and move.phase in UPDATING)
    return moves[:place], moves[place:]


def _work(moves: Sequence[Move]) -> Work:
    kernels, waits = [], []
    for move in moves:
        if isinstance(move, Run):
            kernels.append(move.kernel)
        elif isinstance(move, Wait):
            waits.append(len(kernels))
    return Work(tuple(kernels), tuple(waits))


def _change(move: Move) -> int:
    if isinstance(move, Birth):
        return move.nbytes
    return -move.alike.nbytes if isinstance(move, Death) else 0


def _level(moves: Sequence[Move]) -> int:
    return sum(map(_change, moves))


def _rise(moves: Sequence[Move]) -> int:
    return max(accumulate(map(_change, moves)), default=0)


def _kept_workspaces(moves: Sequence[Move]) -> int:
    """Bytes of workspaces that a thread keeps: passes may have taken them already."""
    dead = {move.alike for move in moves if isinstance(move, Death)}
    births = (move for move in moves if isinstance(move, Birth) and move.kind == Kind.WORKSPACES)
    return sum(birth.nbytes for birth in births if birth.alike not in dead)

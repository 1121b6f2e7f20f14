"""Passes of several micro-batch sizes in one rehearsal: what a planner compares before it rehearses whole.

One model is built, and two steps run through it: one whose micro-batches are each of another size, the first
size twice, and one of the whole batch in one piece. What is made once (workspaces, a gradient scaler) is made
by the very first micro-batch; every later one adds its gradients to those that stand, as all but the first of
a step do. So one micro-batch of each size is enough, and three figures are kept of it: how far the live bytes
rise, what stands when it has passed, and its kernels. The kernels of a step's first micro-batch are the same
without the additions, and which those are shows between the two of the first size.

An update, rehearsed alone (`splice.py`), gives the same three figures. Together they tell the live bytes at
the worst moment of a steady step: a sum and a maximum, with nothing left out but the first step, in which
less is alive. So it is never more than the truth.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.rehearsal.rehearse import rehearsed
from snugfit.rehearsal.repeat import cut
from snugfit.rehearsal.score import Birth, Death, Entry, Move, Run, Wait, folded
from snugfit.rehearsal.splice import NOTHING, Part
from snugfit.step.batches import micro_batches
from snugfit.step.footprint import Kind
from snugfit.step.install import build_model, build_optimizer, matmul_precision
from snugfit.step.plain_loop import Built, PlainStep

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.policy import Policy
    from snugfit.rehearsal.score import Note
    from snugfit.rehearsal.tape import Kernel, Mark, Tape
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup


UPDATING = ("clip", "update")
"""Phases of a step that come after its passes."""


class Work(NamedTuple):
    """What the device does."""

    kernels: tuple[Kernel, ...] = ()
    waits: tuple[int, ...] = ()
    """Before which of them the host waits."""

    def then(self, other: Work) -> Work:
        """This, and the other after it."""
        waits = (len(self.kernels) + place for place in other.waits)
        return Work(self.kernels + other.kernels, (*self.waits, *waits))


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
    step.rounds = [[sizes[0], *sizes]] if sizes else [[job.batch_size]]
    step.rounds += [[job.batch_size]] if whole else []
    tape, notes = rehearsed(step, policy, 1)
    optimizer: Any = step.optimizer
    passed = list(_passed(tape, notes))
    standing = passed[-1].after
    pieces = [piece for piece in passed[1:-1] if piece.number]  # the first warmed up, the last is the update
    cut = dict(zip(sizes, (piece for piece in pieces[: len(sizes)]), strict=True))
    added = _additions(passed[0].work, cut[sizes[0]].work) if sizes else Counter()
    return Passes(
        whole=_round(pieces[-1], pieces[-1].work, Work(), standing) if whole else None,
        cut={
            size: _round(piece, _without(piece.work, added), piece.work, standing)
            for size, piece in cut.items()
        },
        standing=standing,
        gradients=optimizer.gradients,
        attention=tape.attention,
    )


class _Rounds(PlainStep):
    """The plain loop without an update, each micro-batch of a size of its own."""

    rounds: Sequence[Sequence[int]] = ()

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
                optimizer.zero_grad(set_to_none=True)
                observer.step_ends(0)
        self.model, self.optimizer = model, optimizer
        return []

    def _piece(self, samples: int) -> dict[str, Any]:
        job = replace(self.job, batch_size=samples)
        with contextlib.closing(micro_batches(job, self.setup, self.device)) as batches:
            return next(batches)[0]


class _Piece(NamedTuple):
    """A stretch of a run: the passes of one micro-batch, or an update."""

    number: int
    """Of the micro-batch in its step, from 1; 0 for an update."""
    levels: Mapping[str, int]
    """Most live bytes at the births in each phase and module."""
    after: int
    """Live bytes at its end."""
    work: Work


def _passed(tape: Tape, notes: Sequence[Note]) -> Iterator[_Piece]:
    """The micro-batches and updates of a run, in order."""
    live, kernels = [*tape.live()], iter(tape.kernels)
    numbers = _pieces(tape.marks)
    starts = [place for place, number in enumerate(numbers) if number >= 0 and number != numbers[place - 1]]
    ends = [*starts[1:], len(numbers)]
    queue = deque(notes)
    for start, end in zip(starts, ends, strict=True):
        ran: list[Kernel] = []
        waits: list[int] = []
        while queue and queue[0].marks <= end:
            note = queue.popleft()
            if note.what == "kernel":
                ran.append(next(kernels))
            elif note.what == "wait":
                waits.append(len(ran))
        first = tape.marks[start].event
        last = tape.marks[end].event if end < len(numbers) else len(tape.events)
        work = Work(tuple(ran), tuple(waits))
        yield _Piece(numbers[start], _levels(tape, live, first, last), live[last - 1], work)


def _round(piece: _Piece, first: Work, further: Work, standing: int) -> Round:
    rises = {where: level - standing for where, level in piece.levels.items()}
    return Round(rises, piece.after - standing, first, further)


def _additions(first: Work, further: Work) -> Counter[Any]:
    """What a further micro-batch runs more than the first: the additions to gradients that stand."""
    return Counter(map(_what, further.kernels)) - Counter(map(_what, first.kernels))


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


def _levels(tape: Tape, live: Sequence[int], start: int, end: int) -> dict[str, int]:
    levels: dict[str, int] = defaultdict(int)
    for place in range(start, end):
        if (event := tape.events[place]) > 0:
            block = tape.blocks[event - 1]
            where = f"{block.phase} {folded(block.module)}"
            levels[where] = max(levels[where], live[place])
    return dict(levels)


def _pieces(marks: Sequence[Mark]) -> list[int]:
    """Of each mark, which micro-batch of its step it belongs to; 0 for the update, -1 for the build."""
    found = [-1]
    for before, mark in pairwise(marks):
        if mark.step < 0:
            found.append(-1)
        elif mark.phase == "update":
            found.append(0)
        elif before.phase in ("update", "build"):
            found.append(1)
        else:
            found.append(found[-1] + ((before.phase, mark.phase) == ("backward", "load")))
    return found


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

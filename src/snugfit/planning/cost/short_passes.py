"""Passes rehearsed in one step and two micro-batches, and written out as two steps and three.

A second step is the first again, without what the first made for good: workspaces, a scaler's tensors. A
third micro-batch is the second again, which begins while the one before it still holds its inputs. So one
step with two micro-batches tells what two steps with three would, at a third of the work.

That a step is like this is no law of torch: a model may keep its last output, and replace it. So each kind of
passes is proven first, on a model of few layers: `is_brief` rehearses it both ways and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.rehearse import rehearsed
from snugfit.rehearsal.splice import NOTHING, Part, Played, rehearse_passes
from snugfit.rehearsal.trace.repeat import cut, pieces_of
from snugfit.rehearsal.trace.score import Birth, Death, Entry, Move, Run, Score, Wait
from snugfit.step.plain_loop import PlainStep

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.techniques.setup import Setup

PIECES = 2
"""Micro-batches that are rehearsed for any larger number."""


def brief_passes(job: Job, setup: Setup, policy: Policy) -> Part | None:
    """What `rehearse_passes` gives, for passes that are known to be brief; None where they show not to be."""
    import torch

    pieces = min(setup.micro_batches, PIECES)
    job = replace(
        job, clip=None, decay_groups=False, batch_size=job.batch_size // setup.micro_batches * pieces
    )
    setup = replace(setup, micro_batches=pieces, optimizer=NOTHING)
    step = PlainStep(job, setup, torch.device("meta"))
    score = Score.of(*rehearsed(step, policy, 1))
    optimizer: Any = step.optimizer
    full = _written_out(score)
    return None if full is None else Part(full, optimizer.gradients)


def is_brief(job: Job, setup: Setup, policy: Policy) -> bool:
    """Whether the passes of this job, best on few layers, are the same briefly and in full."""
    brief = brief_passes(job, setup, policy)
    return brief is not None and _timeless(brief) == _timeless(rehearse_passes(job, setup, policy))


def _timeless(part: Part) -> tuple[Any, ...]:
    """All of a part but what runs in its first step: of that a trace keeps nothing."""
    moves, counted = [], False
    for move in part.score.moves:
        counted = move.step > 0 if isinstance(move, Entry) else counted
        if counted or not isinstance(move, Run | Wait):
            moves.append(move)
    return tuple(moves), part.gradients, part.score.attention


def _written_out(score: Score) -> Score | None:
    build, rounds, rest = cut(score.moves)
    first = _with_a_third(rounds[0])
    if first is None:
        return None
    second = [move._replace(step=1) if isinstance(move, Entry) else move for move in _again(build, first)]
    return replace(score, moves=(*build, *first, *second, *rest))


def _with_a_third(moves: Sequence[Move]) -> list[Move] | None:
    """A step of two micro-batches with its second one twice; a step of one as it is."""
    starts = pieces_of(moves)
    if len(starts) < PIECES:
        return list(moves)
    ends = next(n for n, move in enumerate(moves) if isinstance(move, Entry) and move.phase == "update")
    last = ends
    while isinstance(before := moves[last - 1], Death) and before.alike.phase == "load":
        last -= 1  # the batch of the last micro-batch: a further one would take its place first
    return [*moves[:last], *moves[starts[1] : last], *moves[last:]]


def _again(build: Sequence[Move], step: Sequence[Move]) -> list[Move]:
    """The same step once more, when what it leaves behind is there."""
    first, second = Played(), Played()
    same = dict(zip(first.play(build), second.play(build), strict=True))
    names = [_name(first, move) for move in step]
    dead = {block for move, block in zip(step, names, strict=True) if isinstance(move, Death)}
    lasting = {block for block, birth in enumerate(first.births) if birth.nbytes and block not in dead}
    lasting -= same.keys()
    same |= {block: second.born(first.births[block]) for block in sorted(lasting)}
    moves: list[Move] = []
    made: list[str] = []  # by the kernel that comes next: the operators of what lasts, "" for the rest
    for move, block in zip(step, names, strict=True):
        if type(move) is Birth:
            made.append(move.operator if block in lasting else "")
            if block in lasting:
                continue
            same[block] = second.born(move)
        elif type(move) is Run:
            once = set(made) == {move.kernel.operator}
            made = []
            if once:
                continue
        moves.append(second.death(same[block]) if type(move) is Death else move)
    return moves


def _name(played: Played, move: Move) -> int:
    if type(move) is Birth:
        return played.born(move)
    return played.living.dies(move) if type(move) is Death else -1

"""A step spliced from parts that were rehearsed alone: law 5, for recipes.

A training step is its passes (forward and backward, one micro-batch after the other) and its update
(clipping, the optimizer, dropping the gradients). The passes depend on precision, attention, adapters,
checkpointing and the size of a micro-batch; the update on the optimizer, the precision of what it updates,
the adapters and clipping. What joins them is the gradients alone: the passes give birth to them, the update
kills them. So each part is rehearsed once, with the other one's place held: the passes with an optimizer
that does nothing, the update with gradients made of nothing. A planner that asks for every pair rehearses
the sum of the parts and not their product.

A splice is the plain loop's. Where the parts do not meet, because a gradient shares its storage with another
or is not of its parameter's size, the answer is None, and the caller rehearses the step whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.rehearse import STEPS, rehearsed
from snugfit.rehearsal.trace.repeat import MICRO_BATCHES, Cut, cut, repeated
from snugfit.rehearsal.trace.repeat import STEPS as STEPS_OF_A_PART
from snugfit.rehearsal.trace.score import Birth, Death, Entry, Living, Move, Score
from snugfit.results.footprint import Kind
from snugfit.step.install import matmul_precision
from snugfit.step.plain_loop import Built, OptimizerLoop, PlainStep
from snugfit.techniques.setup import Call, OptimizerWish, Setup

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.step.step import Observer

NOTHING = OptimizerWish(factory=Call(path="snugfit.rehearsal.splice:optimizer_that_does_nothing"))


@dataclass(frozen=True)
class Part:
    """A part of a step, rehearsed alone."""

    score: Score
    gradients: tuple[int, ...]
    """Which of the parameters that train have a gradient, by number."""


def rehearse_passes(job: Job, setup: Setup, policy: Policy) -> Part:
    """Forward and backward of a job under everything in this Setup but its optimizer. Of many micro-batches
    three are rehearsed; `spliced` makes any number of them."""
    pieces = min(setup.micro_batches, 2) // 2 * MICRO_BATCHES or 1
    job = replace(
        job, clip=None, decay_groups=False, batch_size=job.batch_size // setup.micro_batches * pieces
    )
    setup = replace(setup, micro_batches=pieces, optimizer=NOTHING)
    step = PlainStep(job, setup, _meta())
    score = Score.of(*rehearsed(step, policy, STEPS_OF_A_PART))
    optimizer: Any = step.optimizer
    return Part(score, optimizer.gradients)


def rehearse_update(job: Job, setup: Setup, policy: Policy, gradients: tuple[int, ...]) -> Part:
    """Clipping and the optimizer's step under this Setup, where these parameters have gradients."""
    step = _UpdateAlone(job, replace(setup, micro_batches=1, checkpoint=None), _meta())
    step.gradients = gradients
    return Part(Score.of(*rehearsed(step, policy, STEPS_OF_A_PART)), gradients)


def spliced(passes: Part, update: Part, *, micro_batches: int = 1, steps: int = STEPS) -> Trace | None:
    """The trace of the step that has these parts, as `rehearse` would write it; None when they do not
    meet."""
    if passes.gradients != update.gradients:
        return None
    first, second = cut(passes.score.moves), cut(update.score.moves)
    (first_build, _, rest), (build, _, other_rest) = first, second
    if build[: len(first_build)] != first_build or _dead(rest) != _dead(other_rest):
        return None
    try:
        moves = [*build, *_joined(passes, update, first[1], second), *rest]
        score = repeated(replace(passes.score, moves=tuple(moves)), steps=steps, micro_batches=micro_batches)
        return score.trace() if score is not None else None
    except LookupError:
        return None


def _joined(
    passes: Part, update: Part, first_rounds: Sequence[Sequence[Move]], second: Cut
) -> Iterator[Move]:
    """Each step's passes, then its update, in which the gradients of the passes die."""
    build, second_rounds, _ = second
    there, alone = Played(), Played()  # the spliced run, and the update as it was rehearsed
    same = dict(zip(alone.play(build), there.play(build), strict=True))
    taken = {workspace.operator for workspace in _workspaces(passes) if workspace.phase != "backward"}
    kept = _workspaces(update)
    for passed, updated in zip(first_rounds, second_rounds, strict=True):
        (before, nothing), (held, after) = _at_update(passed), _at_update(updated)
        yield from before
        there.play(before)
        stand_ins = [block for block in alone.play(held) if alone.is_gradient(block)]
        real = there.would_die(nothing)
        if len(stand_ins) != len(update.gradients) or alone.sizes(stand_ins) != there.sizes(real):
            raise LookupError("the gradients do not match")
        same |= zip(stand_ins, real, strict=True)
        for move in after:
            if isinstance(move, Death):
                yield there.death(same[alone.dies(move)])
                continue
            if isinstance(move, Birth):
                block = alone.born(move)
                if move in kept and move.operator in taken:
                    continue
                same[block] = there.born(move)
            yield move


def _workspaces(part: Part) -> list[Birth]:
    """The workspaces that a thread takes once and keeps. The update runs on the thread of the forward pass,
    which has taken its own already."""
    moves, kind = part.score.moves, str(Kind.WORKSPACES)
    births = [move for move in moves if type(move) is Birth and move.kind == kind]
    dead = {move.alike for move in moves if type(move) is Death and move.alike.kind == kind}
    return [birth for birth in births if birth.alike not in dead]


def _at_update(moves: Sequence[Move]) -> tuple[Sequence[Move], Sequence[Move]]:
    """A step cut where its passes end."""
    place = next(
        place
        for place, move in enumerate(moves)
        if isinstance(move, Entry) and move.phase in ("clip", "update")
    )
    return moves[:place], moves[place:]


def _dead(moves: Sequence[Move]) -> Counter[Birth]:
    return Counter(move.alike for move in moves if isinstance(move, Death))


class Played:
    """The blocks of a run, by the order of their births."""

    def __init__(self) -> None:
        self.births: list[Birth] = []
        self.living = Living()

    def play(self, moves: Sequence[Move]) -> list[int]:
        """Goes through these moves; gives the blocks that were born."""
        first = len(self.births)
        for move in moves:
            if type(move) is Birth:
                self.born(move)
            elif type(move) is Death:
                self.living.dies(move)
        return list(range(first, len(self.births)))

    def born(self, birth: Birth) -> int:
        """The block that is born."""
        self.births.append(birth)
        if birth.nbytes:
            self.living.born(len(self.births) - 1, birth.alike)
        return len(self.births) - 1

    def dies(self, death: Death) -> int:
        """The block that dies."""
        return self.living.dies(death)

    def death(self, block: int) -> Death:
        """This block's death."""
        return self.living.death(block, self.births[block].alike)

    def is_gradient(self, block: int) -> bool:
        """Whether this block is a gradient, and lives."""
        birth = self.births[block]
        return birth.kind == Kind.GRADIENTS and block in self.living.alike[birth.alike]

    def would_die(self, moves: Sequence[Move]) -> list[int]:
        """The gradients that these moves would kill, in order; nothing happens to them."""
        living = Living()
        for alike, blocks in self.living.alike.items():
            if alike.kind == Kind.GRADIENTS:
                living.alike[alike] = list(blocks)
        killed = []
        for move in moves:
            if isinstance(move, Death) and move.alike.kind == Kind.GRADIENTS:
                killed.append(living.dies(move))
        return killed

    def sizes(self, blocks: Sequence[int]) -> list[int]:
        """Bytes of these blocks."""
        return [self.births[block].nbytes for block in blocks]


class _UpdateAlone(OptimizerLoop):
    """The plain loop with gradients that come from nowhere."""

    gradients: tuple[int, ...] = ()

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Builds, and runs `steps` updates; there is no loss."""
        with matmul_precision(self.setup.matmul):
            return self._train(steps, observer)

    def _accumulate(self, built: Built) -> torch.Tensor | None:
        import torch

        built.observer.phase("backward")
        training = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
        for number in self.gradients:
            training[number].grad = torch.empty_like(training[number])
        if built.scaler is not None:
            built.scaler.scale(torch.empty((), device=self.device))
        return None


def optimizer_that_does_nothing(parameters: Any, **_: Any) -> torch.optim.Optimizer:
    """Leaves the parameters as they are, and notes which of them have gradients."""
    import torch

    class Nothing(torch.optim.Optimizer):
        gradients: tuple[int, ...] = ()

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Notes who has a gradient."""
            held = self.param_groups[0]["params"]
            self.gradients = tuple(n for n, parameter in enumerate(held) if parameter.grad is not None)

    return Nothing(parameters, {})


def _meta() -> torch.device:
    import torch

    return torch.device("meta")

"""Made-up bytes and seconds of recipes on many GPUs, by short formulas. Tests compare a search with the best
of all recipes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

from snugfit.features.distributed.plan.candidates import MOST_AXES, cuts, ways
from snugfit.features.distributed.plan.evidence import MARGIN
from snugfit.features.distributed.plan.judge import InFull, Judged
from snugfit.features.distributed.plan.kind import GAIN
from snugfit.features.distributed.plan.plan import OnGpus
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.techniques import roster
from snugfit.techniques.checkpointing.first_layers import FirstLayers
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import on_gpus
from snugfit.techniques.technique import Slot
from snugfit.units import GIB


class MadeUpJudge:
    """Computes bytes and seconds by formulas: states that may be sharded, activations, and exchanges that
    grow with the GPUs. Tensor and context groups exchange data for each sample, and stages wait for each
    other.
    """

    states, sample, exchange = 160 * GIB, 6 * GIB, 0.02
    tensor, context, stage = 0.05, 0.05, 0.0
    """Relative increase of a sample's seconds by exchanges, for each GPU of a group with the same samples."""
    whole = 0.0
    """Share of the activations that each GPU of a tensor-parallel group holds whole."""
    piece = 0.05
    """Additional seconds of a step for each micro-batch."""
    more_in_full = 1.0
    """Ratio of the bytes of the whole model to the estimate from few layers."""
    asked: ClassVar[list[tuple[int, str, tuple[str, ...]]]] = []

    def __init__(self, job: Job, *kinds: Gpu) -> None:
        self._job, self._kinds = job, kinds

    def judge(self, gpus: int, recipe: Recipe) -> Judged:
        return self.judge_kinds(gpus, recipe, (0,))[0]

    def judge_kinds(
        self, gpus: int, recipe: Recipe, kinds: Sequence[int], build_on: str | None = None
    ) -> list[Judged]:
        named = tuple(self._kinds[kind].key for kind in kinds)
        self.asked.append((gpus, str(recipe), named))
        return [self.of(self._job, self._kinds[kind], gpus, recipe) for kind in kinds]

    def in_full(self, gpus: int, recipe: Recipe) -> InFull:
        judged = self.of(self._job, self._kinds[0], gpus, recipe)
        return InFull(int(judged.needed_bytes * self.more_in_full), "compute", (), None)

    @classmethod
    def of(cls, job: Job, gpu: Gpu, gpus: int, recipe: Recipe) -> Judged:
        return cls.of_setup(job, gpu, gpus, on_gpus(recipe.setup(), gpus))

    @classmethod
    def of_setup(cls, job: Job, gpu: Gpu, gpus: int, setup: Setup) -> Judged:
        """Return the made-up bytes and seconds of a recipe's setup on `gpus` GPUs."""
        from snugfit.features.distributed.fields import ParallelWish

        wish = setup.parallel or ParallelWish(weights="alone", ranks=1)
        pieces, groups = setup.micro_batches, wish.data_ranks
        layers = job.model.layers
        recomputed = sum(map(len, setup.checkpoint.cut(layers))) / layers if setup.checkpoint else 0.0
        shared = wish.weights == "sharded"
        gathers = shared and wish.reshard != "none"
        cut = wish.tensor * wish.stages
        spread = (wish.shards or groups) * wish.context if shared else 1
        states = (cls.states / spread + (cls.states / 8 if shared and not gathers else 0)) / cut
        part = job.batch_size / groups
        held = cls.sample * part / pieces / wish.context * (1 - 0.9 * recomputed)
        held *= cls.whole + (1 - cls.whole) / wish.tensor
        if wish.schedule == "GPipe":
            held *= pieces / wish.stages
        speed = (gpu.memory_bytes or 0) / (100 * GIB)
        model = part / wish.ranks_of_one_part * (1 + 0.3 * recomputed) / speed
        within = cls.tensor * (wish.tensor - 1) + cls.context * (wish.context - 1)
        work = model * (1 + within + cls.stage * (wish.stages - 1)) + cls.piece * pieces
        exchanges = cls.exchange * gpus / cut * (2 if gathers else 1) if groups * wish.context > 1 else 0.0
        seconds = work * (pieces + wish.stages - 1) / pieces + exchanges
        return Judged(int(states + held), seconds, model_seconds=model)


@functools.cache
def every_setup(job: Job, base: Recipe, count: int, axes: int) -> tuple[Setup, ...]:
    """Return the setups of all recipes that distribute the job over `count` GPUs, also those that
    do not fit.
    """
    return tuple(
        on_gpus(shared.cut(pieces).setup(), count)
        for shared in ways(job, base, count, Kept(), axes)
        for pieces in cuts(job, shared, Kept())
    )


def best_of_all(
    job: Job, gpu: Gpu, count: int, bound: int, base: Recipe, more: float = MARGIN
) -> Judged | None:
    """Return the fastest of all recipes that fit on `count` GPUs with `bound` usable bytes each. A mesh
    counts only if it is much faster, or the only one that fits.
    """
    best: Judged | None = None
    for axes in range(MOST_AXES + 1):
        every = [MadeUpJudge.of_setup(job, gpu, count, one) for one in every_setup(job, base, count, axes)]
        fit = [one for one in every if one.needed_bytes * more <= bound]
        if axes < MOST_AXES or best is None:
            mesh = min(fit, key=lambda one: one.step_seconds, default=None)
            if best is None or (mesh is not None and mesh.step_seconds < GAIN * best.step_seconds):
                best = mesh
    return best


def is_best(job: Job, gpu: Gpu, answer: OnGpus, bound: int, best: Judged, near: float = 1.0) -> bool:
    """Return true if an answer takes at most `near` times as long as the best recipe, and no less. The best
    recipe recomputes all layers or none. An answer may be faster if it recomputes the fewest layers that fit,
    with equal micro-batches."""
    recipe = Recipe.parse(answer.recipe)
    wish = recipe.setup().checkpoint
    if wish is None or wish.first is None:
        return best.step_seconds <= answer.step_seconds <= near * best.step_seconds
    fewer = roster.plain(Slot.CHECKPOINTING) if wish.first == 1 else FirstLayers(k=wish.first - 1)
    judge = MadeUpJudge(job, gpu)
    return (
        answer.step_seconds < best.step_seconds
        and judge.in_full(answer.gpus, recipe.with_(fewer)).needed_bytes > bound >= answer.needed_bytes
    )

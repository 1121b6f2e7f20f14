"""A judge of recipes on many GPUs by short formulas, against which a search is held with every recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.several_gpus.asking import MARGIN
from snugfit.planning.several_gpus.candidates import cuts, ways
from snugfit.planning.several_gpus.judge import InFull, Judged
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus
from snugfit.units import GIB


class MadeUpJudge:
    """States that are shared or not, activations of a piece, and exchanges whose share grows with the
    GPUs."""

    states, sample, exchange = 160 * GIB, 6 * GIB, 0.02
    more_in_full = 1.0
    """How many times as much the whole model takes as few layers say."""
    asked: ClassVar[list[tuple[int, str, tuple[str, ...]]]] = []

    def __init__(self, job: Job, *kinds: Gpu) -> None:
        self._job, self._kinds = job, kinds

    def judge(self, gpus: int, recipe: Recipe) -> Judged:
        return self.judge_kinds(gpus, recipe, (0,))[0]

    def judge_kinds(self, gpus: int, recipe: Recipe, kinds: Sequence[int]) -> list[Judged]:
        named = tuple(self._kinds[kind].key for kind in kinds)
        self.asked.append((gpus, str(recipe), named))
        return [self.of(self._job, self._kinds[kind], gpus, recipe) for kind in kinds]

    def in_full(self, gpus: int, recipe: Recipe) -> InFull:
        judged = self.of(self._job, self._kinds[0], gpus, recipe)
        return InFull(int(judged.needed_bytes * self.more_in_full), "compute", (), None)

    @classmethod
    def of(cls, job: Job, gpu: Gpu, gpus: int, recipe: Recipe) -> Judged:
        setup = on_gpus(recipe.setup(), gpus)
        wish = setup.parallel
        recomputes = setup.checkpoint is not None
        shared = wish is not None and wish.weights == "sharded"
        gathers = shared and wish is not None and wish.reshard != "none"
        spread = (wish.shards or gpus) if shared and wish else 1
        states = cls.states / spread + (cls.states / 8 if shared and not gathers else 0)
        part = job.batch_size / gpus
        activations = cls.sample * part / setup.micro_batches * (0.1 if recomputes else 1)
        speed = (gpu.memory_bytes or 0) / (100 * GIB)
        model = part * (1.3 if recomputes else 1.0) / speed
        exchanges = cls.exchange * gpus * (2 if gathers else 1) if gpus > 1 else 0.0
        seconds = model + 0.05 * setup.micro_batches + exchanges
        return Judged(int(states + activations), seconds, model_seconds=model)


def best_of_all(
    job: Job, gpu: Gpu, count: int, bound: int, base: Recipe, more: float = MARGIN
) -> Judged | None:
    """The fastest of all recipes that fit so many GPUs, of each of which so many bytes may be used."""
    every = [
        MadeUpJudge.of(job, gpu, count, shared.cut(pieces))
        for shared in ways(job, base, count, Kept())
        for pieces in cuts(job, shared, Kept())
    ]
    fit = [one for one in every if one.needed_bytes * more <= bound]
    return min(fit, key=lambda one: one.step_seconds, default=None)

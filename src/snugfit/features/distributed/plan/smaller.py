"""Search for a smaller recipe for a run on several GPUs after memory ran out.

All GPUs wait for this search, so it does not find the fastest recipe of all (`search.py`). Two searches on
few layers (`fastest.py`) follow each other:

1. the failed recipe with more micro-batches. Its bytes are linear in the samples of a micro-batch, so few
   numbers are evaluated
2. the same with each other technique that recomputes activations. This search is skipped unless the first
   result takes more than `ENOUGH` times as long as the failed one

Only the failed recipe and the answer are simulated with all layers.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial

from snugfit.errors import SnugfitError
from snugfit.features.distributed.plan.candidates import recomputings
from snugfit.features.distributed.plan.evidence import Evidence
from snugfit.features.distributed.plan.fastest import FastestOnGpus, Screened, size_of
from snugfit.features.distributed.plan.judge import Judge
from snugfit.features.distributed.plan.kind import SharedFigures
from snugfit.features.distributed.plan.shared import Shared
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.prediction.exchanges import modules_of
from snugfit.prediction.headroom import at_most
from snugfit.prediction.worker_pool import Question, WorkerPool, is_picklable, worker_pool
from snugfit.step.applier import engine_of
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus
from snugfit.techniques.technique import Slot

ENOUGH = 1.1
"""Factor on the predicted seconds of the recipe that ran out of memory (chosen). A recipe within it is
accepted without a search for faster ones. Such a search costs as much as some hundred steps gain.
"""

MOST_IN_FULL = 3
"""Greatest number of recipes that are simulated with all layers until one fits (chosen)."""

MOST_WORKERS = 4
"""Greatest number of concurrent simulation processes (chosen). Each call simulates one recipe in each
process.
"""


def smaller_on_several(
    job: Job, recipe: Recipe, *, gpu: Gpu, gpus: int, searched: Collection[Slot], share: float
) -> Recipe | None:
    """Return a recipe that needs at most the fraction `share` of this recipe's predicted bytes on this number
    of GPUs, or None.

    It also fits each GPU. Only recomputation and the number of micro-batches may change, if their slots are
    in `searched`. The global batch stays the same. Worker processes simulate. Raises `SnugfitError` if the
    recipe cannot be simulated.
    """
    setup = on_gpus(recipe.setup(), gpus)
    if gpus == 1 or engine_of(setup) is not None:
        return None
    make = partial(Judge, job, gpu)
    if not is_picklable(make):
        raise SnugfitError(
            "A model that was made in Python cannot be sent to the processes that simulate. Give a "
            "model by its name or folder."
        )
    slots = {slot: (recipe[slot],) for slot in Slot if slot not in searched}
    # A scheduler or a container may give this process fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(2, min(MOST_WORKERS, cores))
    with worker_pool(make, workers=workers, preload=modules_of(job)) as pool:
        return _Smaller(job, recipe, gpus, Kept(slots=slots, several_gpus=True), pool).find(gpu, share)


class _Smaller:
    """One search for a recipe that needs less memory than a given one."""

    def __init__(self, job: Job, recipe: Recipe, gpus: int, fixed: Kept, pool: WorkerPool) -> None:
        self._job, self._broken, self._gpus, self._fixed, self._pool = job, recipe, gpus, fixed, pool
        self._judge = SharedFigures(pool).judge_for(0, (0,))
        self._evidence = Evidence(0)
        uncut = recipe.with_(roster.plain(Slot.BATCHING))
        self._own = Shared(gpus, uncut)
        techniques = dict.fromkeys([recipe[Slot.CHECKPOINTING], *recomputings(job, fixed)])
        self._ways = [Shared(gpus, uncut.with_(technique)) for technique in techniques]

    def find(self, gpu: Gpu, share: float) -> Recipe | None:
        """Return the fastest recipe found that needs at most this share of the memory; None if there is
        none.
        """
        size = size_of(self._job, self._own, self._broken[Slot.BATCHING])
        (before,) = self._judge([(self._gpus, self._broken)])
        needed = self._in_full(self._broken)
        if before.why_not:
            return None
        self._evidence.learn_limit(at_most(share * needed, gpu), needed / before.needed_bytes)
        self._evidence.hear(self._own, size, before)
        for _ in range(MOST_IN_FULL):
            # The layout that ran out of memory comes first, because more micro-batches often suffice.
            best = self._fastest(self._ways[:1])
            if best is None or best.judged.step_seconds > ENOUGH * before.step_seconds:
                best = self._fastest(self._ways)
            if best is None:
                return None
            if (needed := self._in_full(best.recipe)) <= self._evidence.bound:
                return best.recipe
            self._evidence.learn_limit(self._evidence.bound, needed / best.judged.needed_bytes)
        return None

    def _fastest(self, ways: list[Shared]) -> Screened | None:
        """Return the fastest recipe that fits among these layouts, from simulations with few layers; None if
        none does.
        """
        search = FastestOnGpus(
            self._job, self._gpus, ways, self._fixed, self._evidence, {}, self._judge,
            leanest_first=False, trusts_line=True,
        )  # fmt: skip
        return next(iter(search.run().fitting), None)

    def _in_full(self, recipe: Recipe) -> int:
        """Return the bytes of a recipe with all layers. Raises `SnugfitError` if they cannot be simulated."""
        (answer,) = self._pool.answers_to([Question(0, "in_full", (self._gpus, recipe))])
        if isinstance(answer.value, SnugfitError):
            raise answer.value
        needed: int = answer.value.needed_bytes
        return needed

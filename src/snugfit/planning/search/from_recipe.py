"""The recipe that a user starts from, beside the one that the plan chose: what it would change, slot by slot.

Each change is told by itself: what the user's own recipe would take with nothing but this slot filled as the
plan fills it. Changes do not add up (a smaller micro-batch saves less once layers are recomputed), so the
whole of them stands beside, as the plan's own figures. All are judged as a plan judges, for the plain loop.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError, SnugfitError
from snugfit.planning.plan import Change, Start
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.cost.figures import Figures


def compared(theirs: Recipe, ours: Recipe, pool: WorkerPool, *, job: Job, gpu: Gpu | None) -> Start:
    """The user's recipe beside the plan's."""
    slots = [slot for slot in Slot if theirs[slot] != ours[slot]]
    recipes = [theirs, *(theirs.with_(ours[slot]) for slot in slots)]
    known = _judged(recipes, pool, job=job, gpu=gpu)
    mine, *single = (known[number] for number in range(len(recipes)))
    return Start(
        recipe=str(theirs),
        needed_bytes=mine.needed_bytes if not isinstance(mine, SnugfitError) else None,
        step_seconds=mine.step_seconds if not isinstance(mine, SnugfitError) else None,
        why_not=str(mine).splitlines()[-1] if isinstance(mine, SnugfitError) else "",
        changes=tuple(
            _change(slot, theirs, ours, figures) for slot, figures in zip(slots, single, strict=True)
        ),
    )


def _change(slot: Slot, theirs: Recipe, ours: Recipe, figures: Figures | SnugfitError) -> Change:
    change = Change(slot=slot.value, theirs=str(theirs[slot]), ours=str(ours[slot]))
    if isinstance(figures, SnugfitError):
        return change
    return Change(
        slot=change.slot,
        theirs=change.theirs,
        ours=change.ours,
        needed_bytes=figures.needed_bytes,
        step_seconds=figures.step_seconds,
    )


def _judged(
    recipes: list[Recipe], pool: WorkerPool, *, job: Job, gpu: Gpu | None
) -> Mapping[int, Figures | SnugfitError]:
    """What each of these takes, or why it cannot be."""
    known: dict[int, Any] = {}
    todo: deque[int] = deque()
    for number, recipe in enumerate(recipes):
        try:
            recipe.check(job, gpu.compute_capability if gpu else None)
            todo.append(number)
        except RecipeError as objection:
            known[number] = objection

    def ask(worker: int) -> Question | None:
        if not todo:
            return None
        number = todo.popleft()
        return Question(number, "judge", ([recipes[number].setup()],))

    for number, answer in pool.answers(ask):
        known[number] = answer if isinstance(answer, SnugfitError) else answer[0][0]
    return known

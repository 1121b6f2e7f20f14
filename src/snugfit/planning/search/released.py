"""Updates within the backward pass, where nothing that keeps its gradients is as fast and fits.

Passes and update of such a step are one, so it is not put together from parts: each is simulated in full,
which takes seconds. So none is a part of the space. Once the search has ended, recipes that do not fit, and
would if they kept no gradients, are looked at with it: the fastest first, and the smallest where nothing fits
at all. By how much that lowers a peak follows from where the peak is, which only the simulation tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from snugfit.planning.search.grades import add_candidate, judge_recipe
from snugfit.planning.search.simpler import AS_FAST
from snugfit.techniques import roster
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.planning.search.progress import Tell
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool
    from snugfit.techniques.technique import Technique

RECIPES = 3
"""That are simulated in full."""

PASSES_TWICE = 1.8
"""How many times as long a step takes whose passes run twice, so that the norm is known: 1.9 was measured of
a recorded step of BERT-large (`results/h200-2026-11-27/least-memory.json`); less, so that none is missed."""


def find_released(state: SearchState, pool: WorkerPool, job: Job, tell: Tell, *, smallest: bool) -> str:
    """Judges a few recipes with updates within the backward pass that may be faster than all that fits, or
    the `smallest`, and adds those that are. Gives the technique's name where any was looked at."""
    kinds = (kind for kind in roster.techniques() if kind.slot is Slot.GRADIENTS)
    offered = (one for kind in kinds for one in kind.settings(job))
    technique = next((one for one in offered if one.install(Setup()).release), None)
    if technique is None or not job.trains or technique.slot in state.space.fixed.slots:
        return ""
    if state.memory_bytes is None and not smallest:
        return ""
    candidates = sorted(_promising(state, technique, job, smallest=smallest))
    tried = set[int]()
    for _, number in candidates:
        candidate = state.space.candidates[number]
        if candidate.trace in tried:
            continue
        if len(tried) == RECIPES:
            break
        tried.add(candidate.trace)
        tell(f"simulating {technique.name} in full")
        judged = judge_recipe(state, pool, candidate.recipe.with_(technique))
        if judged is None:
            continue
        recipe, figures = judged
        fits, is_smaller = state.fits(figures.needed_bytes), figures.needed_bytes < state.smallest
        if (smallest and is_smaller) or (fits and figures.seconds < state.fastest_that_fits):
            add_candidate(state, recipe, figures)
            if not smallest:
                break
    return technique.name if tried else ""


def _promising(
    state: SearchState, technique: Technique, job: Job, *, smallest: bool
) -> Iterator[tuple[float, int]]:
    """Recipes that it goes with, by what is sought of them: seconds, or bytes where the `smallest` is."""
    space, times = state.space, PASSES_TWICE if job.clip else 1.0
    most = state.fastest_that_fits * (1 - AS_FAST)
    for number, bound in state.bounds.items():
        recipe, known = space.candidates[number].recipe, state.judged.get(number) or bound
        least, seconds = known.needed_bytes - bound.gradient_bytes, known.seconds * times
        if smallest and least >= state.smallest:
            continue
        if not smallest and (state.fits(known.needed_bytes) or not state.fits(least) or seconds >= most):
            continue
        asked = recipe.with_(technique)
        if not next(technique.objections(job, asked), ""):
            yield (least if smallest else seconds), number

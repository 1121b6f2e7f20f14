"""Search for updates within the backward pass, if no recipe that keeps its gradients is as fast and fits.

In such a step the update is part of the backward pass, so the two cannot be simulated separately. Each such
recipe is simulated as a whole, which takes seconds, so it is not part of the usual search. After that search,
the technique is added to recipes that would fit without their gradients. The fastest recipes come first, or
the smallest if nothing fits. Only the simulation shows how far the peak falls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from snugfit.features.engine.fields import OWN_NORM, RELEASE
from snugfit.planning.search.grades import add_candidate, evaluate_recipe
from snugfit.planning.search.simpler import AS_FAST
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.planning.search.progress import Tell
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool
    from snugfit.techniques.technique import Technique

RECIPES = 3
"""Largest number of recipes (sets of techniques) that this search simulates in full."""

TWO_PASSES_FACTOR = 1.8
"""Assumed factor on a step's seconds if forward and backward pass run twice to compute the gradient norm. A
recorded step of BERT-large took 1.9 times as long (`results/h200-2026-11-27/least-memory.json`). The assumed
factor is lower, so that no faster recipe is missed."""


def find_released(state: SearchState, pool: WorkerPool, job: Job, tell: Tell, *, smallest: bool) -> str:
    """Predict a few recipes with updates within the backward pass, and add those that are better to the
    search's results.

    They may be faster than every recipe that fits, or the `smallest`. Return the technique's name if any
    was tried.
    """
    kinds = (kind for kind in roster.techniques() if kind.slot is Slot.GRADIENTS)
    offered = (one for kind in kinds for one in kind.settings(job))
    technique = next((one for one in offered if RELEASE.of(one.alone) == OWN_NORM), None)
    # If the user named a technique of this slot, the search contains it already.
    if technique is None or not job.trains or technique.slot in state.space.fixed.slots:
        return ""
    if state.memory_bytes is None and not smallest:
        return ""
    candidates = sorted(_promising(state, technique, job, smallest=smallest))
    tried = set[int]()
    # Candidates are sorted by seconds, or with `smallest` by bytes.
    for _, number in candidates:
        candidate = state.space.candidates[number]
        if candidate.trace in tried:
            continue
        if len(tried) == RECIPES:
            break
        tried.add(candidate.trace)
        tell(f"simulating {technique.name} in full")
        evaluation = evaluate_recipe(state, pool, candidate.recipe.with_(technique))
        if evaluation is None:
            continue
        recipe, figures = evaluation
        fits, is_smaller = state.fits(figures.needed_bytes), figures.needed_bytes < state.smallest
        if (smallest and is_smaller) or (fits and figures.seconds < state.fastest_that_fits):
            add_candidate(state, recipe, figures)
            # The first recipe that fits is also the fastest; with `smallest`, later ones may need fewer
            # bytes.
            if not smallest:
                break
    return technique.name if tried else ""


def _promising(
    state: SearchState, technique: Technique, job: Job, *, smallest: bool
) -> Iterator[tuple[float, int]]:
    """Yield the recipes to try with updates in the backward pass, by index. Each has its step's seconds, or
    with `smallest` its bytes.
    """
    space, times = state.space, TWO_PASSES_FACTOR if job.clip else 1.0
    most = state.fastest_that_fits * (1 - AS_FAST)
    for number, bound in state.bounds.items():
        recipe, known = space.candidates[number].recipe, state.evaluated.get(number) or bound
        # The technique saves at most the bytes of all gradients, which gives a lower bound.
        least, seconds = known.needed_bytes - bound.gradient_bytes, known.seconds * times
        if smallest and least >= state.smallest:
            continue
        if not smallest and (state.fits(known.needed_bytes) or not state.fits(least) or seconds >= most):
            continue
        changed = recipe.with_(technique)
        if not next(technique.objections(job, changed), ""):
            yield (least if smallest else seconds), number

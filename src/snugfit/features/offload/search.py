"""Search for recipes whose recomputed layers have their inputs on the host, if they may be faster.

The usual search has no such recipes: most recomputed layers save so little that no copy is needed. Long
sequences differ. For 131,072 tokens the inputs of Llama-3.1-8B's layers take 32 GiB. The results of
attention, which `selective(attention)` keeps, take 32 GiB too. With the inputs on the host a GPU of 80 GB has
room for these results, so attention is not computed again. A layer then takes far longer than its copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.features.offload.host import Host
from snugfit.planning.cost.figures import Bound
from snugfit.planning.search.grades import add_candidate, evaluate_recipe
from snugfit.planning.search.mixture import is_valid
from snugfit.planning.search.simpler import AS_FAST
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.planning.search.progress import Tell
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool

RECIPES = 2
"""Largest number of recipes that this search simulates, each with all layers."""

MOST_SHARE = 0.5
"""Largest share of the GPU's memory limit that a plan keeps in page-locked memory of the host (chosen). Hosts
of data-centre GPUs have at least as much memory as their GPUs.
"""


def find_inputs_on_host(state: SearchState, pool: WorkerPool, job: Job, tell: Tell, *, smallest: bool) -> str:
    """Simulate the fastest recipes that recompute layers and do not fit, with the layers' inputs on the host.

    Add those that fit and are faster than every other that fits. Return the technique's name if any was
    simulated.
    """
    memory = state.memory_bytes
    if smallest or memory is None or not job.trains or state.nothing_fits:
        return ""
    if Slot.ACTIVATION_OFFLOAD in state.space.fixed.slots:
        return ""
    host, tried = Host(what="checkpoints"), set[int]()
    for number in _faster_but_too_large(state):
        candidate = state.space.candidates[number]
        recipe = candidate.recipe.with_(host)
        if len(tried) == RECIPES or candidate.sized in tried or not is_valid(recipe, job):
            continue
        tried.add(candidate.sized)
        tell(f"simulating {recipe[Slot.CHECKPOINTING]} with inputs on the host")
        evaluation = evaluate_recipe(state, pool, recipe)
        if evaluation and state.fits(evaluation[1].needed_bytes):
            add_candidate(state, *evaluation)
            break
    return host.name if tried else ""


def _faster_but_too_large(state: SearchState) -> list[int]:
    """Return recipes by number that recompute layers, do not fit, and may be faster than each that fits.

    They need no more than the host's share of memory in addition. Among the fastest, simple ones come first.
    """
    memory, most = state.memory_bytes or 0, state.fastest_that_fits * (1 - AS_FAST)
    limits: dict[int, Bound] = {}
    for number, bound in state.bounds.items():
        known = state.evaluated.get(number) or bound
        if state.space.candidates[number].recipe[Slot.CHECKPOINTING].value is None or known.seconds >= most:
            continue
        if not state.fits(known.needed_bytes) and known.needed_bytes < memory * (1 + MOST_SHARE):
            limits[number] = Bound(known.needed_bytes, known.seconds)
    as_fast = min((bound.seconds for bound in limits.values()), default=0.0) * (1 + AS_FAST)

    def order(number: int) -> tuple[float, int, int]:
        bound, recipe = limits[number], state.space.candidates[number].recipe
        techniques = sum(not technique.plain for technique in recipe)
        return max(bound.seconds, as_fast), techniques, bound.needed_bytes

    return sorted(limits, key=order)

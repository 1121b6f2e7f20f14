"""The ranked list of the best recipes: it equals brute force, and the planned recipe comes first."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from small_models import small_job
from snugfit.job.gpu import find_gpu
from snugfit.planning.cost.parts import Parts
from snugfit.planning.cost.timer import SingleGpuTimer
from snugfit.planning.keep import kept_of
from snugfit.planning.search.search import plan, rank_best, search
from snugfit.planning.search.space import space_of
from snugfit.planning.search.state import SearchState
from snugfit.prediction.seconds import step_seconds
from snugfit.prediction.worker_pool import WorkerPool
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot

pytestmark = pytest.mark.stored_rehearsals

H200 = find_gpu("h200")
FREE = (Slot.OPTIMIZER, Slot.CHECKPOINTING, Slot.ALLOCATOR, Slot.LOADING)
SETTLED = {slot: roster.plain(slot) for slot in Slot if slot not in FREE}


def seconds(trace: Trace) -> float:
    return step_seconds(trace, H200, batch_size=1).step_seconds


@pytest.fixture(scope="module")
def parts() -> Parts:
    return Parts(small_job("gpt2", 2, batch_size=1, sequence_length=32), [H200], SingleGpuTimer(seconds))


@pytest.fixture(scope="module")
def found(parts: Parts) -> SearchState:
    """Search a small space. The test then evaluates each trace in full for comparison."""
    space = space_of(parts.job, fidelity=Fidelity.SAME, capability=(9, 0), fixed=kept_of(parts.job, SETTLED))
    search(found := SearchState(space), WorkerPool([parts]), every_bound=True)
    return found


@pytest.fixture(scope="module")
def everything(parts: Parts, found: SearchState) -> list[tuple[float, int]]:
    """Return seconds and bytes of each candidate, evaluated alone."""
    return [
        (figures.seconds, figures.needed_bytes)
        for each in found.space.candidates
        for ((figures,),) in (parts.evaluate([each.setup]),)
    ]


def test_the_best_are_those_of_brute_force(
    parts: Parts, found: SearchState, everything: list[tuple[float, int]]
) -> None:
    """One test covers all four cases, since a second worker would rebuild the whole space."""
    for objective, count in itertools.product(("speed", "memory"), (1, 12)):
        hold_to_brute_force(parts, found, everything, objective, count)


def hold_to_brute_force(
    parts: Parts, found: SearchState, everything: list[tuple[float, int]], objective: str, count: int
) -> None:
    """Compare the `count` best by this objective with brute force, within three quarters of the sizes."""
    memory = sorted(size for _, size in everything)[len(everything) * 3 // 4]
    asked = replace(found, evaluated=dict(found.evaluated), memory_bytes=memory)
    numbers = rank_best(asked, count, WorkerPool([parts]), objective)
    place = 1 if objective == "memory" else 0
    smallest: dict[float, int] = {}
    for length, size in everything:
        if size <= memory:
            smallest[length] = min(size, smallest.get(length, size))
    wanted = sorted((size if place else length) for length, size in smallest.items())[:count]
    told = [asked.evaluated[n].needed_bytes if place else asked.evaluated[n].seconds for n in numbers]
    assert told == pytest.approx(wanted)
    assert len({asked.evaluated[number].seconds for number in numbers}) == len(numbers)
    assert all(asked.evaluated[number].needed_bytes <= memory for number in numbers)
    if objective == "speed":
        fitting = [n for n in asked.front() if asked.evaluated[n].needed_bytes <= memory]
        assert numbers[0] == fitting[0], "the planned recipe is listed first"


def test_nothing_is_listed_where_nothing_fits(parts: Parts, found: SearchState) -> None:
    assert rank_best(replace(found, memory_bytes=1 << 20), 3, WorkerPool([parts]), "speed") == []


@pytest.mark.slow
@pytest.mark.whole
def test_a_plan_lists_its_first_choice_first() -> None:
    job = small_job("gpt2", 2, batch_size=1, sequence_length=32)
    made = plan(job, gpu=H200, fidelity="same", objective="memory", workers=1, ranked=3, keep=SETTLED)
    assert made.best is not None
    assert made.ranked[0] == made.best
    assert len({Recipe.parse(choice.recipe) for choice in made.ranked}) == 3
    assert type(made).from_json(made.to_json()) == made

"""The order of a search: the first rehearsed and evaluated recipes, and the choice of the worker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from in_roster import needs_techniques
from small_models import small_job
from snugfit.planning.cost.figures import Bound, Figures
from snugfit.planning.cost.parts import FullCheck
from snugfit.planning.keep import kept_of
from snugfit.planning.search.best_first import BestFirst
from snugfit.planning.search.reasons import explain
from snugfit.planning.search.recomputing import RecomputingKinds
from snugfit.planning.search.screening import screen
from snugfit.planning.search.space import Space, space_of
from snugfit.planning.search.state import SearchState
from snugfit.prediction.worker_pool import WorkerPool
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot

SETTLED = "sdpa + bf16 + ieee + torch_kernels + on_device + adamw + all_gradients + default + inline"


JOB = small_job("llama", 2, batch_size=4)


@cache
def space() -> Space:
    """Recipes of a small Llama that differ in engine, head, recomputing and micro-batches."""
    return space_of(JOB, fidelity=Fidelity.ROUNDS, fixed=kept_of(JOB, SETTLED))


def seconds_of(setup: Setup) -> float:
    """Return the seconds of a candidate, which also serve as its bound."""
    number = next(n for n, one in enumerate(space().candidates) if one.setup is setup)
    return 1.0 + number


class Known:
    """A worker that records its calls."""

    def __init__(self) -> None:
        self.screened: list[Setup] = []
        self.judged: list[Setup] = []

    def screen(self, setups: Sequence[Setup]) -> list[tuple[Bound]]:
        self.screened += setups
        return [(Bound(100, seconds_of(setup)),) for setup in setups]

    def evaluate(self, setups: Sequence[Setup]) -> list[tuple[Figures]]:
        self.judged += setups
        return [(Figures(100, 100, 100, 0, seconds_of(setup)),) for setup in setups]


def program_of(setup: Setup) -> int:
    return next(one.program for one in space().candidates if one.setup is setup)


def test_a_variant_is_the_candidate_of_the_changed_recipe() -> None:
    rng, whole = random.Random(0), space()
    for _ in range(200):
        number = rng.randrange(len(whole.candidates))
        recipe = whole.candidates[number].recipe
        several = [rng.choice(whole.offers(slot)) for slot in rng.sample(list(Slot), 2)]
        changed = recipe.with_(several[0]).with_(several[1])
        assert whole.variant(number, *several) == whole.number(changed)
        slot = rng.choice(list(Slot))
        assert list(whole.variants(number, slot)) == list(whole.others(recipe, slot))
    foreign = Recipe.parse("adamw_8bit")[Slot.OPTIMIZER]
    assert whole.variant(0, foreign) is None


def test_what_is_compiled_alike_goes_to_one_worker() -> None:
    needs_techniques("compiled")
    workers = Known(), Known()
    pool, state = WorkerPool(list(workers)), SearchState(space())
    numbers = [number for number, one in enumerate(space().candidates) if one.setup.lowering]
    state.bounds |= screen(state, pool, lambda what: None, numbers).bounds
    state.evaluate(state.by_trace(state.bounds), pool)
    programs = [
        {program_of(setup) for setup in (*one.screened, *one.judged) if setup.lowering} for one in workers
    ]
    assert all(programs)
    assert programs[0].isdisjoint(programs[1])
    alike = [setup.with_fields(logits=None, checkpoint=None) for setup in workers[0].screened]
    assert len({repr(setup) for setup in alike if setup.lowering}) == len(programs[0])


def run_best_first(workers: int) -> tuple[list[Known], SearchState]:
    told = [Known() for _ in range(workers)]
    state = SearchState(space())
    kinds = RecomputingKinds(state, WorkerPool(list(told)), lambda what: None)
    BestFirst(state, kinds, lambda what: None).run(WorkerPool(list(told)))
    return told, state


def test_one_worker_judges_the_fastest_and_nothing_that_it_dominates() -> None:
    told, state = run_best_first(1)
    fastest = min(range(len(space().candidates)), key=lambda n: seconds_of(space().candidates[n].setup))
    assert state.front() == [fastest]
    assert told[0].judged == [space().candidates[n].setup for n in state.evaluated]
    assert {space().candidates[n].trace for n in state.evaluated} == {space().candidates[fastest].trace}


def test_a_slower_recipe_that_saves_little_is_left_out_unless_it_alone_fits() -> None:
    for negligible, memory, is_left_out in ((300, None, True), (100, None, False), (300, 900, False)):
        bounds = {0: Bound(1000, 1.0), 1: Bound(800, 2.0)}
        state = SearchState(space(), bounds, memory_bytes=memory, negligible_bytes=negligible)
        state.store(0, Figures(1000, 1000, 1000, 0, 1.0))
        assert state.is_dominated(1) == is_left_out


@pytest.mark.parametrize(
    ("resting", "loss", "is_left_out"), [(0, 200, True), (0, 150, False), (900, 200, False)]
)
def test_a_sibling_of_an_unfit_recipe_fits_only_if_it_loses_fewer_bytes(
    resting: int, loss: int, is_left_out: bool
) -> None:
    mib, settled = 1 << 20, SETTLED.replace("+ adamw ", "")
    optimizers = space_of(JOB, fidelity=Fidelity.ROUNDS, fixed=kept_of(JOB, settled))
    known, other = (optimizers.number(Recipe.parse(f"{settled} + {one}")) for one in ("adamw", "adamw_fused"))
    assert known is not None
    assert other is not None
    bounds = {known: Bound(900 * mib, 1.0, resting * mib), other: Bound(900 * mib, 1.0, resting * mib)}
    state = SearchState(optimizers, bounds, memory_bytes=1000 * mib)
    nbytes = (900 + loss) * mib
    state.store(known, Figures(nbytes, nbytes, nbytes, 0, 1.0))
    assert state.is_dominated(other) == is_left_out


def test_a_simpler_recipe_is_screened_only_if_its_twin_may_fit() -> None:
    class Screening(Known):
        def screen(self, setups: Sequence[Setup]) -> list[tuple[Bound]]:
            self.screened += setups
            return [(Bound(95, 1.0),) for _ in setups]

    settled = SETTLED.replace("torch_kernels + ", "")
    whole = space_of(JOB, fidelity=Fidelity.ROUNDS, fixed=kept_of(JOB, settled))
    plain, fused = (
        whole.number(Recipe.parse(f"{settled} + every_layer{kernels}")) for kernels in ("", " + fused")
    )
    assert plain is not None
    assert fused is not None
    for twin_bytes, is_screened in ((200, False), (90, True)):
        worker, state = Screening(), SearchState(whole, memory_bytes=100)
        kinds = RecomputingKinds(state, WorkerPool([worker]), lambda what: None)
        without = roster.plain(Slot.CHECKPOINTING)
        for number, nbytes in ((plain, 60), (fused, 50)):
            base = whole.variant(number, without)
            assert base is not None
            state.bounds[base] = Bound(nbytes, 1.0)
        state.bounds[fused] = Bound(twin_bytes, 1.0)
        kinds.waiting.pop(whole.candidates[fused].passes)
        state.screen_these([plain], lambda least: least.needed_bytes <= 100)
        assert bool(worker.screened) == is_screened


def test_compiled_layers_are_lowered_by_one_worker_each() -> None:
    told, _ = run_best_first(2)
    programs = [{program_of(s) for s in (*one.screened, *one.judged) if s.lowering} for one in told]
    assert programs[0].isdisjoint(programs[1])


def test_a_reason_estimates_a_size_that_nobody_lowered() -> None:
    class Verifying(Known):
        def verify(self, recipe: Recipe, figures: Figures) -> FullCheck:
            return FullCheck(True, (), None)

    worker, state = Verifying(), SearchState(space())
    pool = WorkerPool([worker])
    lowered = [Recipe.parse(f"{SETTLED} + compiled + micro_batches({n})") for n in (4, 2)]
    numbers = [number for number in map(space().number, lowered) if number is not None]
    uncompiled = [space().variant(one, roster.plain(Slot.ENGINE)) for one in range(len(space().candidates))]
    screened = {*numbers, *(number for number in uncompiled if number is not None)}
    state.bounds |= screen(state, pool, lambda what: None, screened).bounds
    state.evaluate(state.by_trace(numbers[:1]), pool)
    reasons = {one.slot: one for one in explain(state, pool, numbers[0], JOB).reasons}
    assert (reasons["batching"].against, reasons["batching"].is_estimated) == ("whole_batch", True)
    assert {setup.micro_batches for setup in worker.judged if setup.lowering} == {4}

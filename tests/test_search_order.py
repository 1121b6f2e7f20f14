"""The order of a search: what is rehearsed and judged first, and by which worker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from small_models import small_job
from snugfit.planning.cost.figures import Bound, Figures
from snugfit.planning.cost.parts import FullCheck
from snugfit.planning.keep import kept_of
from snugfit.planning.search.reasons import explain
from snugfit.planning.search.screening import screen
from snugfit.planning.search.some_layers import least_of_some
from snugfit.planning.search.space import Space, space_of
from snugfit.planning.search.state import SearchState
from snugfit.prediction.worker_pool import WorkerPool
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish, Setup
from snugfit.techniques.technique import Fidelity, Slot

SETTLED = "sdpa + bf16 + ieee + torch_kernels + on_device + adamw + all_gradients + default + inline"


JOB = small_job("llama", 2, batch_size=4)


@cache
def space() -> Space:
    """Recipes of a small Llama that differ in engine, head, recomputing and micro-batches."""
    return space_of(JOB, fidelity=Fidelity.ROUNDS, fixed=kept_of(JOB, SETTLED))


def seconds_of(setup: Setup) -> float:
    """Seconds by which every candidate here is bounded, and which it takes."""
    number = next(n for n, one in enumerate(space().candidates) if one.setup is setup)
    return 1.0 + number


class Known:
    """A worker that notes what it is asked."""

    def __init__(self) -> None:
        self.screened: list[Setup] = []
        self.judged: list[Setup] = []

    def screen(self, setups: Sequence[Setup]) -> list[tuple[Bound]]:
        self.screened += setups
        return [(Bound(100, seconds_of(setup)),) for setup in setups]

    def judge(self, setups: Sequence[Setup]) -> list[tuple[Figures]]:
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
    workers = Known(), Known()
    pool, state = WorkerPool(list(workers)), SearchState(space())
    known = screen(space(), pool, numbers=range(len(space().candidates)), state=state)
    state.bounds |= {number: bounds[0] for number, bounds in known.bounds.items()}
    state.judge(state.by_trace(state.bounds), pool)
    programs = [
        {program_of(setup) for setup in (*one.screened, *one.judged) if setup.compile} for one in workers
    ]
    assert all(programs)
    assert programs[0].isdisjoint(programs[1])
    alike = [setup.with_fields(logits=None, checkpoint=None) for setup in workers[0].screened]
    assert len({repr(setup) for setup in alike if setup.compile}) == len(programs[0])


def test_a_worker_that_would_wait_judges_ahead_and_no_more() -> None:
    workers = Known(), Known()
    candidates = [n for n, one in enumerate(space().candidates) if one.setup.compile is None]
    state = SearchState(
        space(), bounds={n: Bound(1, seconds_of(space().candidates[n].setup)) for n in candidates}
    )
    first, second, *_ = state.by_trace(candidates)
    state.judge_all(WorkerPool(list(workers)), lambda what: None, among=first)
    assert set(state.judged) == {*first, *second}
    alone = SearchState(space(), bounds=dict(state.bounds))
    alone.judge_all(WorkerPool([Known()]), lambda what: None, among=first)
    assert set(alone.judged) == set(first)


def test_what_is_much_slower_than_what_is_rehearsed_is_not_judged_ahead() -> None:
    candidates = [n for n, one in enumerate(space().candidates) if one.setup.compile is None]
    bounds = {n: Bound(1, seconds_of(space().candidates[n].setup)) for n in candidates}
    state = SearchState(space(), bounds=bounds)
    least = min(one.seconds for one in bounds.values())
    assert state.ahead(least * 0.9).ask(0) is None
    question = state.ahead(least).ask(0)
    assert question is not None
    assert bounds[question.number].seconds == least


def test_some_layers_are_bounded_by_a_bound_of_keeping_all() -> None:
    """Where keeping all was not rehearsed, the least that is known of it serves."""
    full, wish = Bound(1000, 2.0, layers_bytes=900, depth=4), CheckpointWish(every=2)
    assert least_of_some(Bound(3000, 1.0), full, wish).needed_bytes == int(2000 * 0.8)


def test_a_size_that_nobody_lowered_explains_nothing() -> None:
    class Verifying(Known):
        def verify(self, recipe: Recipe, figures: Figures) -> FullCheck:
            return FullCheck(True, (), None)

    worker, state = Verifying(), SearchState(space())
    pool = WorkerPool([worker])
    lowered = [Recipe.parse(f"{SETTLED} + compiled + micro_batches({n})") for n in (4, 2)]
    numbers = [number for number in map(space().number, lowered) if number is not None]
    known = screen(space(), pool, numbers=numbers, state=state)
    state.bounds |= {number: bounds[0] for number, bounds in known.bounds.items()}
    state.judge(state.by_trace(numbers[:1]), pool)
    reasons = {one.slot: one for one in explain(state, pool, numbers[0], JOB).reasons}
    assert reasons["batching"].against == "micro_batches(2)"
    assert {setup.micro_batches for setup in worker.judged if setup.compile} == {4, 2}

"""A plan chooses the recipe with the fewest non-plain techniques among equally fast ones."""

from __future__ import annotations

import pytest

from kept import kept
from small_models import small_job
from snugfit.job.gpu import find_gpu
from snugfit.planning.search.search import plan
from snugfit.planning.search.simpler import AS_FAST
from snugfit.techniques.recipe import Recipe

pytestmark = pytest.mark.stored_rehearsals

SETTLED = kept(but="adapters matmul optimizer allocator kernels")
H200 = find_gpu("h200")


def level(trace: object) -> float:
    """Return the same seconds for every step, plus a millionth per kernel."""
    return 1 + 1e-6 * len(trace.kernels)  # type: ignore[attr-defined]


@pytest.mark.whole
def test_a_technique_that_buys_nothing_is_left_out() -> None:
    chosen = plan(
        small_job("bert", 2, batch_size=4), gpu=H200, clock=level, keep=SETTLED, workers=1, ranked=2
    )
    assert chosen.best
    assert Recipe.parse(chosen.best.recipe) == Recipe()
    fastest = chosen.ranked[1]
    assert fastest.step_seconds < chosen.best.step_seconds <= fastest.step_seconds * (1 + AS_FAST)
    assert chosen.ranked[0] == chosen.best, "the first verified recipe is the answer"
    assert chosen.best in chosen.front
    for row in chosen.front:
        assert "tf32" not in row.recipe, "no product of this job is in fp32 alone, and none takes longer"


@pytest.mark.whole
def test_what_the_user_has_is_kept_where_it_costs_nothing() -> None:
    job, mine = small_job("bert", 2, batch_size=4), "tf32 + expandable"
    chosen = plan(job, gpu=H200, clock=level, keep=SETTLED, workers=1, start=mine)
    assert chosen.best
    assert Recipe.parse(chosen.best.recipe) == Recipe.parse(mine)
    assert chosen.start
    assert not chosen.start.changes

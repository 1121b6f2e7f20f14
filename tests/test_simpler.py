"""Of recipes that are as fast, a plan takes the one with the fewest techniques that are not plain."""

from __future__ import annotations

import pytest

from small_models import small_job
from snugfit.job.gpu import find_gpu
from snugfit.planning.search.search import plan
from snugfit.planning.search.simpler import AS_FAST
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot

SETTLED = (Slot.CHECKPOINTING, Slot.BATCHING, Slot.ATTENTION, Slot.PRECISION, Slot.LOADING)
H200 = find_gpu("h200")


@pytest.mark.whole
def test_a_technique_that_buys_nothing_is_left_out() -> None:
    """On a device where every step takes as long, but for a millionth with each kernel."""
    job = small_job("bert", 2, batch_size=4)
    settled = {slot: roster.plain(slot) for slot in SETTLED}

    def level(trace: object) -> float:
        return 1 + 1e-6 * len(trace.kernels)  # type: ignore[attr-defined]

    chosen = plan(job, gpu=H200, clock=level, keep=settled, workers=1, ranked=2)
    assert chosen.best
    assert Recipe.parse(chosen.best.recipe) == Recipe()
    fastest = chosen.front[0]
    assert fastest.recipe != chosen.best.recipe
    assert fastest.step_seconds < chosen.best.step_seconds <= fastest.step_seconds * (1 + AS_FAST)
    assert chosen.ranked[0] == chosen.best, "what is verified is the answer itself"

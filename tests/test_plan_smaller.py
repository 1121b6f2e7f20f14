"""Plans that extend their search if nothing fits: to updates within the backward pass (`released`)."""

from __future__ import annotations

import pytest

from kept import kept
from small_models import small_job
from snugfit.job.job import Job
from snugfit.planning.search.search import plan
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe

pytestmark = pytest.mark.stored_rehearsals

WHOLE = "bf16_master + fused + captured + workers"


def wide_job() -> Job:
    return small_job("bert", 4, {"hidden_size": 512, "intermediate_size": 2048}, batch_size=2, clip=1.0)


def needed(job: Job, recipe: str) -> int:
    footprint = predict(job, recipe, gpu="h200").footprint
    return footprint.reserved_bytes + footprint.context_bytes


@pytest.mark.whole
def test_a_plan_keeps_no_gradients_where_nothing_else_is_as_fast_and_fits() -> None:
    job = wide_job()
    memory = (needed(job, f"{WHOLE} + released") + needed(job, WHOLE)) // 2
    found = plan(job, gpu="h200", memory_bytes=memory, keep=kept(WHOLE, but="engine gradients"), workers=1)
    assert found.best is not None
    assert Recipe.parse(found.best.recipe) == Recipe.parse(f"{WHOLE} + released")
    assert found.best.reserved_bytes + found.best.context_bytes == needed(job, f"{WHOLE} + released")
    assert found.verified
    assert not any(one.what == "released" for one in found.refused)


@pytest.mark.whole
@pytest.mark.slow
def test_a_plan_with_room_keeps_gradients() -> None:
    job = wide_job()
    roomy = plan(job, gpu="h200", keep=kept(WHOLE, but="gradients"), workers=1)
    assert roomy.best is not None
    assert Recipe.parse(roomy.best.recipe) == Recipe.parse(WHOLE)
    assert any(one.what == "released" for one in roomy.refused)

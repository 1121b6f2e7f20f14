"""Plans that search for the fewest layers that recompute their product of gate and up."""

from __future__ import annotations

import pytest

from kept import kept
from small_models import small_job
from snugfit.features.kernels.fused import Fused
from snugfit.job.job import Job
from snugfit.planning.search.search import plan
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from test_plan_smaller import needed

pytestmark = pytest.mark.stored_rehearsals

LAYERS = 3
FULL = "bf16_master + fused + captured + expandable + workers"


def deep() -> Job:
    """Return a job whose activations exceed all other memory."""
    return small_job("llama", LAYERS, batch_size=8, sequence_length=2048)


def test_smaller_settings_are_those_of_decoders_layer_by_layer() -> None:
    assert [one.recomputed_mlps for one in Fused().smaller(deep())] == [1, 2, 3]
    assert not Fused(recomputed_mlps=2).smaller(deep())
    assert not Fused().smaller(small_job("bert", LAYERS))


@pytest.mark.whole
@pytest.mark.slow
def test_a_plan_computes_as_few_products_again_as_fit() -> None:
    job = deep()
    memory = (needed(job, FULL) + needed(job, FULL.replace("fused", f"fused(recomputed_mlps={LAYERS})"))) // 2
    keep = kept(FULL, but="kernels checkpointing")
    found = plan(job, gpu="h200", memory_bytes=memory, keep=keep, workers=1)
    assert found.best is not None
    recipe = Recipe.parse(found.best.recipe)
    k = recipe[Slot.KERNELS].recomputed_mlps  # type: ignore[attr-defined]
    assert 0 < k < LAYERS
    assert recipe[Slot.CHECKPOINTING] == Recipe.parse("keep_all")[Slot.CHECKPOINTING]
    assert found.best.reserved_bytes + found.best.context_bytes <= memory
    assert needed(job, FULL.replace("fused", f"fused(recomputed_mlps={k - 1})")) > memory
    assert found.verified

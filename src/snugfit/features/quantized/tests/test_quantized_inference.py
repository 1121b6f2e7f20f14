"""`low_bits`: weights in 4 or 8 bits without adapters, in an evaluation."""

from __future__ import annotations

import pytest

from in_roster import needs_techniques
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.planning.search.space import space_of
from snugfit.prediction.predict import predict
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot


def test_weights_of_linear_layers_shrink_by_their_bits() -> None:
    needs_techniques("low_bits")
    job = small_job("llama", 2, batch_size=2, phase="evaluate")
    sizes = [
        predict(job, recipe, gpu="h200").footprint.kinds[Kind.WEIGHTS]
        for recipe in ("plain", "low_bits(bits=8)", "low_bits")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len({*sizes}) == 3


def test_training_refuses_it_and_plans_take_it_with_permission_alone() -> None:
    needs_techniques("low_bits")
    with pytest.raises(RecipeError, match=r"quantized weights do not train\. Try 'qlora'"):
        Recipe.parse("low_bits").check(small_job("llama", 2))
    job = small_job("llama", 2, phase="evaluate")
    usual, all_of_them = (
        {str(one) for one in space_of(job, fidelity=fidelity).offers(Slot.ADAPTERS)}
        for fidelity in (Fidelity.ROUNDS, Fidelity.LEARNS)
    )
    assert usual == {"full"}
    assert all_of_them == {"full", "low_bits", "low_bits(bits=8)"}

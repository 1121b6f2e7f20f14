"""The techniques `fp8` and `qlora` together with other techniques, and in files of other libraries."""

from __future__ import annotations

import pytest

from kept import kept
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.features.loops.trainer.ranks import recipe_in_each
from snugfit.planning.cost.short_passes import second_step_is_redundant
from snugfit.planning.keep import kept_of
from snugfit.planning.search.space import space_of
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot
from tiers import slow_but

# ---- other techniques --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "recipe", "says"),
    [
        ("llama", "compiled + qlora", r"quantized weights are not compiled, so leave compiled out"),
        ("llama", "qlora + selective(products)", r"selective\(products\) keeps nothing\. Try 'every_layer'"),
        ("llama", "fp8 + zero2", "not simulated together with fp8"),
        ("llama", "fp8 + ddp", "not simulated together with fp8"),
    ],
)
def test_techniques_that_exclude_each_other_are_named(family: str, recipe: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        Recipe.parse(recipe).check(small_job(family, 2), installed=False)


@pytest.mark.parametrize("recipe", ["fp8", "qlora"])
def test_a_trainer_of_several_processes_refuses_them(recipe: str) -> None:
    with pytest.raises(RecipeError, match=f"^{recipe} cannot be given to a trainer that is one of 2"):
        recipe_in_each(Recipe.parse(recipe), 2, lambda recipe: None)


def test_a_plan_offers_one_rank_where_higher_ranks_are_never_better() -> None:
    job = small_job("bert", 2, batch_size=2)
    fixed = kept_of(job, kept(but="adapters"))
    space = space_of(job, fidelity=Fidelity.LEARNS, capability=(9, 0), fixed=fixed)
    offered = [str(one) for one in space.offers(Slot.ADAPTERS)]
    assert [one for one in offered if "qlora" in one] == ["qlora(targets=all-linear)"]


@pytest.mark.parametrize("recipe", slow_but(["bf16 + every_layer + micro_batches(2)", "bf16"], 1))
def test_a_search_splices_the_second_step_of_4_bit_weights(recipe: str) -> None:
    """bitsandbytes casts a bias permanently at the first call of its layer."""
    job, setup = small_job("qwen2", 2, batch_size=2), Recipe.parse(f"qlora + {recipe}").setup()
    assert second_step_is_redundant(job, setup, CudaPolicy())


# ---- other libraries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "told"), [("load_in_4bit", "'qlora'"), ("LOAD_IN_8BIT", "'qlora'"), ("mxfp8", "'fp8'")]
)
def test_a_word_of_another_library_is_answered_with_advice(word: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.parse(word)
    assert told in str(error.value)
    assert "Did you mean" not in str(error.value)

"""Combinations of a search space: the recipes that pass a check of each whole recipe, in the same order."""

from __future__ import annotations

from itertools import product

import pytest

from small_models import small_job
from snugfit.planning.keep import Kept, kept_of
from snugfit.planning.search.space import Combinations, Space, space_of
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot
from tiers import slow_but

JOB = small_job("bert", 2, batch_size=2)


def space(fixed: Kept) -> Space:
    return space_of(JOB, fidelity=Fidelity.ROUNDS, capability=(9, 0), fixed=fixed)


def kept(text: str = "", start: str = "") -> Kept:
    return kept_of(JOB, text or None, ("precision", "optimizer"), Recipe.parse(start) if start else None)


def planned(recipe: Recipe, fixed: Kept) -> bool:
    """Return true if no technique rejects the whole recipe or a plan with it."""
    if any(next(technique.objections(JOB, recipe), "") for technique in recipe):
        return False
    free = Recipe(tuple(one for one in recipe if one.slot not in fixed.slots))
    return recipe == fixed.start or not any(technique.planned_without(JOB, free) for technique in recipe)


@pytest.mark.parametrize(
    ("settled", "own"),
    slow_but(
        [
            ("uncompiled + sdpa + default", ""),
            ("eager + inline + default", ""),
            ("uncompiled + inline + default", "bf16_master + adamw_fused"),
        ],
        lambda case: bool(case[1]),
    ),
    ids=["two kept", "one that plans leave out kept", "the user's own"],
)
def test_they_are_those_of_which_each_whole_recipe_is_asked(settled: str, own: str) -> None:
    fixed = kept(settled, own)
    choices = space(fixed).choices
    every = [Recipe(techniques) for techniques in product(*choices)]
    combinations = Combinations(choices, JOB, fixed)
    found = [(index, Recipe(techniques)) for index, techniques, _ in combinations]
    assert found == [(index, recipe) for index, recipe in enumerate(every) if planned(recipe, fixed)]
    assert 0 < len(found) < len(every)
    assert len(found) + sum(combinations.objections.values()) == len(every), "each is counted once"


def test_each_has_the_setup_that_its_recipe_makes() -> None:
    choices = space(kept("uncompiled + sdpa + inline + default")).choices
    for _, techniques, setup in Combinations(choices, JOB, Kept()):
        assert setup == Recipe(techniques).setup()
    [(index, techniques, setup)] = Combinations([[one] for one in Recipe()], JOB, Kept())
    assert (index, Recipe(techniques), setup) == (0, Recipe(), Setup())


def test_the_user_s_own_is_planned_though_plans_leave_it_out() -> None:
    own = "bf16_master + adamw_fused"
    settled = "uncompiled + sdpa + inline + default"
    mine, others = space(kept(settled, own)), space(kept(settled))
    assert mine.number(Recipe.parse(own)) is not None
    assert others.number(Recipe.parse(own)) is None
    assert any(one.what == "bf16_master" and one.recipes for one in others.excluded)
    assert Recipe.parse(own)[Slot.OPTIMIZER] in mine.offers(Slot.OPTIMIZER)

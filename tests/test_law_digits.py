"""Law 3 on a small real task: handwritten digits, which ship with the package, trained through our own
loop.

Every technique of the roster trains the same model from the same seed, and so do random combinations of
techniques. With the plain recipe, the model classifies 94 of 100 unseen pictures. Batches are smaller than
the job's own, because half precision is slow on a CPU.

- SAME must end with exactly the accuracy of the plain recipe.
- ROUNDS must end within one point of it, which is six of 599 pictures.
- LEARNS must learn at one of three usual learning rates.

A technique that cannot run here is left out, and its own error gives the reason. Each technique has the
first setting that a planner would try and that this model supports. Other settings only change numbers;
`test_law_fidelity.py` compares each of them with the plain recipe, also in `make test`.
"""

from __future__ import annotations

import random
from functools import cache
from tempfile import TemporaryDirectory

import pytest

import snugfit
from in_roster import needs_task
from snugfit.errors import RecipeError
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Technique

task = pytest.importorskip("snugfit.features.digits", reason="the feature digits is not there")
digits, digits_job = task.digits, task.digits_job

pytestmark = [pytest.mark.whole, pytest.mark.slow]
needs_task("image-classification")

STEPS, BATCH = 100, 48
POINT = 0.01
LEARNED = 0.9
"""Least accuracy of a trained model; a guess gives 0.1."""

RATES = (5e-3, 5e-2, 5e-4)
"""Learning rates for LEARNS techniques: each must learn at one of them."""

DRAWN = 2
"""Number of combinations of each fidelity."""

pictures = cache(digits)


@cache
def accuracy(recipe: Recipe, rate: float = RATES[0]) -> float:
    """Return the accuracy after training with this recipe; skip the test if the recipe cannot run."""
    train, test = pictures()
    with TemporaryDirectory() as folder:
        try:
            done = snugfit.train(
                digits_job(learning_rate=rate, batch_size=BATCH), recipe, train, evaluation=test,
                output_dir=folder, device="cpu", max_steps=STEPS, warmup_steps=0.1, save_strategy="no",
                eval_strategy="steps", eval_steps=STEPS,
            )  # fmt: skip
        except RecipeError as reason:
            pytest.skip(str(reason))
    assert done.evaluated
    assert done.evaluated.accuracy
    return done.evaluated.accuracy


def candidates(fidelity: Fidelity) -> list[Technique]:
    """Return every technique of this fidelity that is not plain, at a planner's first setting for this
    model.

    Techniques that need several processes are left out.
    """
    job, found = digits_job(), []
    for technique in roster.techniques():
        settings = [each for each in technique.settings(job) if each != roster.plain(technique.slot)]
        settings = [each for each in settings if not each.needs_several_gpus]
        if technique.fidelity is fidelity and settings:
            lawful = (each for each in settings if not any(each.objections(job, Recipe((each,)))))
            found.append(next(lawful, settings[0]))
    return found


def combinations(fidelity: Fidelity) -> list[Recipe]:
    """Return recipes of several compatible techniques, the least exact of which has this fidelity."""
    draw, drawn = random.Random(2), dict[Recipe, None]()
    least = candidates(fidelity)
    others = least + (candidates(Fidelity.SAME) if fidelity is not Fidelity.SAME else [])
    for _ in range(1000):
        if len(drawn) == DRAWN:
            break
        chosen = {each.slot: each for each in draw.sample(others, k=4)}
        chosen |= {one.slot: one for one in [draw.choice(least)]}
        recipe = Recipe(tuple(chosen.values()))
        if len(chosen) > 1 and _goes(recipe):
            drawn[recipe] = None
    return list(drawn)


def _goes(recipe: Recipe) -> bool:
    try:
        recipe.check(digits_job())
    except RecipeError:
        return False
    return True


def tried(fidelity: Fidelity) -> list[Recipe]:
    return [*(Recipe((each,)) for each in candidates(fidelity)), *combinations(fidelity)]


@pytest.mark.parametrize("recipe", tried(Fidelity.SAME), ids=str)
def test_same_reaches_the_very_accuracy(recipe: Recipe) -> None:
    assert accuracy(recipe) == accuracy(Recipe()) > LEARNED


@pytest.mark.parametrize("recipe", tried(Fidelity.ROUNDS), ids=str)
def test_rounds_comes_within_one_point(recipe: Recipe) -> None:
    assert accuracy(recipe) == pytest.approx(accuracy(Recipe()), abs=POINT)


@pytest.mark.parametrize("technique", candidates(Fidelity.LEARNS), ids=str)
def test_learns_does_learn(technique: Technique) -> None:
    reached: dict[float, float] = {}
    for rate in RATES:
        reached[rate] = accuracy(Recipe((technique,)), rate)
        if reached[rate] > LEARNED:
            return
    pytest.fail(f"{technique}: right answers by learning rate {reached}, none above {LEARNED}")


def test_the_law_would_notice_another_training() -> None:
    """SAME and ROUNDS must not pass with a planted fault: a tenth of the learning rate."""
    assert accuracy(Recipe(), RATES[0] / 10) != pytest.approx(accuracy(Recipe()), abs=POINT)

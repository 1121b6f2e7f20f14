"""Draw recipes for one job at random from a seed, so that they can be ranked: across jobs ranks mean nothing.

A seed and a job give the same recipes on every machine. A recipe may still turn out invalid when the model
is built (peft knows no targets for it, a layer returns more than its hidden state). The caller skips it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import on_gpus
from snugfit.techniques.technique import Slot, Technique

PLAIN_SHARE = 0.6
"""Probability that a slot stays plain; else each of its other techniques is as likely."""

ALONE_SHARE = 0.25
"""Of several GPUs: probability that all of them work on the whole batch, by matrices that are cut."""

MAX_PROPOSALS = 2_000
"""Recipes that are tried for one job, valid or not."""


def draw_recipes(job: Job, seed: int) -> Iterator[Recipe]:
    """Distinct valid recipes for this job, the plain one first; the seed and the job determine them."""
    rng = random.Random(f"snugfit recipes {seed} {json.dumps(job.to_json(), sort_keys=True)}")
    plain = Recipe()
    yielded = {plain}
    yield plain
    for _ in range(MAX_PROPOSALS):
        recipe = draw_recipe(job, rng)
        if recipe is not None and recipe not in yielded:
            yielded.add(recipe)
            yield recipe


def _divides(technique: Technique, gpus: int) -> bool:
    """Whether so many GPUs are groups of those that work on one part of the batch, where it makes any."""
    wish = technique.install(Setup()).parallel
    return wish is None or gpus % wish.ranks_of_one_part == 0


def draw_recipe(job: Job, rng: random.Random, gpus: int = 1) -> Recipe | None:
    """A technique in each slot, with a setting that it proposes for the job; None when they are not valid
    together, or not for so many GPUs. Whether packages are installed here does not count: a missing one
    fails, and that is shown."""
    drawn = []
    for slot in Slot:
        if slot in roster.slots_of_several_gpus() and slot is not Slot.SHARDING:
            continue  # not drawn so far
        in_slot = [technique for technique in roster.techniques() if technique.slot is slot]
        candidates = [one for one in in_slot if one.plain or one.needs_several_gpus is (gpus > 1)]
        if slot not in roster.slots_of_several_gpus():
            candidates = in_slot
        elif len(candidates) == 1:  # nothing to draw
            drawn.append(candidates[0]())
            continue
        active = [technique for technique in candidates if not technique.plain]
        plain_share = ALONE_SHARE if gpus > 1 and slot is Slot.SHARDING else PLAIN_SHARE
        technique = rng.choice(active) if active and rng.random() >= plain_share else candidates[0]
        settings = [one for one in technique.settings(job) if _divides(one, gpus)] or [candidates[0]()]
        drawn.append(rng.choice(settings))
    recipe = Recipe(tuple(drawn))
    try:
        recipe.check(job, installed=False)
        on_gpus(recipe.setup(), gpus)
    except SnugfitError:
        return None
    return recipe

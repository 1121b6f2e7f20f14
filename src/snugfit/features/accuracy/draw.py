"""Random recipes (a training technique for each slot, such as the optimizer) for one job.

A seed and a job give the same recipes on every machine. A recipe may still prove invalid when the model is
built. For example, peft has no targets, or a layer returns more than its hidden state. The caller skips such
a recipe.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.step.applier import refuse_rehearsal
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus
from snugfit.techniques.technique import Slot, Technique
from snugfit.techniques.wish import processes_of

PLAIN_SHARE = 0.6
"""Probability that a slot stays plain; all its other techniques are equally likely."""

ALONE_SHARE = 0.25
"""Probability, on several GPUs, that all of them train on the whole batch with tensor parallelism."""

MAX_PROPOSALS = 2_000
"""Largest number of recipes that are tried for one job, valid or not."""


def draw_recipes(job: Job, seed: int) -> Iterator[Recipe]:
    """Yield random, distinct and valid recipes for this job, first the one without any technique.

    The seed and the job determine the recipes.
    """
    # As a seed, a text yields the same numbers in every process.
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
    """Return True if the number of GPUs is a multiple of the process group that this technique needs."""
    processes = processes_of(technique.alone)
    return processes is None or gpus % math.prod(processes.axes.values()) == 0


def _is_simulated(technique: type[Technique]) -> bool:
    return technique.searched or technique.needs_several_gpus


def draw_recipe(job: Job, rng: random.Random, gpus: int = 1) -> Recipe | None:
    """Draw a random technique for each slot (such as the optimizer), with a setting that it proposes for the
    job. Return None for an invalid combination, or one that does not fit this number of GPUs. Installed
    packages are not checked: a missing one fails visibly.
    """
    drawn = []
    for slot in Slot:
        if slot in roster.slots_of_several_gpus() and slot is not Slot.SHARDING:
            continue  # not drawn so far
        in_slot = [one for one in roster.techniques() if one.slot is slot and _is_simulated(one)]
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
        refuse_rehearsal(recipe.setup(), job)
        on_gpus(recipe.setup(), gpus)
    except SnugfitError:
        return None
    return recipe

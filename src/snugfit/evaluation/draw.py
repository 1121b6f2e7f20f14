"""Jobs and recipes that nobody chose: drawn from a seed, the same on every machine.

A draw goes round the families in an order that the seed shuffles, so that a dozen draws meet a dozen
families. Each number has a random stream of its own, made of the seed and the number: what happens to one
draw moves no other. A stream gives proposals one after the other; those that are too small to tell an error
from the grain of the allocator (segments of 20 MiB), too large, or whose recipe cannot go with the job, are
passed over. All of that is decided by arithmetic here and by the techniques' own objections, never by a
prediction or by the machine.

A recipe may still turn out unlawful when the model is built (peft knows no targets for it, a layer hands on
more than its hidden state). Then `proposals` goes on to the next, and whoever draws says what was passed by.

`recipes_for` draws recipes for one job, so that their order can be told: across jobs it tells nothing.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from snugfit.errors import SnugfitError
from snugfit.evaluation.families import FAMILIES, Family, ModelSizes, draw_config
from snugfit.job.config import check_facts
from snugfit.job.find import read_preset
from snugfit.job.job import Job, Phase, Task
from snugfit.job.model import Model
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.units import GIB

PLAIN_SHARE = 0.6
"""How often a slot stays plain; else each of its other techniques is as likely."""

SMALLEST, LARGEST = 2 * GIB, 48 * GIB
"""Between them lies the rough size of a drawn job, done the plainest way."""

MOST_FLOPS = 3e13
"""Of one optimizer step: half a second to a second in fp32 on an H200."""

MOST_PROPOSALS = 2_000
"""Of one number, before something must be wrong with the ranges."""

EVALUATIONS = 0.08
"""Share of jobs that only evaluate."""


@dataclass(frozen=True, kw_only=True)
class DrawnJob:
    """One job with one recipe."""

    number: int
    """From 0."""

    family: str
    """Its model's."""

    job: Job
    """What must be trained."""

    recipe: Recipe
    """How."""


def proposals(seed: int, number: int) -> Iterator[DrawnJob]:
    """Lawful draws for this number, best taken in order; the first is the draw unless it cannot be built."""
    family = _family(seed, number)
    rng = random.Random(f"snugfit {seed} {number}")
    for _ in range(MOST_PROPOSALS):
        job = _draw_job(family, rng)
        recipe = _draw_recipe(job, rng) if job else None
        if job and recipe:
            yield DrawnJob(number=number, family=family.name, job=job, recipe=recipe)


def job_for(seed: int, number: int) -> DrawnJob:
    """The first job of this number that trains, and the recipe that was drawn with it."""
    for drawn in proposals(seed, number):
        if drawn.job.trains:
            return drawn
    raise SnugfitError(f"Draw {number} of seed {seed} gave no job that trains.")


def recipes_for(job: Job, seed: int) -> Iterator[Recipe]:
    """Different lawful recipes for this job, the plain one first; the seed and the job choose them."""
    rng = random.Random(f"snugfit recipes {seed} {json.dumps(job.to_json(), sort_keys=True)}")
    plain = Recipe()
    given = {plain}
    yield plain
    for _ in range(MOST_PROPOSALS):
        recipe = _draw_recipe(job, rng)
        if recipe is not None and recipe not in given:
            given.add(recipe)
            yield recipe


def _family(seed: int, number: int) -> Family:
    order = list(FAMILIES)
    random.Random(f"snugfit {seed}").shuffle(order)
    return order[number % len(order)]


def _draw_job(family: Family, rng: random.Random) -> Job | None:
    """A job of this family; None when it is too small or too large."""
    config, sizes = draw_config(family, read_preset(family.preset), rng)
    task = rng.choice(family.tasks)
    batch = round(2 ** rng.uniform(0, 6))
    sequence, target = _draw_length(family.longest, rng), _draw_length(min(family.longest, 448), rng)
    padded = rng.random() < 0.25 and task is not Task.IMAGE_CLASSIFICATION
    if not _worth_it(sizes, task, batch, sequence, target):
        return None
    name = f"{family.name}-{sizes.depth}x{sizes.width}"
    return Job(
        model=Model.from_config(check_facts(config, where=name), name=name, origin="drawn"),
        task=task,
        phase=Phase.EVALUATE if rng.random() < EVALUATIONS else Phase.TRAIN,
        batch_size=batch,
        sequence_length=sequence,
        target_length=target,
        padding=round(rng.uniform(0.05, 0.6), 2) if padded else 0.0,
        labels=rng.choice((2, 3, 10, 1000)),
        clip=rng.choice((None, None, None, 1.0)),
        decay_groups=rng.random() < 0.25,
        build_on="host" if rng.random() < 0.1 else "device",
    )


def _draw_length(longest: int, rng: random.Random) -> int:
    """A power of two half of the time, else any length."""
    if rng.random() < 0.5:
        return int(2 ** rng.randint(6, int(math.log2(longest))))
    return rng.randint(32, longest)


def _worth_it(sizes: ModelSizes, task: Task, batch: int, sequence: int, target: int) -> bool:
    """Whether the job is neither too small nor too large, roughly and done the plainest way.

    Weights, gradients and two moments: 16 bytes a parameter, and a temporary copy. Activations after
    Korthikanti et al. (arXiv 2205.05198, equation 1: 34 s b h + 5 a s^2 b bytes in 16 bits), twice that in
    32 bits, with the feed-forward part's own width; logits count three times.
    """
    tokens = batch * (sizes.image_positions or sequence)
    width, matrices = sizes.width, sizes.inner * 3 * sizes.experts
    twice = 2 if task in (Task.SEQ2SEQ_LM, Task.SPEECH_TO_TEXT) else 1
    parameters = twice * sizes.depth * width * (4 * width + matrices) + 2 * sizes.vocabulary * width
    length = sizes.image_positions or sequence
    activations = 4 * twice * sizes.depth * tokens * (14 * width + 4 * sizes.inner + 4 * sizes.heads * length)
    with_logits = task in (Task.CAUSAL_LM, Task.MASKED_LM, Task.SEQ2SEQ_LM, Task.SPEECH_TO_TEXT)
    predicted = batch * (target if twice == 2 else sequence)
    logits = 3 * 4 * predicted * sizes.vocabulary if with_logits else 0
    flops = 6 * tokens * twice * sizes.depth * width * (4 * width + 3 * sizes.inner * min(2, sizes.experts))
    return SMALLEST <= 20 * parameters + activations + logits <= LARGEST and flops <= MOST_FLOPS


def _draw_recipe(job: Job, rng: random.Random) -> Recipe | None:
    """A technique in each slot, with a setting that it proposes for the job; None when they do not go
    together. What is installed here does not count: a missing package is a failure, and is shown."""
    chosen = []
    for slot in Slot:
        found = [technique for technique in roster.techniques() if technique.slot is slot]
        others = [technique for technique in found if not technique.plain]
        kind = rng.choice(others) if others and rng.random() >= PLAIN_SHARE else found[0]
        settings = list(kind.settings(job)) or [found[0]()]
        chosen.append(rng.choice(settings))
    recipe = Recipe(tuple(chosen))
    try:
        recipe.check(job, installed=False)
    except SnugfitError:
        return None
    return recipe

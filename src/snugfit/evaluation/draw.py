"""Draws jobs and recipes at random from a seed, the same on every machine.

Draws cycle through the families in an order that the seed shuffles, so that a dozen draws cover a dozen
families. Each number has a random stream of its own, seeded by the seed and the number: one draw influences
no other. A stream yields proposals; those that are too small to tell an error from the granularity of the
allocator (segments of 20 MiB), too large, or whose recipe is not valid for the job, are skipped. All of that
is decided by arithmetic here and by the techniques' own objections, never by a prediction or by the machine.

A recipe may still turn out invalid when the model is built (peft knows no targets for it, a layer returns
more than its hidden state). Then `proposals` yields the next, and the caller records what was skipped.

`draw_recipes` draws recipes for one job, so that they can be ranked: across jobs a rank means nothing.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from snugfit.errors import SnugfitError
from snugfit.evaluation.families import FAMILIES, Family, ModelSizes, draw_config
from snugfit.job.config import check_facts
from snugfit.job.find import read_preset
from snugfit.job.job import Job, Phase, Task
from snugfit.job.model import Model
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import on_gpus
from snugfit.techniques.technique import Slot, Technique
from snugfit.units import GIB

PLAIN_SHARE = 0.6
"""Probability that a slot stays plain; else each of its other techniques is as likely."""

ALONE_SHARE = 0.25
"""Of several GPUs: probability that all of them work on the whole batch, by matrices that are cut."""

MIN_BYTES, MAX_BYTES = 2 * GIB, 48 * GIB
"""Bounds on the rough size of a drawn job under the plain recipe."""

MAX_FLOPS = 3e13
"""Of one optimizer step: half a second to a second in fp32 on an H200."""

MAX_PROPOSALS = 2_000
"""Of one number, before something must be wrong with the ranges."""

EVALUATION_SHARE = 0.08
"""Share of jobs that only evaluate."""


@dataclass(frozen=True, kw_only=True)
class DrawnJob:
    """A drawn job with a drawn recipe."""

    number: int
    """Of the draw, from 0."""
    family: str
    """Of the model, as `families.py` names it."""
    job: Job
    recipe: Recipe


def proposals(seed: int, number: int, gpus: int = 1) -> Iterator[DrawnJob]:
    """Valid draws for this number on so many GPUs, in order; the first is the draw unless its model cannot be
    built. On several, sizes are those of one GPU's share."""
    family = _family(seed, number)
    rng = random.Random(f"snugfit {seed} {number}")
    for _ in range(MAX_PROPOSALS):
        job = _draw_job(family, rng)
        recipe = _draw_recipe(job, rng, gpus) if job else None
        if job and recipe:
            job = replace(job, batch_size=job.batch_size * gpus)
            yield DrawnJob(number=number, family=family.name, job=job, recipe=recipe)


def draw_training_job(seed: int, number: int) -> DrawnJob:
    """The first job of this number that trains, and the recipe that was drawn with it."""
    for drawn in proposals(seed, number):
        if drawn.job.trains:
            return drawn
    raise SnugfitError(f"Draw {number} of seed {seed} gave no job that can be trained.")


def draw_recipes(job: Job, seed: int) -> Iterator[Recipe]:
    """Distinct valid recipes for this job, the plain one first; the seed and the job determine them."""
    rng = random.Random(f"snugfit recipes {seed} {json.dumps(job.to_json(), sort_keys=True)}")
    plain = Recipe()
    yielded = {plain}
    yield plain
    for _ in range(MAX_PROPOSALS):
        recipe = _draw_recipe(job, rng)
        if recipe is not None and recipe not in yielded:
            yielded.add(recipe)
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
    if not _is_size_allowed(sizes, task, batch, sequence, target):
        return None
    name = f"{family.name}-{sizes.depth}x{sizes.width}"
    return Job(
        dtype="float32",
        model=Model.from_config(check_facts(config, where=name), name=name, origin="drawn"),
        task=task,
        phase=Phase.EVALUATE if rng.random() < EVALUATION_SHARE else Phase.TRAIN,
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
    """A number of tokens: a power of two half of the time, else any."""
    if rng.random() < 0.5:
        return int(2 ** rng.randint(6, int(math.log2(longest))))
    return rng.randint(32, longest)


def _is_size_allowed(sizes: ModelSizes, task: Task, batch: int, sequence: int, target: int) -> bool:
    """Whether bytes and FLOPs of the plain recipe, roughly estimated, are within the bounds.

    Weights, gradients and two moments: 16 bytes a parameter, and a temporary copy. Activations after
    Korthikanti et al. (arXiv 2205.05198, equation 1: 34 s b h + 5 a s^2 b bytes in 16 bits), twice that in
    32 bits, with the feed-forward part's own width; logits count three times.
    """
    length = sizes.image_positions or sequence
    tokens = batch * length
    width, matrices = sizes.width, sizes.inner * 3 * sizes.experts
    stacks = 2 if task in (Task.SEQ2SEQ_LM, Task.SPEECH_TO_TEXT) else 1
    parameters = stacks * sizes.depth * width * (4 * width + matrices) + 2 * sizes.vocabulary * width
    activations = (
        4 * stacks * sizes.depth * tokens * (14 * width + 4 * sizes.inner + 4 * sizes.heads * length)
    )
    with_logits = task in (Task.CAUSAL_LM, Task.MASKED_LM, Task.SEQ2SEQ_LM, Task.SPEECH_TO_TEXT)
    predicted = batch * (target if stacks == 2 else sequence)
    logits = 3 * 4 * predicted * sizes.vocabulary if with_logits else 0
    flops = 6 * tokens * stacks * sizes.depth * width * (4 * width + 3 * sizes.inner * min(2, sizes.experts))
    return MIN_BYTES <= 20 * parameters + activations + logits <= MAX_BYTES and flops <= MAX_FLOPS


def _divides(technique: Technique, gpus: int) -> bool:
    """Whether so many GPUs are groups of those that work on one part of the batch, where it makes any."""
    wish = technique.install(Setup()).parallel
    return wish is None or gpus % wish.ranks_of_one_part == 0


def _draw_recipe(job: Job, rng: random.Random, gpus: int = 1) -> Recipe | None:
    """A technique in each slot, with a setting that it proposes for the job; None when they are not valid
    together, or not for so many GPUs. Whether packages are installed here does not count: a missing one
    fails, and that is shown."""
    drawn = []
    for slot in Slot:
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

"""Draw jobs and recipes at random from a seed, and predict them.

    python lab/draw_runs.py FOLDER [--draw 16] [--seed 0] [--gpu h200] [--gpus 2] [--workers 2]
    python lab/draw_runs.py FOLDER --within-job 6 [...]   several drawn recipes of each drawn job
    python lab/draw_runs.py FOLDER --top 12 [...]         the best recipes of each drawn job's plan
    python lab/draw_runs.py FOLDER --adapters [...]       decoders with LoRA in snugfit's kernels; on several
                                                          GPUs also in compiled layers
    python lab/draw_runs.py FOLDER --tasks [...]          the tasks that features add

Each command writes one result into FOLDER; `snugfit accuracy --measure FILE` measures its runs on the GPU.

Draws cycle through the families in an order that the seed shuffles, so a dozen draws cover a dozen families.
Each number has a random stream of its own, seeded by the seed and the number. So no draw influences another.
A stream yields proposals. Three kinds are skipped: too large, invalid for the job, and too small. A job is
too small if the allocator's granularity (segments of 20 MiB) could hide an error. Arithmetic here and the
techniques' own objections decide this, never a prediction or the machine.

A family is a bundled preset with ranges for its sizes. Everything else stays as in the preset: activation,
norms, biases, dropout, soft caps, sliding windows, tied weights. So a drawn model is a plausible other size
of the preset.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import task_draws
from families import DECODER, FAMILIES, Family

from snugfit.errors import SnugfitError
from snugfit.features.accuracy import score
from snugfit.features.accuracy.command import rank_by_plan
from snugfit.features.accuracy.compared_runs import Accuracy, ComparedRun
from snugfit.features.accuracy.predict_runs import MAX_PROPOSALS, draw_recipe, predict_each
from snugfit.features.accuracy.tables import file_name
from snugfit.features.kernels.decoders.forms import fused_parts
from snugfit.job.config import check_facts
from snugfit.job.find import read_preset
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.job import Job, Phase, Task
from snugfit.job.model import Model
from snugfit.prediction.worker_pool import map_in_processes
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.units import GIB

DECODERS = [family for family in FAMILIES if family.tasks == DECODER and fused_parts(family.name)]
"""Families with snugfit's kernels for decoders."""

MIN_BYTES, MAX_BYTES = 2 * GIB, 48 * GIB
"""Bounds on the rough size of a drawn job under the plain recipe."""

MAX_FLOPS = 3e13
"""Largest number of FLOPs of one optimizer step: half a second to a second in fp32 on an H200."""

EVALUATION_SHARE = 0.08
"""Share of jobs that only evaluate."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The drawn sizes of one model."""

    depth: int
    """Number of layers, of the encoder and of the decoder each."""
    width: int
    """Width of the hidden state."""
    heads: int
    """Number of query heads."""
    inner: int
    """Width of the feed-forward layer."""
    vocabulary: int
    """Rows of the embedding table; 0 without one."""
    experts: int
    """Number of feed-forward layers side by side."""
    image_positions: int
    """Patches of a picture, or frames of sound; 0 for text."""


def draw_config(
    family: Family, facts: dict[str, Any], rng: random.Random
) -> tuple[dict[str, Any], ModelSizes]:
    """Return the preset's config `facts` in a drawn size, and that size."""
    low, high = family.width
    head = rng.choice(family.head_widths)
    heads = rng.randint(-(-low // head), high // head)
    width = heads * head
    if family.free_heads:
        width = rng.randrange(low, high + 1, 64)
        heads = rng.choice([n for n in range(1, 65) if width % n == 0 and 0.6 <= n * head / width <= 1.5])
    inner = round(width * rng.uniform(2, 4)) // 64 * 64
    drawn = {"depth": rng.randint(*family.depth), "width": width, "heads": heads, "inner": inner}
    config = dict(facts)
    for size, keys in family.keys:
        config |= dict.fromkeys(keys, drawn[size])
    config |= {key: head for key in (family.free_heads, "head_dim") if key in facts}
    if family.grouped:
        config["num_key_value_heads"] = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    config |= {key: rng.choice(values) for key, values in family.choices}
    if family.vocabulary and rng.random() < 0.4:
        _cut_vocabulary(config, family.vocabulary, rng.randint(4_000, 100_000))
    sizes = ModelSizes(
        **drawn,
        vocabulary=config.get(family.vocabulary, 0),
        experts=config.get("num_local_experts", 1),
        image_positions=_positions(config),
    )
    return config, sizes


def _cut_vocabulary(config: dict[str, Any], key: str, size: int) -> None:
    """Set the size of the vocabulary, and map the special tokens into it."""
    config[key] = size
    for name, value in config.items():
        if name.endswith("_token_id") and isinstance(value, int):
            config[name] = value % size


def _positions(config: dict[str, Any]) -> int:
    if "image_size" in config:
        return int((config["image_size"] // config["patch_size"]) ** 2 + 1)
    return int(config.get("max_source_positions", 0))


@dataclass(frozen=True, kw_only=True)
class DrawnJob:
    """A drawn job with a drawn recipe."""

    number: int
    """Number of the draw, from 0."""
    family: str
    """Name of the model in `FAMILIES`."""
    job: Job
    recipe: Recipe


def proposals(seed: int, number: int, gpus: int = 1, *, only: str = "") -> Iterator[DrawnJob]:
    """Yield valid draws for this number on so many GPUs.

    The first one is the draw unless its model cannot be built. On several GPUs, sizes are those of one GPU's
    share. With `only="adapters"`, only draws of decoders with LoRA in snugfit's kernels are valid, and on
    several GPUs those in compiled layers. With `only="tasks"`, jobs have the tasks of `task_draws.py`.
    """
    family = _family(seed, number, DRAWN_FROM[only]())
    rng = random.Random(f"snugfit {seed} {number}")
    for _ in range(MAX_PROPOSALS):
        job = _draw_job(family, rng, only)
        recipe = draw_recipe(job, rng, gpus) if job else None
        if job and recipe and (only != "adapters" or _has_adapters(recipe, gpus)):
            job = replace(job, batch_size=job.batch_size * gpus)
            yield DrawnJob(number=number, family=family.name, job=job, recipe=recipe)


def _has_adapters(recipe: Recipe, gpus: int) -> bool:
    is_fast = recipe[Slot.KERNELS].name == "fused" or (gpus > 1 and recipe[Slot.ENGINE].name == "compiled")
    return recipe[Slot.ADAPTERS].name in ("lora", "qlora") and is_fast


DRAWN_FROM: dict[str, Callable[[], Sequence[Family | task_draws.MediaFamily]]] = {
    "": lambda: FAMILIES,
    "adapters": lambda: DECODERS,
    "tasks": task_draws.families,
}
"""Families of a draw, by its kind."""


def _family(
    seed: int, number: int, families: Sequence[Family | task_draws.MediaFamily]
) -> Family | task_draws.MediaFamily:
    order = list(families)
    random.Random(f"snugfit {seed}").shuffle(order)
    return order[number % len(order)]


def _draw_job(family: Family | task_draws.MediaFamily, rng: random.Random, only: str) -> Job | None:
    """Draw a job of this family. Return None if it is too small or too large."""
    if isinstance(family, task_draws.MediaFamily):
        try:
            return task_draws.media_job(family, rng)
        except SnugfitError:  # for example, more tokens of pictures than the sequence has
            return None
    config, sizes = draw_config(family, read_preset(family.preset), rng)
    task = Task(rng.choice(task_draws.OF_TEXTS[family.name] if only == "tasks" else family.tasks))
    batch = round(2 ** rng.uniform(0, 6))
    sequence, target = _draw_length(family.longest, rng), _draw_length(min(family.longest, 448), rng)
    padded = rng.random() < 0.25 and task != "image-classification"
    if not _is_size_allowed(sizes, task, batch, sequence, target):
        return None
    name = f"{family.name}-{sizes.depth}x{sizes.width}"
    return Job(
        dtype="float32",
        model=Model.from_config(check_facts(config, where=name), name=name, origin="drawn"),
        task=task,
        phase=Phase.EVALUATE if rng.random() < EVALUATION_SHARE and only != "tasks" else Phase.TRAIN,
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
    """Draw a number of tokens: a power of two half of the time, else any."""
    if rng.random() < 0.5:
        return int(2 ** rng.randint(6, int(math.log2(longest))))
    return rng.randint(32, longest)


def _is_size_allowed(sizes: ModelSizes, task: str, batch: int, sequence: int, target: int) -> bool:
    """Return True if estimated bytes and FLOPs of the plain recipe are within the bounds.

    Weights, gradients and two moments take 16 bytes a parameter, beside a temporary copy. Activations in 16
    bits follow Korthikanti et al. (arXiv 2205.05198, equation 1): 34 s b h + 5 a s^2 b bytes. In 32 bits they
    take twice that, with the feed-forward part's own width. Logits count three times.
    """
    length = sizes.image_positions or sequence
    tokens = batch * length
    width, matrices = sizes.width, sizes.inner * 3 * sizes.experts
    stacks = 2 if task in (Task.SEQ2SEQ_LM, "speech-to-text") else 1
    parameters = stacks * sizes.depth * width * (4 * width + matrices) + 2 * sizes.vocabulary * width
    activations = (
        4 * stacks * sizes.depth * tokens * (14 * width + 4 * sizes.inner + 4 * sizes.heads * length)
    )
    with_logits = task in (Task.CAUSAL_LM, Task.MASKED_LM, Task.SEQ2SEQ_LM, "speech-to-text")
    predicted = batch * (target if stacks == 2 else sequence)
    logits = 3 * 4 * predicted * sizes.vocabulary if with_logits else 0
    flops = 6 * tokens * stacks * sizes.depth * width * (4 * width + 3 * sizes.inner * min(2, sizes.experts))
    return MIN_BYTES <= 20 * parameters + activations + logits <= MAX_BYTES and flops <= MAX_FLOPS


def draw_training_jobs(seed: int, count: int) -> list[Job]:
    """Return the first training job of each of these numbers."""
    streams = (proposals(seed, number) for number in range(count))
    return [next(drawn.job for drawn in stream if drawn.job.trains) for stream in streams]


def predict_draw(seed: int, gpu: Gpu, number: int, *, gpus: int = 1, only: str = "") -> ComparedRun:
    """Return the draw of this number, predicted for so many GPUs.

    Recipes that the model does not support are skipped.
    """
    drawn = (
        ComparedRun(number=number, family=one.family, job=one.job, recipe=one.recipe, gpus=gpus)
        for one in proposals(seed, number, gpus, only=only)
    )
    run = next(predict_each(drawn, gpu), None)
    if run is None:
        raise SnugfitError(f"Draw {number} of seed {seed} gave no valid job and recipe.")
    return run


def draw_runs(
    seed: int,
    count: int,
    gpu: Gpu,
    writer: score.RunWriter,
    *,
    gpus: int = 1,
    workers: int = 1,
    only: str = "",
) -> Accuracy:
    """Draw `count` runs from `seed`, predict each for so many of `gpu`, and write them."""
    draw = partial(predict_draw, seed, gpu, gpus=gpus, only=only)
    runs = map_in_processes(draw, range(count), workers=workers)
    return writer.record(score.empty_result(gpu, seed, "drawn", gpus), runs, count)


def main() -> None:
    """Draw, predict and write one result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draw", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--within-job", type=int, default=0)
    several.add_argument("--top", type=int, default=0)
    several.add_argument("--adapters", action="store_true")
    several.add_argument("--tasks", action="store_true")
    given = parser.parse_args()
    if given.gpus > 1 and (given.within_job or given.top):
        parser.error("--gpus draws single runs")
    seed, gpu, recipes, workers = (
        given.seed,
        find_gpu(given.gpu),
        given.within_job or given.top,
        given.workers,
    )
    only = "adapters" if given.adapters else "tasks" if given.tasks else ""
    kind = "within-job" if given.within_job else "top" if given.top else "drawn"
    stem = f"seed{seed}" + (f"-{only}" if only else "") + (f"-gpus{given.gpus}" if given.gpus > 1 else "")
    writer = score.RunWriter(given.folder / file_name(stem, kind, recipes), measured=False, tell=print)
    if kind == "drawn":
        draw_runs(seed, given.draw, gpu, writer, gpus=given.gpus, workers=workers,
                  only=only)  # fmt: skip
        return
    jobs = draw_training_jobs(seed, given.draw)
    if kind == "within-job":
        score.accuracy_within_jobs(seed, jobs, recipes, gpu, writer, workers=workers)
    else:
        score.accuracy_of_best(
            jobs, recipes, rank_by_plan(gpu, recipes, workers, print), gpu, writer, seed=seed
        )


if __name__ == "__main__":
    main()

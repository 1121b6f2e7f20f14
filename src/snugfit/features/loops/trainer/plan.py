"""Choice of the recipe for a user's trainer: its current settings, or planned ones that differ in some slots.

Some of the user's choices stay: attention, engine, loader, allocator and adapters. Choices that are less
exact than `fidelity` (such as bf16 autocast under `same`) stay too. The plan chooses the rest: recomputed
layers, micro-batches, and the kernels of a named optimizer. Without a named optimizer, the Trainer's default
stays. With the fidelity `rounds`, the plan also chooses the precision of fp32 training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from snugfit.errors import NothingFits, UsageError
from snugfit.features.loops.trainer.job import several_samples
from snugfit.features.loops.trainer.live_trainer import bare_model
from snugfit.features.loops.trainer.loss import weighed_loss
from snugfit.features.loops.trainer.parts import trainer_parts
from snugfit.features.loops.trainer.ranks import processes_of, recipe_in_each
from snugfit.features.loops.trainer.setup import brings_optimizer
from snugfit.job.own_checkpointing import NAMES
from snugfit.job.sample_mixing import mixing_of
from snugfit.planning.request import fidelity_of
from snugfit.step.wishes.batching import allocator_options
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot
from snugfit.techniques.translate import read_slots
from snugfit.training.rng import preserve_rng
from snugfit.training.run.cut_loss import counted_by, job_with_mixing, unchanged_attributes

if TYPE_CHECKING:
    from snugfit.job.job import Job

UNCHANGED_SLOTS = (Slot.ADAPTERS, Slot.ATTENTION, Slot.ENGINE, Slot.ALLOCATOR, Slot.LOADING)
"""Slots (choices of a recipe) that a plan for a live trainer leaves unchanged.

The model already has its adapters and attention, and the process has already allocated memory. It is unknown
if the dataset supports workers, and if its batches have one length, for which layers are compiled once.
"""


@dataclass(frozen=True, kw_only=True)
class ChosenRecipe:
    """A recipe for a trainer, with the slots (choices of the recipe) that keep the user's settings."""

    recipe: Recipe
    """The recipe, as far as recipes can express the trainer's settings."""

    user_slots: frozenset[Slot] = frozenset()
    """Slots (choices of a recipe) that stay as the user configured them, even if no recipe can express the
    settings.
    """

    default_optimizer: bool = False
    """True if `TrainingArguments` use their default optimizer without naming it."""

    note: str = ""
    """Sentence with the reason for this recipe."""


def take_recipe(trainer: Any, recipe: Recipe, gpu: str | None) -> ChosenRecipe:
    """Return the user's recipe, without its sharding. Raises `UsageError` if a GPU is named too, and
    `RecipeError` for a recipe that the trainer's processes do not support.
    """
    if gpu is not None:
        raise UsageError("gpu is for a plan, but a recipe is given. Give one of them.")
    in_each = recipe_in_each(
        recipe, processes_of(trainer), lambda named: trainer_parts(trainer).refuse_sharding(named)
    )
    return ChosenRecipe(recipe=in_each)


def choose(trainer: Any, job: Job, gpu: str | None, fidelity: Fidelity | str) -> ChosenRecipe:
    """Return a recipe that is planned for a GPU, or the trainer's own settings without a GPU."""
    import torch

    degree, device = fidelity_of(fidelity), trainer.args.device
    own = recipe_of(trainer)
    if (processes := processes_of(trainer)) > 1:
        return _settings_of_several(own, processes, gpu)
    if gpu is None and device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
    if gpu is not None:
        with preserve_rng(device):
            return _plan_from(own, compared_job(trainer, job, several_samples(trainer, job)), gpu, degree)
    reason = "there is no GPU to plan for, and gpu= is not given"
    note = f"{reason}: the trainer keeps its own settings, '{own.recipe}'"
    return ChosenRecipe(recipe=own.recipe, user_slots=frozenset(Slot), note=note)


def _settings_of_several(own: ChosenRecipe, processes: int, gpu: str | None) -> ChosenRecipe:
    """Return the trainer's own settings as a recipe for distributed training. Raises `UsageError` if a plan
    is requested.
    """
    advice = f"snugfit plan --gpus {processes} finds a recipe that fit can be given"
    if gpu is not None:
        raise UsageError(f"fit does not plan for {processes} processes. Leave gpu out; {advice}.")
    recipe = own.recipe.with_(roster.plain(Slot.SHARDING))  # the Trainer keeps its own sharding
    note = f"{advice}. The trainer keeps its own settings, '{recipe}'"
    return ChosenRecipe(recipe=recipe, user_slots=frozenset(Slot), note=note)


def compared_job(
    trainer: Any,
    job: Job,
    batch: Mapping[str, Any] | None = None,
    *,
    pieces: int = 1,
    again: bool = False,
) -> Job:
    """Return the job with a test result: the trainer's own loss for `pieces` micro-batches equals the whole
    batch's, or not (`cut_loss.py`).
    """
    loss_of = partial(weighed_loss, trainer, counted_by(job, trainer.model))
    autocast = trainer.accelerator.autocast
    with unchanged_attributes(trainer), bare_model(trainer.model):
        return job_with_mixing(
            job,
            trainer.model,
            loss_of,
            batch,
            max_pieces=job.batch_size // pieces,
            context=autocast,
            again=again,
        )


def recipe_of(trainer: Any) -> ChosenRecipe:
    """Return the trainer's current settings as a recipe."""
    by_slot = {read.slot: read.technique for read in read_slots(arguments_of(trainer))}
    techniques = tuple(by_slot[slot] or roster.plain(slot) for slot in Slot)
    unset = frozenset(slot for slot, technique in by_slot.items() if technique is None)
    if brings_optimizer(trainer):
        unset |= {Slot.OPTIMIZER}
    default = trainer.args.optim == next(f.default for f in fields(trainer.args) if f.name == "optim")
    return ChosenRecipe(recipe=Recipe(techniques), user_slots=unset, default_optimizer=default)


def _plan_from(own: ChosenRecipe, job: Job, gpu: str, fidelity: Fidelity) -> ChosenRecipe:
    """Return the fastest recipe that fits, with some slots (choices of the recipe) fixed. Raises
    `NothingFits` with the recipe that needs the least memory.
    """
    from snugfit.planning.search.search import plan

    degrees = list(Fidelity)
    most = degrees.index(fidelity)
    less_exact = {technique.slot for technique in own.recipe if degrees.index(technique.fidelity) > most}
    default = {Slot.OPTIMIZER} if own.default_optimizer else set()
    whole = (
        {Slot.BATCHING} if mixing_of(job).reason or job.unclear_cut else set()
    )  # the user's batch stays whole if splitting it would be wrong or is unclear
    unchanged = frozenset({*UNCHANGED_SLOTS, *own.user_slots, *less_exact, *whole, *default})
    keep = {slot: own.recipe[slot] for slot in unchanged}
    best = plan(job, gpu=gpu, fidelity=fidelity, keep=keep, front_end="fit")
    shown = best.best_or_nearest.recipe
    if not best.fits:
        raise NothingFits(
            f"No recipe for this training fits a {gpu}. The nearest is '{shown}'. Use a smaller global "
            "batch, or allow more with fidelity='rounds' or 'learns'."
        )
    note = f"planned for a {gpu}: '{shown}' (it was '{own.recipe}')"
    if default:
        note += ". The optimizer stays the Trainer's default; name another with TrainingArguments(optim=...)"
    return ChosenRecipe(recipe=Recipe.parse(shown), user_slots=unchanged, note=note)


def arguments_of(trainer: Any) -> dict[str, Any]:
    """Return the trainer's arguments and its model's settings, by dotted names as in `counterpart.py`."""
    args, model = trainer.args, trainer.model
    name = next(name for name in NAMES if hasattr(args, name))
    recomputed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    parts = dict(getattr(args, f"{name}_kwargs") or {})
    new = NAMES[0]
    known = {
        f"{new}_kwargs.use_reentrant": parts.get("use_reentrant", False),
        f"{new}_kwargs.every_n_layers": parts.get("every_n_layers", 1),
        f"{new}_kwargs.offload": parts.get("offload", False),
    }
    return {
        **{field: getattr(args, field) for field in vars(args)},
        **known,
        new: bool(getattr(args, name)) or recomputed,
        "optim": getattr(args.optim, "value", args.optim),
        "optim_args.momentum": 0.0,
        "model.attn_implementation": getattr(getattr(model, "config", None), "_attn_implementation", "sdpa"),
        "lora.r": None,
        "environment.PYTORCH_ALLOC_CONF": allocator_options()[1] or None,
    }

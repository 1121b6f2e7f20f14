"""A plan for a live trainer: what it asks for today, and what may be changed of it.

What the user has chosen and the plan has no business with stays: attention, loader, allocator and adapters;
and every slot whose choice is less exact than `fidelity` (a bf16 autocast under `same`, an SGD): it is the
user's mathematics. What is left is searched: layers that are recomputed, the cut of the batch, the kernels
of the same optimizer; and under `rounds` the precision of those who train in fp32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import NothingFits
from snugfit.frontends.trainer.setup import optimizer_is_theirs
from snugfit.step.checkpointing import NAMES
from snugfit.step.wishes.model import dtype_of
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot, Technique
from snugfit.techniques.translate import read_slots

if TYPE_CHECKING:
    from snugfit.job.job import Job

THEIRS = (Slot.ADAPTERS, Slot.ATTENTION, Slot.ALLOCATOR, Slot.LOADING)
"""Slots that no plan for a live trainer changes: its model has its adapters and its attention, the process
has allocated, and whether the user's dataset bears workers is not known."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a trainer is to train under."""

    recipe: Recipe
    """As far as a recipe can say it."""

    left: frozenset[Slot]
    """Slots that stay as the user has them, whether the recipe can say it or not."""

    says: str
    """Why, in a line."""


def as_it_is(trainer: Any) -> Chosen:
    """What the trainer asks for today."""
    found = {each.slot: each.technique for each in read_slots(arguments_of(trainer))}
    techniques = tuple(found[slot] or roster.plain(slot) for slot in Slot)
    unsaid = frozenset(slot for slot, technique in found.items() if technique is None)
    if optimizer_is_theirs(trainer):
        unsaid |= {Slot.OPTIMIZER}
    return Chosen(recipe=Recipe(techniques), left=unsaid, says="")


def planned(trainer: Any, job: Job, gpu: str, fidelity: Fidelity) -> Chosen:
    """The fastest recipe that fits, with what stays. Raises `NothingFits`, with the nearest miss."""
    from snugfit.planning.search.search import plan

    start = as_it_is(trainer)
    degrees = list(Fidelity)
    less_exact = {
        each.slot for each in start.recipe if degrees.index(each.fidelity) > degrees.index(fidelity)
    }
    left = frozenset({*THEIRS, *start.left, *less_exact})
    settled: Mapping[Slot, Technique] = {slot: start.recipe[slot] for slot in left}
    found = plan(job, gpu=gpu, fidelity=fidelity, settled=settled)
    chosen = found.best_or_nearest
    if not found.fits:
        raise NothingFits(
            f"Nothing that trains this as it is asked for fits a {gpu}; the nearest is '{chosen.recipe}'."
            " Take a smaller global batch, or allow more with fidelity='rounds' or 'learns'."
        )
    says = f"planned for a {gpu}: '{chosen.recipe}' (it was '{start.recipe}')"
    return Chosen(recipe=Recipe.parse(chosen.recipe), left=left, says=says)


def arguments_of(trainer: Any) -> dict[str, Any]:
    """The trainer's arguments and its model, by the names that techniques know (`counterpart.py`)."""
    args, model = trainer.args, trainer.model
    name = next(name for name in NAMES if hasattr(args, name))
    recomputed = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
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
        "model.dtype": dtype_of(model),
        "model.attn_implementation": getattr(getattr(model, "config", None), "_attn_implementation", "sdpa"),
        "lora.r": None,
        "environment.PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF"),
    }

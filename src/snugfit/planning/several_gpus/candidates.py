"""What may be put together on so many GPUs: how the work is shared, what is recomputed, how the batch is cut.

The rest of a recipe (precision, products, optimizer's kernels) is decided once for all numbers of GPUs, by
what takes the least time (`search.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.prediction.several_gpus.communication import GPUS_PER_HOST
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import ParallelWish, Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.technique import Fidelity, Slot, Technique

KEPT = "none"
"""The value of `ParallelWish.reshard` with which nothing that was gathered is dropped."""

DECIDED_ONCE = (Slot.PRECISION, Slot.MATMUL, Slot.OPTIMIZER)
"""Slots that are filled by what takes the least time, whatever the number of GPUs."""


@dataclass(frozen=True)
class Shared:
    """How GPUs share the work, and what of the model is recomputed; the batch is not cut yet."""

    gpus: int
    recipe: Recipe

    @property
    def recomputing(self) -> Technique:
        """The technique that says which layers are computed again."""
        return self.recipe[Slot.CHECKPOINTING]

    @property
    def spreads_over_all(self) -> bool:
        """Whether each GPU holds less where there are more of them."""
        wish = self.recipe.setup().parallel
        if wish is None:
            return False
        return wish.states == "sharded" or (wish.weights == "sharded" and not wish.shards)

    def is_slower_than(self, other: Shared) -> bool:
        """Whether no step of it is shorter than the other's, which takes more memory: where both share the
        work in one way, and this recomputes, or gathers weights, where the other keeps them."""
        slots = roster.slots_of_several_gpus()
        own, rival = (one.recipe.setup().parallel for one in (self, other))
        if all(self.recipe[slot] == other.recipe[slot] for slot in slots):
            return True
        if own is None or rival is None or self.recomputing != other.recomputing:
            return False
        return replace(own, reshard=rival.reshard) == rival and rival.reshard == KEPT

    def holds_no_more_than(self, other: Shared) -> bool:
        """Whether it takes no more memory than the other wherever the batch is cut alike: where nothing else
        differs than that this computes again what the other keeps, or holds a part of the weights where the
        other holds all of them, if only for a while."""
        own, rival = (one.recipe.setup() for one in (self, other))
        slots = {*roster.slots_of_several_gpus(), Slot.CHECKPOINTING}
        return (
            _spreads_no_less(own.parallel, rival.parallel)
            and (own.checkpoint == rival.checkpoint or rival.checkpoint is None)
            and all(self.recipe[slot] == other.recipe[slot] for slot in Slot if slot not in slots)
        )

    def cut(self, pieces: Technique) -> Recipe:
        """The recipe whose global batch is cut so."""
        return self.recipe.with_(pieces)


def _spreads_no_less(own: ParallelWish | None, rival: ParallelWish | None) -> bool:
    """Whether a GPU holds no more of what is trained than in another way of sharing."""
    if own is None or rival is None or own == rival:
        return own == rival
    if own.weights != "sharded" or own.shards or own.reshard == KEPT or own.on_host < rival.on_host:
        return False
    alike = replace(
        rival,
        weights=own.weights,
        states=own.states,
        shards=own.shards,
        reshard=own.reshard,
        on_host=own.on_host,
        dtype=own.dtype,
        bucket_views=own.bucket_views,
    )
    return alike == own


def ways(job: Job, base: Recipe, gpus: int, fixed: Kept) -> Iterator[Shared]:
    """Every way to share the work of this job among so many GPUs, with what it recomputes; from what keeps
    most to what recomputes most."""
    for recomputing in recomputings(job, fixed):
        for sharing in sharings(job, gpus, fixed):
            recipe = base.with_(recomputing)
            for technique in sharing:
                recipe = recipe.with_(technique)
            if is_valid(job, recipe, gpus):
                yield Shared(gpus, recipe)


def sharings(job: Job, gpus: int, fixed: Kept) -> Iterator[tuple[Technique, ...]]:
    """Techniques of several GPUs, one of each of their slots, or of one where there is one. Groups that
    copies of the weights are spread over are those of whole hosts, where there are several."""
    slots = roster.slots_of_several_gpus()
    slot_is_open = Slot.SHARDING not in fixed.slots
    for sharing in itertools.product(*([*_of_slot(job, slot, fixed)] for slot in slots)):
        setup = Setup()
        for technique in sharing:
            setup = technique.install(setup)
        wish = setup.parallel
        if (wish is None) is not (gpus == 1) or setup.sharding is not None:
            continue
        if wish and wish.shards and slot_is_open and not GPUS_PER_HOST <= wish.shards < gpus:
            continue
        yield sharing


def recomputings(job: Job, fixed: Kept) -> list[Technique]:
    """What keeps everything, then each technique that has one setting only, the one that keeps more first."""
    settings = [one for one in _of_slot(job, Slot.CHECKPOINTING, fixed) if one.plain or _is_alone(one, job)]

    def sort_key(one: Technique) -> tuple[bool, bool]:
        wish = one.install(Setup()).checkpoint
        return wish is not None, wish is not None and not wish.keep

    return sorted(settings, key=sort_key)


def fillings(job: Job, slot: Slot, fixed: Kept, fidelity: Fidelity) -> list[Technique]:
    """What may stand in a slot that is decided once, at this fidelity."""
    degrees = list(Fidelity)
    plain = roster.plain(slot)
    return [
        one
        for one in _of_slot(job, slot, fixed)
        if slot in fixed.slots
        or (degrees.index(one.fidelity) <= degrees.index(fidelity) and one.family == plain.family)
    ]


def cuts(job: Job, shared: Shared, fixed: Kept) -> list[Technique]:
    """Every way to cut a GPU's part of the batch, from the whole to single samples."""
    part = job_of_rank(job, on_gpus(shared.recipe.setup(), shared.gpus))
    known: Mapping[Slot, tuple[Technique, ...]] = fixed.slots
    if Slot.BATCHING in known:
        return list(known[Slot.BATCHING])
    pieces = [
        one for one in _of_slot(part, Slot.BATCHING, fixed) if is_valid(job, shared.cut(one), shared.gpus)
    ]
    return sorted(pieces, key=lambda one: one.install(Setup()).micro_batches)


def is_valid(job: Job, recipe: Recipe, gpus: int) -> bool:
    """Whether this recipe trains the job on so many GPUs."""
    try:
        setup = on_gpus(recipe.setup(), gpus)
        recipe.check(job_of_rank(job, setup))
    except SnugfitError:
        return False
    return True


def _of_slot(job: Job, slot: Slot, fixed: Kept) -> Iterator[Technique]:
    if slot in fixed.slots:
        yield from fixed.slots[slot]
        return
    for kind in roster.techniques():
        if kind.slot is slot and not kind.missing_package() and not kind.planning_objection(job):
            yield from kind.settings(job)


def _is_alone(technique: Technique, job: Job) -> bool:
    wish = technique.install(Setup()).checkpoint
    return (
        wish is not None and len(list(type(technique).settings(job))) == 1 and not type(technique).grades(job)
    )

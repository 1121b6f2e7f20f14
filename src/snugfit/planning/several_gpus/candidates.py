"""What may be put together on so many GPUs: how the work is shared, what is recomputed, how the batch is cut.

The rest of a recipe (precision, products, optimizer's kernels) is decided once for all numbers of GPUs, by
what takes the least time (`search.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.several_gpus.sharings import Sharing, of_slot, sharings, stopgaps
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish, ParallelWish, Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.technique import Fidelity, Slot, Technique

KEPT = "none"
"""The value of `ParallelWish.reshard` with which nothing that was gathered is dropped."""

AXES = ("tensor", "context", "stages")
"""The numbers of `ParallelWish` that say how many GPUs work on the same samples."""

DECIDED_ONCE = (Slot.PRECISION, Slot.MATMUL, Slot.OPTIMIZER)
"""Slots that are filled by what takes the least time, whatever the number of GPUs."""


@dataclass(frozen=True)
class Shared:
    """How GPUs share the work, and what of the model is recomputed; the batch is not cut yet."""

    gpus: int
    recipe: Recipe

    @functools.cached_property
    def key(self) -> str:
        """The recipe's text, the same on any number of GPUs."""
        return str(self.recipe)

    @functools.cached_property
    def setup(self) -> Setup:
        """What it asks of a training loop, on so many GPUs."""
        return on_gpus(self.recipe.setup(), self.gpus)

    @functools.cached_property
    def wish(self) -> ParallelWish | None:
        """What it asks of several processes, however many they are; None on one GPU."""
        wish = self.setup.parallel
        return wish and replace(wish, ranks=0)

    @functools.cached_property
    def of_each(self) -> str:
        """What each GPU does for itself, however the batch is shared: the recipe without what shares it."""
        return str(self.recipe.with_(roster.plain(Slot.SHARDING)))

    @functools.cached_property
    def by_itself(self) -> str:
        """What a GPU does that has its samples to itself: the recipe without what several GPUs share."""
        recipe = self.recipe
        for slot in roster.slots_of_several_gpus():
            recipe = recipe.with_(roster.plain(slot))
        return str(recipe)

    @property
    def parts(self) -> int:
        """How many GPUs work on the same part of the batch."""
        return self.wish.ranks_of_one_part if self.wish else 1

    @property
    def stages(self) -> int:
        """Into how many stages the layers are cut."""
        return self.wish.stages if self.wish else 1

    @property
    def recomputing(self) -> Technique:
        """The technique that says which layers are computed again."""
        return self.recipe[Slot.CHECKPOINTING]

    @functools.cached_property
    def mesh(self) -> str:
        """The techniques by which groups of GPUs work on the same samples; empty where each has its own."""
        slots = [slot for slot in roster.slots_of_several_gpus() if slot is not Slot.SHARDING]
        return " + ".join(str(self.recipe[slot]) for slot in slots if not self.recipe[slot].plain)

    @property
    def spreads_over_all(self) -> bool:
        """Whether each GPU holds less where there are more of them."""
        wish = self.wish
        if wish is None:
            return False
        return wish.states == "sharded" or (wish.weights == "sharded" and not wish.shards)

    def is_slower_than(self, other: Shared) -> bool:
        """Whether no step of it is shorter than the other's, which takes more memory: where both share the
        work in one way, and this recomputes, or gathers weights, where the other keeps them."""
        slots = roster.slots_of_several_gpus()
        own, rival = self.wish, other.wish
        if all(self.recipe[slot] == other.recipe[slot] for slot in slots):
            return True
        if own is None or rival is None or self.recomputing != other.recomputing:
            return False
        return replace(own, reshard=rival.reshard) == rival and rival.reshard == KEPT

    def holds_no_more_than(self, other: Shared) -> bool:
        """Whether it takes no more memory than the other wherever the batch is cut alike: where nothing else
        differs than that this computes again what the other keeps, or holds a part of the weights where the
        other holds all of them, if only for a while, or has more GPUs work on the same samples."""
        own, rival = self.setup.checkpoint, other.setup.checkpoint
        return (
            _keeps_no_more(own, rival)
            and _spreads_no_less(self.wish, other.wish)
            and self._differs_only_in(other, Slot.CHECKPOINTING)
        )

    def has_groups_of(self, other: Shared) -> bool:
        """Whether each of its groups of GPUs is one of the other's groups, or several, which share the same;
        how the batch is shared may differ, and nothing else."""
        if self.by_itself != other.by_itself:
            return False
        own, rival = self.wish or ParallelWish(), other.wish or ParallelWish()
        return _cuts_as(own, rival)

    def is_wider_than(self, other: Shared) -> bool:
        """Whether larger groups of GPUs work on the same samples, which else share the work as the other's
        do."""
        own, rival = self.wish, other.wish
        if own is None or rival is None or own.weights != rival.weights or self.parts <= other.parts:
            return False
        if not _cuts_as(own, rival):
            return False
        alike = replace(
            _in_groups_of(own, rival),
            schedule=rival.schedule,
            shards=rival.shards,
            bucket_views=rival.bucket_views,
        )
        return alike == rival and bool(own.shards) is bool(rival.shards) and self._differs_only_in(other)

    def _differs_only_in(self, other: Shared, *more: Slot) -> bool:
        """Whether nothing else differs than techniques of several GPUs, and those of these slots."""
        slots = {*roster.slots_of_several_gpus(), *more}
        return all(self.recipe[slot] == other.recipe[slot] for slot in Slot if slot not in slots)

    def cut(self, pieces: Technique) -> Recipe:
        """The recipe whose global batch is cut so."""
        return self.recipe.with_(pieces)


def _keeps_no_more(own: CheckpointWish | None, rival: CheckpointWish | None) -> bool:
    """Whether no less is computed again: all of a layer where the other keeps some of it."""
    if own is None or rival is None:
        return rival is None
    return own == rival or (not own.keep and own == replace(rival, keep=own.keep))


def _cuts_as(own: ParallelWish, rival: ParallelWish) -> bool:
    """Whether each group of GPUs is one of the rival's, or several of them, that cut the same; where both
    share matrices, experts are spread in both or in neither."""
    if own.tensor > 1 < rival.tensor and (own.experts > 1) is not (rival.experts > 1):
        return False
    return not any(getattr(own, axis) % getattr(rival, axis) for axis in AXES)


def _in_groups_of(own: ParallelWish, rival: ParallelWish) -> ParallelWish:
    """The same in groups that are as large as the rival's."""
    return replace(own, experts=rival.experts, **{axis: getattr(rival, axis) for axis in AXES})


def _spreads_no_less(own: ParallelWish | None, rival: ParallelWish | None) -> bool:
    """Whether a GPU holds no more of what is trained, and of the same samples, than in another way of
    sharing."""
    if own is None or rival is None or own == rival:
        return own == rival
    if not _cuts_as(own, rival):
        return False
    if own.stages > rival.stages == 1 and own.weights == "sharded":
        return False  # while its micro-batches run a stage keeps all that it has gathered
    own = replace(_in_groups_of(own, rival), schedule=rival.schedule)
    if own == rival:
        return True
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


def ways(job: Job, base: Recipe, gpus: int, fixed: Kept, axes: int = 0) -> Iterator[Shared]:
    """Every way to share the work of this job among so many GPUs, with so many axes beside that of the batch,
    and with what it recomputes; from what keeps most to what recomputes most."""
    shared_by = list(sharings(job, gpus, fixed, axes))
    usual = list(of_slot(job, Slot.SHARDING, fixed))
    rest = [one for one in stopgaps(usual) if one not in usual]
    for recomputing in recomputings(job, fixed):
        taken: set[tuple[type[Technique] | Technique, ...]] = set()
        for sharing in shared_by:
            if any(one in rest for one in sharing) and _kinds(sharing) in taken:
                continue
            recipe = base.with_(recomputing)
            for technique in sharing:
                recipe = recipe.with_(technique)
            shared = Shared(gpus, recipe)
            if _is_possible(job, shared, fixed):
                taken.add(_kinds(sharing))
                yield shared


def _kinds(sharing: Sharing) -> tuple[type[Technique] | Technique, ...]:
    """What shares the batch, whatever its settings, and the mesh."""
    return tuple(type(one) if one.slot is Slot.SHARDING else one for one in sharing)


def _is_possible(job: Job, shared: Shared, fixed: Kept) -> bool:
    """Whether it trains the job; where layers are cut into stages, with as many micro-batches as may be."""
    if shared.stages == 1:
        return is_valid(job, shared.recipe, shared.gpus)
    return any(is_valid(job, shared.cut(one), shared.gpus) for one in _pieces(job, shared, fixed)[-1:])


def recomputings(job: Job, fixed: Kept) -> list[Technique]:
    """What keeps everything, then each technique that has one setting only, the one that keeps more first."""
    settings = [one for one in of_slot(job, Slot.CHECKPOINTING, fixed) if one.plain or _is_alone(one, job)]

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
        for one in of_slot(job, slot, fixed)
        if slot in fixed.slots
        or (degrees.index(one.fidelity) <= degrees.index(fidelity) and one.family == plain.family)
    ]


def cuts(job: Job, shared: Shared, fixed: Kept) -> list[Technique]:
    """Every way to cut a group's part of the batch, from the whole to single samples."""
    known: Mapping[Slot, tuple[Technique, ...]] = fixed.slots
    pieces = _pieces(job, shared, fixed)
    if Slot.BATCHING in known:
        return pieces
    ends = [pieces[0], pieces[-1]]
    if all(is_valid(job, shared.cut(one), shared.gpus) for one in ends):
        return pieces  # with what lies between these: few micro-batches are refused, or many
    return [one for one in pieces if is_valid(job, shared.cut(one), shared.gpus)]


def _pieces(job: Job, shared: Shared, fixed: Kept) -> list[Technique]:
    part = job_of_rank(job, shared.setup)
    pieces = of_slot(part, Slot.BATCHING, fixed)
    return sorted(pieces, key=lambda one: one.install(Setup()).micro_batches)


def is_valid(job: Job, recipe: Recipe, gpus: int) -> bool:
    """Whether this recipe trains the job on so many GPUs."""
    try:
        part = job_of_rank(job, on_gpus(recipe.setup(), gpus))
    except SnugfitError:
        return False
    return not any(True for technique in recipe for _ in technique.objections(part, recipe))


def _is_alone(technique: Technique, job: Job) -> bool:
    wish = technique.install(Setup()).checkpoint
    return (
        wish is not None and len(list(type(technique).settings(job))) == 1 and not type(technique).grades(job)
    )

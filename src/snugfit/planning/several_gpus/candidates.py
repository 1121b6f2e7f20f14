"""Candidate recipes for a number of GPUs: parallelism, recomputation, and the division of the batch.

The rest of a recipe (precision, products, optimizer's kernels) is the same for all numbers of GPUs. It takes
the least time (`kind.py`). A feature adds the ways to spread a model over several GPUs (`Feature.spreading`).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.registry import hooks
from snugfit.techniques.setup import CheckpointWish, Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.technique import Fidelity, Slot, Technique

DECIDED_ONCE = (Slot.PRECISION, Slot.MATMUL, Slot.OPTIMIZER)
"""Slots that are filled once for all numbers of GPUs, with the fastest technique."""


@dataclass(frozen=True)
class Shared:
    """A way to share the work among GPUs, with its recomputation, before the batch is divided. The base class
    is for one GPU."""

    gpus: int
    recipe: Recipe

    parts: ClassVar[int] = 1
    """Number of GPUs that work on the same samples."""
    stages: ClassVar[int] = 1
    """Number of pipeline stages."""
    mesh: ClassVar[str] = ""
    """Text of the techniques that make groups of GPUs work on the same samples; empty without groups."""
    spreads_over_all: ClassVar[bool] = False
    """True if each GPU holds less on a larger number of them."""

    @functools.cached_property
    def key(self) -> str:
        """Text of the recipe, the same on any number of GPUs."""
        return str(self.recipe)

    @functools.cached_property
    def setup(self) -> Setup:
        """Return the Setup of the recipe on so many GPUs."""
        return on_gpus(self.recipe.setup(), self.gpus)

    @functools.cached_property
    def of_each(self) -> str:
        """Text of the recipe without its data parallelism: the work of each GPU alone."""
        return str(self.recipe.with_(roster.plain(Slot.SHARDING)))

    @functools.cached_property
    def by_itself(self) -> str:
        """Text of the recipe without any parallelism: the work of a GPU that has its samples to itself."""
        recipe = self.recipe
        for slot in roster.slots_of_several_gpus():
            recipe = recipe.with_(roster.plain(slot))
        return str(recipe)

    @property
    def recomputing(self) -> Technique:
        """The technique that selects the recomputed layers."""
        return self.recipe[Slot.CHECKPOINTING]

    def is_slower_than(self, other: Shared) -> bool:
        """Return whether no step of this way is faster than the other way's, which takes more memory.

        Both share the work in one way, and this one recomputes, or gathers weights that the other keeps.
        """
        if all(self.recipe[slot] == other.recipe[slot] for slot in roster.slots_of_several_gpus()):
            return True
        return self.recomputing == other.recomputing and self.gathers_what_is_kept(other)

    def holds_no_more_than(self, other: Shared) -> bool:
        """Return whether this way takes no more memory than the other for every equal cut of the batch.

        The ways may differ in three properties only. This one recomputes activations that the other keeps.
        It shards weights that the other holds whole, at least temporarily. Or more of its GPUs work on the
        same samples.
        """
        own, rival = self.setup.checkpoint, other.setup.checkpoint
        return (
            _keeps_no_more(own, rival)
            and self.spreads_no_less_than(other)
            and self.differs_only_in(other, Slot.CHECKPOINTING)
        )

    def has_groups_of(self, other: Shared) -> bool:
        """Return whether each group of GPUs of this way consists of one or several groups of the other way
        with the same sharing.

        Apart from that, only the sharing of the batch may differ.
        """
        return self.by_itself == other.by_itself and self.cuts_as(other)

    def differs_only_in(self, other: Shared, *more: Slot) -> bool:
        """Return whether the ways differ only in techniques of several GPUs, and in these slots."""
        slots = {*roster.slots_of_several_gpus(), *more}
        return all(self.recipe[slot] == other.recipe[slot] for slot in Slot if slot not in slots)

    def cut(self, pieces: Technique) -> Recipe:
        """Return the recipe with this technique for micro-batches."""
        return self.recipe.with_(pieces)

    # ---- several GPUs --------------------------------------------------------------------------------------

    def gathers_what_is_kept(self, other: Shared) -> bool:
        """Return whether the other way is this one, except that it keeps weights that this one gathers."""
        return False

    def spreads_no_less_than(self, other: Shared) -> bool:
        """Return whether a GPU holds no more weights and states, and no more of the same samples, than in the
        other way."""
        return True

    def cuts_as(self, other: Shared) -> bool:
        """Return whether each group of GPUs consists of one or several of the other way's groups, with the
        same number of micro-batches."""
        return True

    def is_wider_than(self, other: Shared) -> bool:
        """Return whether larger groups of GPUs work on the same samples, with otherwise equal sharing."""
        return False

    def shares_sequences_with(self, other: Shared, times: float) -> bool:
        """Return whether `times` as many GPUs share each sequence as in the other way."""
        return False

    def groups(self) -> Iterator[str]:
        """Yield sentences on the work of each kind of group, such as those of tensor parallelism."""
        yield from ()


class Sharing(NamedTuple):
    """Techniques of several GPUs by which a number of them share a job."""

    techniques: tuple[Technique, ...]
    kinds: Hashable
    """Key of the techniques without their settings."""
    is_stopgap: bool
    """True if this setting is tried only if no other setting of the same techniques is possible."""


class Spreading:
    """The ways to spread a model over GPUs. The base class, without a feature for several GPUs, puts all of
    it on one."""

    most_axes = 0
    """Largest number of axes of the device mesh in addition to the batch's."""

    def sharings(self, job: Job, gpus: int, fixed: Kept, axes: int) -> Iterator[Sharing]:
        """Yield techniques by which so many GPUs can share the job's batch, with `axes` further axes."""
        if gpus == 1 and not axes:
            yield Sharing((), (), is_stopgap=False)

    def way(self, gpus: int, recipe: Recipe) -> Shared:
        """Return the `Shared` object for a recipe on so many GPUs."""
        return Shared(gpus, recipe)


@functools.cache
def spreading() -> Spreading:
    """Return the `Spreading` of the feature for several GPUs; the base class without one."""
    return next((spreading() for spreading in hooks("spreading")), Spreading())


def _keeps_no_more(own: CheckpointWish | None, rival: CheckpointWish | None) -> bool:
    """Return whether `own` recomputes no less than `rival`: all of a layer if the other keeps some of it."""
    if own is None or rival is None:
        return rival is None
    return own == rival or (not own.keep and own == replace(rival, keep=own.keep))


def ways(job: Job, base: Recipe, gpus: int, fixed: Kept, axes: int = 0) -> Iterator[Shared]:
    """Yield every way to share this job's work among so many GPUs, with `axes` axes in addition to the
    batch's.

    Each is combined with every recomputation, from the one that keeps most on.
    """
    sharings = list(spreading().sharings(job, gpus, fixed, axes))
    for recomputing in recomputings(job, fixed):
        taken: set[Hashable] = set()
        for sharing in sharings:
            if sharing.is_stopgap and sharing.kinds in taken:
                continue
            recipe = base.with_(recomputing)
            for technique in sharing.techniques:
                recipe = recipe.with_(technique)
            shared = spreading().way(gpus, recipe)
            if _is_possible(job, shared, fixed):
                taken.add(sharing.kinds)
                yield shared


def of_slot(job: Job, slot: Slot, fixed: Kept) -> Iterator[Technique]:
    """Yield the techniques for a slot: the fixed ones, or all settings that plans may choose."""
    if slot in fixed.slots:
        yield from fixed.slots[slot]
        return
    for kind in roster.techniques():
        if kind.slot is slot and not kind.missing_package() and not kind.planning_objection(job):
            yield from kind.settings(job)


def _is_possible(job: Job, shared: Shared, fixed: Kept) -> bool:
    """Return whether a way trains the job; with pipeline stages, for the largest number of micro-batches."""
    if shared.stages == 1:
        return is_valid(job, shared.recipe, shared.gpus)
    return any(is_valid(job, shared.cut(one), shared.gpus) for one in _pieces(job, shared, fixed)[-1:])


def recomputings(job: Job, fixed: Kept) -> list[Technique]:
    """Return the plain technique and each technique with a single setting that selects recomputed layers,
    those that keep more first."""
    settings = [one for one in of_slot(job, Slot.CHECKPOINTING, fixed) if one.plain or _is_alone(one, job)]

    def sort_key(one: Technique) -> tuple[bool, bool]:
        wish = one.install(Setup()).checkpoint
        return wish is not None, wish is not None and not wish.keep

    return sorted(settings, key=sort_key)


def fillings(job: Job, slot: Slot, fixed: Kept, fidelity: Fidelity) -> list[Technique]:
    """Return the techniques for a slot of `DECIDED_ONCE` with at least this fidelity."""
    degrees = list(Fidelity)
    plain = roster.plain(slot)
    return [
        one
        for one in of_slot(job, slot, fixed)
        if slot in fixed.slots
        or (degrees.index(one.fidelity) <= degrees.index(fidelity) and one.family == plain.family)
    ]


def cuts(job: Job, shared: Shared, fixed: Kept) -> list[Technique]:
    """Return the techniques that divide a group's part of the batch, from the whole to single samples."""
    known: Mapping[Slot, tuple[Technique, ...]] = fixed.slots
    pieces = _pieces(job, shared, fixed)
    if Slot.BATCHING in known:
        return pieces
    ends = [pieces[0], pieces[-1]]
    if all(is_valid(job, shared.cut(one), shared.gpus) for one in ends):
        return pieces  # all cuts between valid ends are valid: techniques refuse few micro-batches, or many
    return [one for one in pieces if is_valid(job, shared.cut(one), shared.gpus)]


def _pieces(job: Job, shared: Shared, fixed: Kept) -> list[Technique]:
    part = job_of_rank(job, shared.setup)
    pieces = of_slot(part, Slot.BATCHING, fixed)
    return sorted(pieces, key=lambda one: one.install(Setup()).micro_batches)


def is_valid(job: Job, recipe: Recipe, gpus: int) -> bool:
    """Return whether this recipe trains the job on so many GPUs."""
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

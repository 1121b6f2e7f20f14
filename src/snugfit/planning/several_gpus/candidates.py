"""Combinations for a number of GPUs: the sharing of the work, recomputation, and the cuts of the batch.

The rest of a recipe (precision, products, optimizer's kernels) is the same for all numbers of GPUs. It
takes the least time (`search.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.several_gpus.sharings import Sharing, of_slot, sharings, stopgaps
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish, Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.technique import Fidelity, Slot, Technique
from snugfit.techniques.wish import SeveralProcesses, processes_of

DECIDED_ONCE = (Slot.PRECISION, Slot.MATMUL, Slot.OPTIMIZER)
"""Slots that are filled once with the fastest technique, for all numbers of GPUs."""


@dataclass(frozen=True)
class Shared:
    """A way to share the work, with its recomputation, before the batch is cut."""

    gpus: int
    recipe: Recipe

    @functools.cached_property
    def key(self) -> str:
        """Text of the recipe, the same on any number of GPUs."""
        return str(self.recipe)

    @functools.cached_property
    def setup(self) -> Setup:
        """Setup of the recipe on so many GPUs."""
        return on_gpus(self.recipe.setup(), self.gpus)

    @functools.cached_property
    def processes(self) -> SeveralProcesses:
        """The processes regardless of their number; the plain class on one GPU."""
        return processes_of(self.recipe.setup()) or SeveralProcesses()

    @functools.cached_property
    def of_each(self) -> str:
        """Text of the recipe without its sharding of the batch: the work of each GPU alone."""
        return str(self.recipe.with_(roster.plain(Slot.SHARDING)))

    @functools.cached_property
    def by_itself(self) -> str:
        """Text of the recipe without any sharing: the work of a GPU that has its samples to itself."""
        recipe = self.recipe
        for slot in roster.slots_of_several_gpus():
            recipe = recipe.with_(roster.plain(slot))
        return str(recipe)

    @property
    def parts(self) -> int:
        """Number of GPUs that work on the same part of the batch."""
        return math.prod(self.processes.axes.values())

    @property
    def stages(self) -> int:
        """Number of stages into which the layers are cut."""
        return self.processes.axes.get("stages", 1)

    @property
    def recomputing(self) -> Technique:
        """The technique that selects the recomputed layers."""
        return self.recipe[Slot.CHECKPOINTING]

    @functools.cached_property
    def mesh(self) -> str:
        """Text of the techniques that make groups of GPUs work on the same samples; empty without groups."""
        slots = [slot for slot in roster.slots_of_several_gpus() if slot is not Slot.SHARDING]
        return " + ".join(str(self.recipe[slot]) for slot in slots if not self.recipe[slot].plain)

    @property
    def spreads_over_all(self) -> bool:
        """True if each GPU holds less on a larger number of them."""
        return self.processes.spreads_over_all

    def is_slower_than(self, other: Shared) -> bool:
        """Return whether no step of this way is faster than the other's, which takes more memory.

        Both share the work in one way, and this one recomputes, or gathers weights that the other keeps.
        """
        slots = roster.slots_of_several_gpus()
        if all(self.recipe[slot] == other.recipe[slot] for slot in slots):
            return True
        return self.recomputing == other.recomputing and self.processes.is_slower_than(other.processes)

    def holds_no_more_than(self, other: Shared) -> bool:
        """Return whether this way takes no more memory than the other for every equal cut of the batch.

        The ways may differ in three properties only. This one recomputes activations that the other keeps.
        It shards weights that the other holds whole, at least temporarily. Or more of its GPUs work on the
        same samples.
        """
        own, rival = self.setup.checkpoint, other.setup.checkpoint
        return (
            _keeps_no_more(own, rival)
            and self.processes.holds_no_more_than(other.processes)
            and self._differs_only_in(other, Slot.CHECKPOINTING)
        )

    def has_groups_of(self, other: Shared) -> bool:
        """Return whether each of its groups of GPUs consists of one or several groups of the other with the
        same sharing.

        Apart from that, only the sharing of the batch may differ.
        """
        if self.by_itself != other.by_itself:
            return False
        return self.processes.has_groups_of(other.processes)

    def is_wider_than(self, other: Shared) -> bool:
        """Return whether larger groups of GPUs work on the same samples, with otherwise equal sharing."""
        if self.parts <= other.parts:
            return False
        return self.processes.is_wider_than(other.processes) and self._differs_only_in(other)

    def _differs_only_in(self, other: Shared, *more: Slot) -> bool:
        """Return whether the ways differ only in techniques of several GPUs, and in these slots."""
        slots = {*roster.slots_of_several_gpus(), *more}
        return all(self.recipe[slot] == other.recipe[slot] for slot in Slot if slot not in slots)

    def cut(self, pieces: Technique) -> Recipe:
        """Return the recipe with this cut of the global batch."""
        return self.recipe.with_(pieces)


def _keeps_no_more(own: CheckpointWish | None, rival: CheckpointWish | None) -> bool:
    """Return whether no less is recomputed: all of a layer if the other keeps some of it."""
    if own is None or rival is None:
        return rival is None
    return own == rival or (not own.keep and own == replace(rival, keep=own.keep))


def ways(job: Job, base: Recipe, gpus: int, fixed: Kept, axes: int = 0) -> Iterator[Shared]:
    """Yield every way to share this job's work among so many GPUs, with `axes` axes in addition to the
    batch's.

    Each is combined with every recomputation, from the one that keeps most on.
    """
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
    """Return the classes that share the batch, regardless of their settings, and the techniques of the
    mesh."""
    return tuple(type(one) if one.slot is Slot.SHARDING else one for one in sharing)


def _is_possible(job: Job, shared: Shared, fixed: Kept) -> bool:
    """Return whether it trains the job; with stages, for the largest number of micro-batches."""
    if shared.stages == 1:
        return is_valid(job, shared.recipe, shared.gpus)
    return any(is_valid(job, shared.cut(one), shared.gpus) for one in _pieces(job, shared, fixed)[-1:])


def recomputings(job: Job, fixed: Kept) -> list[Technique]:
    """Return plain and each technique with a single setting, those that keep more first."""
    settings = [one for one in of_slot(job, Slot.CHECKPOINTING, fixed) if one.plain or _is_alone(one, job)]

    def sort_key(one: Technique) -> tuple[bool, bool]:
        wish = one.install(Setup()).checkpoint
        return wish is not None, wish is not None and not wish.keep

    return sorted(settings, key=sort_key)


def fillings(job: Job, slot: Slot, fixed: Kept, fidelity: Fidelity) -> list[Technique]:
    """Return the techniques for a slot of `DECIDED_ONCE`, at this fidelity."""
    degrees = list(Fidelity)
    plain = roster.plain(slot)
    return [
        one
        for one in of_slot(job, slot, fixed)
        if slot in fixed.slots
        or (degrees.index(one.fidelity) <= degrees.index(fidelity) and one.family == plain.family)
    ]


def cuts(job: Job, shared: Shared, fixed: Kept) -> list[Technique]:
    """Return every way to cut a group's part of the batch, from the whole to single samples."""
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

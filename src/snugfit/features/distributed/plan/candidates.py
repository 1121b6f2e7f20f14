"""Candidate recipes for a number of GPUs: combinations of parallelism, recomputation and numbers of
micro-batches.

The rest of a recipe (precision, products, optimizer's kernels) is the same for all numbers of GPUs. It is the
fastest one (`kind.py`).

Data parallelism alone is always tried. Along the other axes of a mesh, groups of GPUs work on the same
samples. They share matrices, and with these the experts if there are some, or sequences, or they form stages.
The techniques propose the sizes of such groups, at most the GPUs of a host.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields

from snugfit.errors import SnugfitError
from snugfit.features.distributed.fields import ParallelWish
from snugfit.features.distributed.plan.shared import Shared
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.search import mixture
from snugfit.prediction.exchanges import GPUS_PER_HOST
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.technique import Fidelity, Slot, Technique
from snugfit.techniques.wish import processes_of

DECIDED_ONCE = (Slot.PRECISION, Slot.MATMUL, Slot.OPTIMIZER)
"""Slots (choices of a recipe, such as the optimizer) whose technique is chosen once, for all numbers of GPUs.
It is the fastest.
"""

MOST_AXES = 2
"""Greatest number of mesh axes in addition to the data axis. No three of the existing axes can be combined.
"""


def sharings(job: Job, gpus: int, fixed: Kept, axes: int = 0) -> Iterator[tuple[Technique, ...]]:
    """Yield combinations of parallelism techniques (`fsdp`, `tensor(2)`, ...) that can divide the job's batch
    over `gpus` GPUs.

    Each has `axes` mesh axes in addition to data parallelism, not counting techniques that the user fixed. If
    there are several hosts, groups over which copies of the weights are sharded are whole hosts.
    """
    along = axis_settings(job)
    free = [slot for slot, settings in along.items() if settings and slot not in fixed.slots]
    for chosen in itertools.combinations(free, axes):
        choices = [
            along[slot] if slot in chosen else _choices(job, slot, fixed, along, mesh=bool(axes))
            for slot in roster.slots_of_several_gpus()
        ]
        for sharing in itertools.product(*choices):
            if _shares_evenly(job, gpus, fixed, sharing):
                yield sharing


def axis_settings(job: Job) -> dict[Slot, list[Technique]]:
    """Return tensor, context and pipeline parallelism with each of their group sizes, by slot (such as
    `tensor_parallel`). These are the axes along which GPUs share the same samples.

    Reasons to exclude a technique from plans (`planning_objection`) are ignored, since they concern plans
    without this axis.
    """
    slots: dict[Slot, list[Technique]] = {}
    for kind in roster.techniques():
        if not kind.needs_several_gpus or kind.missing_package():
            continue
        for one in kind.settings(job):
            if (processes := processes_of(one.alone)) is not None and processes.axes:
                slots.setdefault(kind.slot, []).append(one)
    return slots


def _choices(
    job: Job, slot: Slot, fixed: Kept, along: dict[Slot, list[Technique]], *, mesh: bool
) -> Sequence[Technique]:
    # On an axis without a chosen technique, each group is one GPU.
    if slot in along and slot not in fixed.slots:
        return [roster.plain(slot)]
    usual = list(of_slot(job, slot, fixed))
    is_mesh = mesh or any(one in fixed.slots for one in along)
    if slot in fixed.slots or not is_mesh:
        return usual
    return [*usual, *(one for one in stopgaps(usual) if one not in usual)]


def stopgaps(usual: Sequence[Technique]) -> list[Technique]:
    """Return the same parallelism techniques with default settings, for meshes that do not support the usual
    settings of plans.
    """
    kinds = dict.fromkeys(map(type, usual))
    return [kind() for kind in kinds if all(one.default is not MISSING for one in fields(kind))]


def _shares_evenly(job: Job, gpus: int, fixed: Kept, sharing: Sequence[Technique]) -> bool:
    """Return True if this number of GPUs can be divided into whole groups, and the batch evenly among these.

    If experts are distributed, all GPUs of a group must share them.
    """
    setup = Setup()
    for technique in sharing:
        setup = technique.install(setup)
    processes = processes_of(setup)
    if processes is None:
        return gpus == 1
    # Groups of GPUs that the user chose need not fill whole hosts.
    whole_hosts = None if Slot.SHARDING in fixed.slots else GPUS_PER_HOST
    if gpus == 1 or not isinstance(processes, ParallelWish):
        return False
    return processes.shares_evenly(gpus, job.batch_size, whole_hosts)


def ways(job: Job, base: Recipe, gpus: int, fixed: Kept, axes: int = 0) -> Iterator[Shared]:
    """Yield every layout of this job's step over `gpus` GPUs: parallelism techniques with a recomputation
    technique. Its mesh has `axes` axes in addition to data parallelism. Layouts that recompute least come
    first.
    """
    usual = list(of_slot(job, Slot.SHARDING, fixed))
    # A mesh may refuse the settings that plans choose. The plain settings are then used.
    rest = [one for one in stopgaps(usual) if one not in usual]
    every = list(sharings(job, gpus, fixed, axes))
    for recomputing in recomputings(job, fixed):
        taken: set[Hashable] = set()
        for techniques in every:
            kinds = tuple(type(one) if one.slot is Slot.SHARDING else one for one in techniques)
            if kinds in taken and any(one in rest for one in techniques):
                continue
            recipe = base.with_(recomputing)
            for technique in techniques:
                recipe = recipe.with_(technique)
            shared = Shared(gpus, recipe)
            if _is_possible(job, shared, fixed):
                taken.add(kinds)
                yield shared


def of_slot(job: Job, slot: Slot, fixed: Kept) -> Iterator[Technique]:
    """Yield the candidate techniques for a slot (such as precision): those that the user fixed, or all that a
    plan may choose.
    """
    if slot in fixed.slots:
        yield from fixed.slots[slot]
        return
    for kind in roster.techniques():
        if kind.slot is slot and not kind.missing_package() and not kind.planning_objection(job):
            yield from kind.settings(job)


def _is_possible(job: Job, shared: Shared, fixed: Kept) -> bool:
    """Return True if a parallelism layout can train the job. With pipeline stages, check it with the most
    micro-batches.
    """
    if shared.stages == 1:
        return is_valid(job, shared.recipe, shared.gpus)
    return any(is_valid(job, shared.cut(one), shared.gpus) for one in _pieces(job, shared, fixed)[-1:])


def recomputings(job: Job, fixed: Kept) -> list[Technique]:
    """Return the checkpointing techniques to try, from none to the one that recomputes most."""
    settings = [one for one in of_slot(job, Slot.CHECKPOINTING, fixed) if one.plain or _is_alone(one, job)]

    def sort_key(one: Technique) -> tuple[bool, bool]:
        wish = one.alone.checkpoint
        return wish is not None, wish is not None and not wish.keep

    return sorted(settings, key=sort_key)


def fillings(job: Job, slot: Slot, fixed: Kept, fidelity: Fidelity) -> list[Technique]:
    """Return the candidate techniques for precision, matrix products or optimizer that change the results no
    more than `fidelity` allows.
    """
    degrees = list(Fidelity)
    plain = roster.plain(slot)
    return [
        one
        for one in of_slot(job, slot, fixed)
        if slot in fixed.slots
        or (degrees.index(one.fidelity) <= degrees.index(fidelity) and one.family == plain.family)
    ]


def cuts(job: Job, shared: Shared, fixed: Kept) -> list[Technique]:
    """Return the possible numbers of micro-batches into which a GPU group's part of the batch may be split,
    from 1 to one sample each.
    """
    known: Mapping[Slot, tuple[Technique, ...]] = fixed.slots
    pieces = _pieces(job, shared, fixed)
    if Slot.BATCHING in known:
        return pieces
    ends = [pieces[0], pieces[-1]]
    if all(is_valid(job, shared.cut(one), shared.gpus) for one in ends):
        return pieces  # all sizes between valid ends are valid: techniques refuse few micro-batches, or many
    return [one for one in pieces if is_valid(job, shared.cut(one), shared.gpus)]


def _pieces(job: Job, shared: Shared, fixed: Kept) -> list[Technique]:
    part = job_of_rank(job, shared.setup)
    pieces = of_slot(part, Slot.BATCHING, fixed)
    return sorted(pieces, key=lambda one: one.alone.micro_batches)


def is_valid(job: Job, recipe: Recipe, gpus: int) -> bool:
    """Return True if this recipe can train the job on this number of GPUs."""
    try:
        part = job_of_rank(job, on_gpus(recipe.setup(), gpus))
    except SnugfitError:
        return False
    return mixture.is_valid(recipe, part)


def _is_alone(technique: Technique, job: Job) -> bool:
    wish = technique.alone.checkpoint
    return (
        wish is not None and len(list(type(technique).settings(job))) == 1 and not type(technique).grades(job)
    )

"""Techniques by which a number of GPUs may share a job: its batch, and each part of it within groups.

Sharing the batch alone is always tried. Along the other axes of a mesh, groups of GPUs work on the same
samples. They share matrices, and with these the experts if there are some, or sequences, or they form
stages. The techniques propose the sizes of such groups, at most the GPUs of a host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields

from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.several_gpus.candidates import of_slot
from snugfit.prediction.exchanges import GPUS_PER_HOST
from snugfit.techniques import roster
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot, Technique
from snugfit.techniques.wish import processes_of

MOST_AXES = 2
"""Greatest number of axes of a mesh in addition to the batch's: no three of the existing ones combine."""


def sharings(job: Job, gpus: int, fixed: Kept, axes: int = 0) -> Iterator[tuple[Technique, ...]]:
    """Yield techniques for each slot of several GPUs, by which so many can share the job's batch.

    They have `axes` axes in addition to the batch's, without fixed ones. If there are several hosts,
    groups over which copies of the weights are sharded are whole hosts.
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
    """Return the techniques by slot that make groups of GPUs work on the same samples.

    A technique's planning objections are ignored, since they concern plans without its axis.
    """
    slots: dict[Slot, list[Technique]] = {}
    for kind in roster.techniques():
        if not kind.needs_several_gpus or kind.missing_package():
            continue
        for one in kind.settings(job):
            if (processes := processes_of(one.install(Setup()))) is not None and processes.axes:
                slots.setdefault(kind.slot, []).append(one)
    return slots


def _choices(
    job: Job, slot: Slot, fixed: Kept, along: dict[Slot, list[Technique]], *, mesh: bool
) -> Sequence[Technique]:
    # On an axis that was not chosen, each group is one GPU.
    if slot in along and slot not in fixed.slots:
        return [roster.plain(slot)]
    usual = list(of_slot(job, slot, fixed))
    is_mesh = mesh or any(one in fixed.slots for one in along)
    if slot in fixed.slots or not is_mesh:
        return usual
    return [*usual, *(one for one in stopgaps(usual) if one not in usual)]


def stopgaps(usual: Sequence[Technique]) -> list[Technique]:
    """Return the same kinds of techniques without settings, for meshes that refuse those that plans
    choose."""
    kinds = dict.fromkeys(map(type, usual))
    return [kind() for kind in kinds if all(one.default is not MISSING for one in fields(kind))]


def _shares_evenly(job: Job, gpus: int, fixed: Kept, sharing: Sequence[Technique]) -> bool:
    """Return whether so many GPUs make whole groups that divide the batch evenly.

    If experts are spread, all GPUs of a group must share them.
    """
    setup = Setup()
    for technique in sharing:
        setup = technique.install(setup)
    processes = processes_of(setup)
    if processes is None:
        return gpus == 1
    # A user's own groups need not fill hosts.
    whole_hosts = None if Slot.SHARDING in fixed.slots else GPUS_PER_HOST
    return gpus > 1 and processes.shares_evenly(gpus, job.batch_size, whole_hosts)

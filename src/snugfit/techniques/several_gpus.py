"""The number of GPUs of a recipe and of a job.

A recipe does not contain a number of GPUs: `ddp` on two is the same technique as on eight. `on_gpus` puts the
number into the Setup. `job_of_rank` cuts the global batch, which stays the same in total. The techniques for
several GPUs belong to a feature, whose fields of `Setup` have `SeveralProcesses` as values (`wish.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import UsageError
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot, Technique, TechniqueBySlot
from snugfit.techniques.wish import processes_of, wish_of_processes

if TYPE_CHECKING:
    from snugfit.job.job import Job

MOST_GPUS = 1 << 16
"""Largest accepted number of GPUs. A larger number is refused as a mistake."""

NOT_SIMULATED = (Slot.ADAPTERS, Slot.HEAD, Slot.KERNELS, Slot.ENGINE, Slot.ACTIVATION_OFFLOAD)
"""Slots (choices of a recipe) that must have their default technique if several processes train one model."""

BEFORE_SHARDING = tuple(Slot)[: list(Slot).index(Slot.SHARDING)]
"""Slots (choices of a recipe) that a search fills before those for several processes."""


def untried_techniques(recipe: TechniqueBySlot) -> list[Technique]:
    """Return the recipe's techniques that cannot be simulated with several processes, by slot (a choice such
    as precision).
    """
    techniques = [recipe[slot] for slot in BEFORE_SHARDING]
    # Default techniques of these slots are simulated with any number of processes.
    return [
        technique
        for technique in techniques
        if technique.single_process or (technique.slot in NOT_SIMULATED and not technique.plain)
    ]


def on_gpus(setup: Setup, gpus: int) -> Setup:
    """Return the training settings (`Setup`) on this number of GPUs. Raises `UsageError` if the recipe is not
    for this number of GPUs, or if they cannot divide the batch or model evenly.
    """
    wish = wish_of_processes(setup)
    if type(gpus) is not int or not 1 <= gpus <= MOST_GPUS:
        raise UsageError(f"gpus is {gpus!r}; it must be a whole number from 1 to {MOST_GPUS:,}.")
    if wish is not None:
        return setup.with_fields(**{wish.name: wish.of(setup).on(gpus)})
    if gpus > 1:
        from snugfit.techniques import roster  # the command line imports this module at its start

        if not roster.slots_of_several_gpus():
            raise UsageError(
                f"{gpus} GPUs were named, but no technique here trains on several. Leave the number out."
            )
        raise UsageError(
            f"{gpus} GPUs were named, but the recipe trains on one. Add a technique of the slot 'sharding' "
            "for several: ddp if the model fits on one GPU, else fsdp."
        )
    return setup


def ranks_of(setup: Setup) -> int:
    """Return the number of processes that train together under these settings, one for each GPU."""
    processes = processes_of(setup)
    return 1 if processes is None else processes.ranks


def job_of_rank(job: Job, setup: Setup) -> Job:
    """Return the job of one rank (process), with its part of the global batch. Raises `UsageError` for a
    batch that cannot be divided evenly.
    """
    processes = processes_of(setup)
    parts = processes.data_ranks if processes is not None and processes.ranks else 1
    if job.batch_size % parts:
        # Without a smaller multiple, only the larger one is suggested.
        below = job.batch_size // parts * parts
        near = " or ".join(str(size) for size in (below, below + parts) if size)
        raise UsageError(
            f"A global batch of {job.batch_size} cannot be shared evenly by {parts} GPUs. Try {near}."
        )
    return replace(job, batch_size=job.batch_size // parts) if parts > 1 else job

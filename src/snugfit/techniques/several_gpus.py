"""Requirements of training on several GPUs for a recipe and a job, and the settings that it excludes.

A recipe has no number of GPUs: `ddp` on two is the same technique as on eight. `on_gpus` puts the number into
the Setup. `job_of_rank` cuts the global batch, which stays the same in total.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import UsageError
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setup import ParallelWish, Setup
from snugfit.techniques.technique import Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

MOST_GPUS = 1 << 16
"""More are taken for a mistake."""

ONE_GPU = "trains on several GPUs, and one was named. Add --gpus 2 (gpus=2 in Python) or leave it out"

SHARDS_ON_HOST = (
    "The host keeps and updates weights: in one run on two H200s the GPU's bytes were as predicted. The "
    "seconds of its copies and updates were measured nowhere, nor was its memory."
)

NOT_SIMULATED = (Slot.ADAPTERS, Slot.HEAD, Slot.KERNELS, Slot.ENGINE, Slot.ACTIVATION_OFFLOAD)
"""Slots that hold their plain technique where several processes train together."""

BEFORE_SHARDING = tuple(Slot)[: list(Slot).index(Slot.SHARDING)]
"""Slots that a search has filled when it chooses a technique for several processes."""

KNOW_SHARDS = ("torch.optim:AdamW", "torch.optim:SGD")
"""Optimizers of torch that update shards as they update whole weights (chosen). Others read a weight's shape,
or their code does not support shards.
"""


COPIED = (
    Counterpart(arguments={"ddp_find_unused_parameters": False}, used="to write"),
    Counterpart(
        arguments={"parallel.by": "ddp", "parallel.bucket_views": Setting("bucket_views")}, used="to read"
    ),
)
"""DDP elsewhere: the Trainer uses it by itself in several processes. It then searches for parameters without
gradients in each step unless this argument is False.
"""


def sharded_elsewhere(group: Setting | None = None) -> tuple[Counterpart, ...]:
    """FSDP2 elsewhere: `TrainingArguments(fsdp=True)`, which never gathers weights outside of layers again.
    With a `group` each copy of the weights is sharded over that many GPUs. The number of copies follows from
    the number of GPUs.
    """
    written = [
        Counterpart(
            arguments={
                "fsdp": True,
                "fsdp_config.version": 2,
                "fsdp_config.reshard_after_forward": reshard == "layers",
                "fsdp_config.cpu_offload": offload == "cpu",
                **({"parallelism_config.dp_shard_size": group} if group else {}),
            },
            settings={"reshard": reshard, "offload": offload},
            used="to write",
        )
        for reshard in ("layers", "none")
        for offload in ("none", "cpu")
    ]
    read = {
        "parallel.by": "fsdp",
        "parallel.reshard": Setting("reshard"),
        "parallel.offload": Setting("offload"),
        **({"parallel.copies": "several", "parallel.group": group} if group else {}),
    }
    return (*written, Counterpart(arguments=read, used="to read"))


def untried_techniques(recipe: TechniqueBySlot) -> list[Technique]:
    """Return the techniques that are for one process alone, by slot."""
    techniques = [recipe[slot] for slot in BEFORE_SHARDING]
    return [one for one in techniques if one.single_process or (one.slot in NOT_SIMULATED and not one.plain)]


def with_parallel(setup: Setup, wish: ParallelWish) -> Setup:
    """Return the Setup of one of several processes. Sharded weights are cast to autocast's dtype as they are
    gathered, in place of autocast.
    """
    if wish.weights == "copied":
        return setup.with_fields(parallel=wish)
    return setup.with_fields(parallel=replace(wish, dtype=setup.autocast), autocast=None)


def objections(job: Job, recipe: TechniqueBySlot, wish: ParallelWish) -> Iterator[str]:
    """Yield why several GPUs cannot train this job under this recipe."""
    setup = recipe[Slot.OPTIMIZER].install(recipe[Slot.PRECISION].alone)
    if not job.trains:
        yield "it is about training only. Leave it out."
    if job.model.module is not None:
        yield "models of your own are not simulated with it. Leave it out."
    for technique in untried_techniques(recipe):
        yield f"it is not simulated together with {technique}. Leave one of them out."
    if wish.weights == "sharded" and setup.scale_gradients:
        yield f"weights are gathered in bf16 or as they are, so it does not go with {recipe[Slot.PRECISION]}."
    shared = "shards of weights" if wish.weights == "sharded" else "states that GPUs share"
    if "sharded" in (wish.weights, wish.states) and setup.optimizer.factory.path not in KNOW_SHARDS:
        yield f"{recipe[Slot.OPTIMIZER]} is not simulated on {shared}. Try 'adamw' or 'adamw_fused'."
    yield from _objections_to_parts(recipe, setup, wish)
    if wish.on_host and setup.optimizer.factory.arguments.get("fused"):
        yield f"the host updates weights, and {recipe[Slot.OPTIMIZER]} is for GPUs. Try 'adamw'."


def _objections_to_parts(recipe: TechniqueBySlot, setup: Setup, wish: ParallelWish) -> Iterator[str]:
    """Yield the settings that exclude matrices cut over GPUs."""
    if wish.tensor == 1:
        return
    sharding = recipe[Slot.SHARDING]
    if sharding.install(Setup()).sharding is not None or wish.states == "sharded" or wish.on_host:
        yield f"it is not simulated together with {sharding}. Try 'fsdp' or 'ddp'."
    if wish.bucket_views:
        yield "ddp averages parts of matrices layer by layer, without buckets. Leave bucket_views out."
    if wish.weights != "sharded" and setup.scale_gradients:
        yield f"it does not go with {recipe[Slot.PRECISION]}. Try 'bf16'."
    if wish.weights != "sharded" and setup.optimizer.factory.path not in KNOW_SHARDS:
        yield f"{recipe[Slot.OPTIMIZER]} is not simulated on parts of matrices. Try 'adamw' or 'adamw_fused'."


def on_gpus(setup: Setup, gpus: int) -> Setup:
    """Return the Setup on this number of GPUs. Raises `UsageError` for several GPUs with a recipe for one,
    the reverse, and parts that the GPUs cannot share evenly.
    """
    wish = setup.parallel
    if type(gpus) is not int or not 1 <= gpus <= MOST_GPUS:
        raise UsageError(f"gpus is {gpus!r}; it must be a whole number from 1 to {MOST_GPUS:,}.")
    if setup.sharding is not None:  # its engine trains on one as on several
        return setup.with_fields(sharding=replace(setup.sharding, ranks=gpus))
    if wish is None and gpus == 1:
        return setup
    if wish is None:
        raise UsageError(
            f"{gpus} GPUs were named, but the recipe trains on one. Add a technique of the slot 'sharding' "
            "for several: ddp if the model fits on one GPU, else fsdp."
        )
    if gpus == 1:
        raise UsageError(f"The recipe {ONE_GPU}.")
    return setup.with_fields(parallel=_on_mesh(wish, gpus))


def _on_mesh(wish: ParallelWish, gpus: int) -> ParallelWish:
    """Return the wish for this number of GPUs, which the axes must multiply to."""
    together = wish.ranks_of_one_part
    if wish.experts not in (1, wish.tensor):
        raise UsageError(
            f"Experts are spread over {wish.experts} GPUs that share a layer, and {wish.tensor} do. Write "
            f"'tensor({wish.experts}) + expert({wish.experts})'."
        )
    if gpus % together:
        named = " x ".join(f"{count} for {axis}" for axis, count in axes_of(wish).items())
        raise UsageError(
            f"The recipe takes {together} GPUs ({named}) or a multiple of them, and {gpus} were named."
        )
    data = gpus // together
    if wish.weights == "alone" and data > 1:
        raise UsageError(
            f"The recipe shares one copy of the model among {together} GPUs, and {gpus} were named. Add fsdp "
            f"or ddp, which share the batch among {data} such groups, or name {together} GPUs."
        )
    if wish.weights != "alone" and data == 1:
        raise UsageError(
            f"On {gpus} GPUs nothing is left to share the batch among: {together} work on each part of it. "
            f"Name a multiple of {together}, or leave the technique of the slot 'sharding' out."
        )
    if wish.shards and (wish.shards > data or data % wish.shards):
        raise UsageError(
            f"hsdp({wish.shards}) spreads a copy of the weights over {wish.shards} GPUs, and {data} GPUs "
            f"make no such groups. Name a multiple of {wish.shards}, or a divisor of {data} in its place."
        )
    return replace(wish, ranks=gpus)


def axes_of(wish: ParallelWish) -> dict[str, int]:
    """Return the number of ranks along each axis of a mesh except the data axis; axes of one are left out."""
    counts = {"stages": wish.stages, "context": wish.context, "tensor": wish.tensor}
    return {axis: count for axis, count in counts.items() if count > 1}


def ranks_of(setup: Setup) -> int:
    """Return the number of processes that train together under this Setup, one for each GPU."""
    if setup.sharding is not None:
        return setup.sharding.ranks
    return setup.parallel.ranks if setup.parallel else 1


def job_of_rank(job: Job, setup: Setup) -> Job:
    """Return one rank's part of the job: its share of the global batch. Raises `UsageError` for a batch that
    cannot be shared evenly.
    """
    wish = setup.parallel
    parts = wish.data_ranks if wish and wish.ranks else setup.sharding.ranks if setup.sharding else 1
    if job.batch_size % parts:
        below = job.batch_size // parts * parts
        near = " or ".join(str(size) for size in (below, below + parts) if size)
        raise UsageError(
            f"A global batch of {job.batch_size} cannot be shared evenly by {parts} GPUs. Try {near}."
        )
    return replace(job, batch_size=job.batch_size // parts) if parts > 1 else job

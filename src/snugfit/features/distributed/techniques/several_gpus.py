"""Requirements of a recipe and a job for training on several GPUs, and the settings that it excludes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.distributed.apply.eight_bit_shards import EIGHT_BIT
from snugfit.features.distributed.fields import PARALLEL, SHARDING, ParallelWish
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import untried_techniques
from snugfit.techniques.technique import Slot, Technique, TechniqueBySlot, setup_of
from snugfit.techniques.wish import used_wishes

if TYPE_CHECKING:
    from snugfit.job.job import Job

SHARDS_ON_HOST = (
    "The host keeps and updates weights: in one run on two H200s the GPU's bytes were as predicted. The "
    "seconds of its copies and updates were measured nowhere, nor was its memory. "
    "snugfit measure --gpus shows yours."
)

KNOW_SHARDS = ("torch.optim:AdamW", "torch.optim:SGD")
"""Import paths of torch's optimizers that update shards as they update whole weights (chosen). Others read a
weight's shape, or their code does not support shards.
"""


COPIED = (
    Counterpart(arguments={"ddp_find_unused_parameters": False}, used="to write"),
    Counterpart(
        arguments={"parallel.by": "ddp", "parallel.bucket_views": Setting("bucket_views")}, used="to read"
    ),
)
"""Words of transformers for DDP, which the Trainer uses by itself in several processes. It searches for
parameters without gradients in each step unless this argument is False.
"""


def sharded_elsewhere(group: Setting | None = None) -> tuple[Counterpart, ...]:
    """Return the equivalent of FSDP2 in other libraries: `TrainingArguments(fsdp=True)`, which gathers the
    weights outside of layers once per step. With a `group` each copy of the weights is sharded over that many
    GPUs. The number of copies follows from the number of GPUs.
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


def with_parallel(setup: Setup, wish: ParallelWish) -> Setup:
    """Return the Setup (settings of a training step) of one of several processes. Sharded weights are cast to
    autocast's dtype when they are gathered, in place of autocast.
    """
    if wish.weights == "copied":
        return setup.with_fields(parallel=wish)
    dtype, setup = setup.without_autocast()
    return setup.with_fields(parallel=replace(wish, dtype=dtype))


def adds_adapters(technique: Technique) -> bool:
    """Return True if `technique` freezes the model's weights and trains added ones."""
    return any(one.freezes for one in used_wishes(technique.alone))


def is_quantized(technique: Technique) -> bool:
    """Return True if `technique` adds adapters to weights of another kind than the model's own, such as
    quantized ones.
    """
    return adds_adapters(technique) and not all(one.freezes for one in used_wishes(technique.alone))


def is_shared(technique: Technique, wish: ParallelWish) -> bool:
    """Return True if `technique` runs where GPUs share only the batch and the weights: it adds adapters or
    changes the code of modules.
    """
    if wish.ranks_of_one_part > 1:
        return False
    return technique.within_modules or (adds_adapters(technique) and wish.states == "copied")


def objections(job: Job, recipe: TechniqueBySlot, wish: ParallelWish) -> Iterator[str]:
    """Yield the reasons why several GPUs cannot train this job under this recipe."""
    setup = setup_of(recipe[Slot.PRECISION], recipe[Slot.OPTIMIZER])
    if not job.trains:
        yield "it supports training only. Leave it out."
    if job.model.module is not None:
        yield "models of your own are not simulated with it. Leave it out."
    for technique in untried_techniques(recipe):
        if not is_shared(technique, wish):
            yield f"it is not simulated together with {technique}. Leave one of them out."
    if setup_of(recipe[Slot.ENGINE]).lowering is not None and is_quantized(recipe[Slot.ADAPTERS]):
        yield (
            f"{recipe[Slot.ENGINE]} with {recipe[Slot.ADAPTERS]} is not simulated on several GPUs. Leave one "
            "of them out, or try 'fused'."
        )
    if wish.weights == "sharded" and setup.scale_gradients:
        yield (
            "weights are gathered in bf16 or as they are, so it cannot be combined with "
            f"{recipe[Slot.PRECISION]}. Try 'bf16'."
        )
    shared = "shards of weights" if wish.weights == "sharded" else "states that GPUs share"
    span = recipe[Slot.CHECKPOINTING].value
    is_packed = wish.weights == "sharded" and is_quantized(recipe[Slot.ADAPTERS])
    if is_packed and span is not None and span.layers_per_span != 1:
        # Their backward pass failed on two H200s: gathered bytes were to require gradients.
        yield (
            f"{recipe[Slot.CHECKPOINTING]} recomputes several layers at once, which fails for packed weights "
            "that each layer gathers. Try 'every_layer'."
        )
    knows_shards = setup.optimizer_path in KNOW_SHARDS or (
        setup.optimizer_path in EIGHT_BIT and wish.ranks_of_one_part == 1 and not wish.on_host
    )
    if "sharded" in (wish.weights, wish.states) and not knows_shards:
        yield f"{recipe[Slot.OPTIMIZER]} is not simulated on {shared}. Try 'adamw' or 'adamw_fused'."
    yield from _objections_to_parts(recipe, setup, wish)
    if wish.on_host and setup.optimizer.factory.arguments.get("fused"):
        yield f"the host updates weights, and {recipe[Slot.OPTIMIZER]} is for GPUs. Try 'adamw'."


def _objections_to_parts(recipe: TechniqueBySlot, setup: Setup, wish: ParallelWish) -> Iterator[str]:
    """Yield reasons to refuse settings that cannot be combined with matrices sharded over GPUs."""
    if wish.tensor == 1:
        return
    sharding = recipe[Slot.SHARDING]
    if SHARDING.of(sharding.alone) is not None or wish.states == "sharded" or wish.on_host:
        yield f"it is not simulated together with {sharding}. Try 'fsdp' or 'ddp'."
    if wish.bucket_views:
        yield "ddp averages parts of matrices layer by layer, without buckets. Leave bucket_views out."
    if wish.weights != "sharded" and setup.scale_gradients:
        yield f"it cannot be combined with {recipe[Slot.PRECISION]}. Try 'bf16'."
    if wish.weights != "sharded" and setup.optimizer_path not in KNOW_SHARDS:
        yield f"{recipe[Slot.OPTIMIZER]} is not simulated on parts of matrices. Try 'adamw' or 'adamw_fused'."


@dataclass(frozen=True, kw_only=True)
class SharedBatch(Technique):
    """Base class of data-parallel techniques, by which several GPUs share the batch."""

    needs_several_gpus: ClassVar = True

    @abstractmethod
    def wish(self) -> ParallelWish:
        """Return the distribution over processes (field `parallel`): weights copied or sharded along the data
        axis of the mesh.
        """

    def install(self, setup: Setup) -> Setup:
        """Set the Setup's `parallel` field to distribute the model over all GPUs."""
        return with_parallel(setup, self.wish())

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: settings that are not simulated on several GPUs."""
        yield from objections(job, recipe, self.wish())

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning that predictions with shards on the host were measured in few cases."""
        if self.wish().on_host:
            yield SHARDS_ON_HOST


def along(setup: Setup, **counts: Any) -> Setup:
    """Return the training settings with the given numbers of ranks along some axes of the device mesh. Other
    axes stay unchanged.
    """
    wish = PARALLEL.of(setup) or ParallelWish(weights="alone")
    return setup.with_fields(parallel=replace(wish, **counts))

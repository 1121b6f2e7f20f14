"""The base class of `zero2` and `zero3`, with the settings and limits that they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.errors import UsageError
from snugfit.features.distributed.fields import ShardingWish
from snugfit.features.distributed.techniques.several_gpus import adds_adapters
from snugfit.step.wishes.own_attention import own_attentions
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import untried_techniques
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot
from snugfit.versions import version_of

if TYPE_CHECKING:
    from snugfit.job.job import Job

READ = "overlap_comm is off on one GPU"
"""Note about `overlap_comm`, a DeepSpeed setting that recipes do not contain."""

ADAMW = "torch.optim:AdamW"
"""Import path of the optimizer that accelerate replaces by DeepSpeed's if optimizer states are on the host.
"""

LARGEST_BUCKET = 10**11
"""Largest accepted number of elements in a bucket (chosen). No GPU has memory for more."""

TRAINED = "deepspeed>=0.19.8"
"""Version of DeepSpeed with which snugfit can train. Checkpoints use its partitions, and an update first
checks that gradients are finite.
"""

UNCERTAIN = (
    "DeepSpeed's own code was simulated. Four steps of zero2 and two of zero3 were measured, on H200s "
    "whose hosts others shared. Bytes were as predicted; zero2 took 27 to 81 % longer. The host's "
    "seconds of zero3's hooks are fitted to its two steps, which took 2 % less and 8 % more than "
    "predicted. Other steps that such a host bounds took up to 60 % longer there. On several GPUs no "
    "step of ours was measured; the memory that was published of DeepSpeed's own example is predicted "
    "within 0.01 GiB. snugfit measure shows yours."
)

OF_DISKS = (
    "The disk is taken to read and write 3 GB/s, one file after the other while the host waits. No disk was "
    "measured. snugfit measure shows yours."
)

TREE = (
    "If a step fits without DeepSpeed, leave it out: on one GPU it only makes steps slower. Otherwise "
    "begin with zero2, which puts optimizer states, gradients and the update on the host. zero3 puts "
    "the weights there too, and is slower still"
)
"""Advice on the choice of a ZeRO stage. Source: the decision tree of Hugging Face's guide, for one GPU."""


AUTO = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Keys of DeepSpeed's bucket sizes that the Trainer computes from the model's width if they are `auto`."""

FROM_ARGUMENTS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
"""Keys that the Trainer fills from its own arguments if they are `auto`."""


PACKED_ELSEWHERE = "4-bit weights under DeepSpeed's engine were tested in snugfit's own loop only"
"""Reason to refuse accelerate, the Trainer and exported scripts."""

DISK = "/local_nvme"
"""Placeholder for the folder on a disk, from DeepSpeed's documentation; users replace it with theirs."""


def zero_section(wish: ShardingWish, sizes: dict[str, Any], folder: str = DISK) -> dict[str, Any]:
    """Return DeepSpeed's section `zero_optimization`. `sizes` has a number or `auto` for each bucket whose
    size `wish` does not set. States on a disk are in `folder`.
    """
    section: dict[str, Any] = {
        "stage": wish.stage,
        # One GPU has no exchange to overlap.
        "overlap_comm": wish.ranks > 1,
        "contiguous_gradients": True,
        **{name: size for name, size in sizes.items() if wish.stage == 3 or not name.startswith("stage3_")},
        **({} if wish.bucket is None else {"reduce_bucket_size": wish.bucket}),
    }
    for name, where in (("offload_optimizer", wish.states), ("offload_param", wish.weights)):
        if where != "none":
            section[name] = {"device": where, "pin_memory": True}
        if where == "nvme":
            section[name]["nvme_path"] = folder
            section["stage3_max_reuse_distance"] = 0  # weights that stay would keep their buffers
    return section


def wish_of(stage: int, offload: str, bucket: int | None = None) -> ShardingWish:
    """Return the engine's settings for this place of states and, in stage 3, of weights. With `optimizer`,
    states are on the host and weights on the GPU.
    """
    if offload == "optimizer":
        return ShardingWish(stage=stage, states="cpu", bucket=bucket)
    weights = offload if stage == 3 else "none"
    return ShardingWish(stage=stage, states=offload, weights=weights, bucket=bucket)


def counterparts(stage: int) -> tuple[Counterpart, ...]:
    """Return DeepSpeed's equivalents of this ZeRO stage in other libraries:
    `TrainingArguments(deepspeed=...)`, and notes for a user's DeepSpeed configuration.
    """
    named = []
    # Only ZeRO stage 3 offloads weights, or to a disk.
    for offload in ("cpu", "optimizer", "nvme", "none") if stage == 3 else ("cpu", "none"):
        wish = wish_of(stage, offload)
        written: dict[str, Any] = {
            "deepspeed.zero_optimization": zero_section(wish, dict.fromkeys(AUTO, "auto")),
            "deepspeed.bf16": {"enabled": "auto"},
            "deepspeed.zero_allow_untested_optimizer": True,
            **{f"deepspeed.{name}": "auto" for name in FROM_ARGUMENTS},
        }
        sized = written["deepspeed.zero_optimization"] | {"reduce_bucket_size": Setting("bucket")}
        read = {"sharding.stage": stage, "sharding.offload": offload, "sharding.bucket": Setting("bucket")}
        settings = {"offload": offload}
        named += [
            Counterpart(arguments=written, settings=settings),
            Counterpart(
                arguments=written | {"deepspeed.zero_optimization": sized}, settings=settings, used="to write"
            ),
            Counterpart(arguments=read, settings=settings, note=READ),
        ]
    return tuple(named)


def refuse_training(wish: ShardingWish) -> None:
    """Raise `UsageError` for settings of the engine that no loop of snugfit can train with."""
    from packaging.requirements import Requirement

    if "nvme" in (wish.states, wish.weights):
        raise UsageError(
            "Checkpoints of states on a disk (offload=nvme) are not kept, so snugfit train refuses it. Take "
            "offload=cpu or offload=none, or train with the Trainer or accelerate: snugfit export writes the "
            "script."
        )
    if (wish.stage, wish.states, wish.weights) == (3, "cpu", "none"):
        raise UsageError(
            "zero3(offload=optimizer) is predicted only: snugfit train was not tested with it. Take "
            "offload=cpu or offload=none, or train with the Trainer: snugfit export writes the script."
        )
    installed = version_of("deepspeed")
    # A pre-release of a newer version is accepted too.
    if installed and not Requirement(TRAINED).specifier.contains(installed, prereleases=True):
        raise UsageError(
            f"snugfit train needs {TRAINED} for zero{wish.stage}, but {installed} is installed. Try: pip "
            f'install "{TRAINED}".'
        )


@dataclass(frozen=True, kw_only=True)
class EngineTechnique(Technique):
    """Base class of techniques whose steps DeepSpeed's engine runs."""

    fidelity: ClassVar = Fidelity.ROUNDS
    needs: ClassVar = ("deepspeed>=0.18",)
    extra: ClassVar = "deepspeed"
    unplanned: ClassVar = f"plans leave it out. {TREE}"
    caveat: ClassVar = UNCERTAIN
    searched: ClassVar = False

    zero_stage: ClassVar[int]
    """Number of the ZeRO stage that the engine runs: 2 or 3."""

    offload: str = "cpu"

    bucket: int | None = between(1, LARGEST_BUCKET, default=None)
    """Number of elements of the buffer in which gradients are averaged (`reduce_bucket_size`). The
    default is the square of the model's width, as for `auto`; DeepSpeed's own is 500000000.
    """

    def install(self, setup: Setup) -> Setup:
        """Set the Setup's `sharding` field, so that DeepSpeed's engine runs the steps. Weights are kept in
        autocast's dtype, and the optimizer updates fp32 copies of them.
        """
        dtype, setup = setup.without_autocast()
        wish = wish_of(self.zero_stage, self.offload, self.bucket)
        return setup.with_fields(sharding=replace(wish, dtype=dtype or "float32"))

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons why DeepSpeed's engine cannot run this job or recipe."""
        setup = recipe[Slot.PRECISION].alone
        if not job.trains:
            yield "it supports training only. Leave it out."
        if job.model.module is not None:
            yield "models of your own are not simulated with it. Leave it out."
        # Frozen weights in bf16 need no fp32 copies, and adapters are fp32 already.
        trains_fp32 = adds_adapters(recipe[Slot.ADAPTERS]) and setup.autocast == job.dtype == "bfloat16"
        is_fp32 = trains_fp32 or job.dtype == "float32"
        if setup.weights_dtype is not None or setup.scale_gradients or not is_fp32:
            yield (
                f"it updates weights in fp32 and computes in bf16 or fp32, so it cannot be combined with "
                f"{recipe[Slot.PRECISION]} over weights in {job.dtype}. Try 'bf16' over weights in float32."
            )
        for technique in untried_techniques(recipe):
            if not adds_adapters(technique):
                yield f"it is not simulated together with {technique}. Leave one of them out."
        if recipe[Slot.ATTENTION].value in own_attentions():
            yield f"it is not simulated together with {recipe[Slot.ATTENTION]}. Take 'sdpa'."
        if recipe[Slot.OPTIMIZER].value.factory.path != ADAMW:
            update = "only AdamW's update is simulated"
            if self.offload != "none":
                update = "its update on the host is DeepSpeed's AdamW"
            yield f"{update}, so it cannot be combined with {recipe[Slot.OPTIMIZER]}. Try 'adamw'."

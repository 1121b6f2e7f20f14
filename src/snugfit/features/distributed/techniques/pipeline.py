"""Pipeline parallel training by torch.distributed.pipelining: each GPU holds a part of the layers.

The first GPU embeds and runs the first layers, the last one runs the last layers and computes the loss. They
exchange activations, and in return gradients, one micro-batch after the other. While one GPU works on a
micro-batch, the next works on the one before. The waiting time is the bubble. At best it is
(n - 1) / (m + n - 1) of a step, with n stages and m micro-batches. GPUs differ in memory: the first has the
embedding and keeps the most micro-batches, the last has the logits. With a head tied to the embedding both
have the matrix, and add up its gradients.

A GPU may have several parts of the layers, with those of all others between them. Then a micro-batch reaches
the last GPU sooner, and the waiting time is divided by the number of parts. More is kept and sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from snugfit.features.distributed.fields import PARALLEL, SHARDING
from snugfit.features.distributed.techniques import several_gpus
from snugfit.techniques import roster
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot, setup_of

if TYPE_CHECKING:
    from snugfit.job.job import Job

SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
}  # fmt: skip
"""torch's names of the pipeline schedules, by their names in recipes
(`torch.distributed.pipelining.schedules.get_schedule_class`).
"""

HOW_MEASURED = (
    "Eleven pipelines were measured, on two H100s and on two and four H200s. Requested bytes were "
    "exact or up to 0.3 % more than predicted. In two of them one GPU reserved 2,004 and 1,002 MiB "
    "more than predicted (7.4 and 6.0 %). Another GPU with the same stage reserved the predicted "
    "bytes. A sent tensor is free again after its arrival, and earlier requests take other memory. "
    "Steps took from 13 % less to 41 % longer, with tensor and with zero_bubble up to 50 % longer. "
    "snugfit measure --gpus shows yours."
)


@dataclass(frozen=True, kw_only=True)
class Pipeline(Technique):
    """Divides the layers into stages on n GPUs, or n groups of GPUs, which send hidden states to the next
    stage.
    """

    fidelity: ClassVar = Fidelity.SAME
    caveat: ClassVar = HOW_MEASURED
    source: ClassVar = (
        "Huang et al., GPipe, arXiv 1811.06965; Narayanan et al., arXiv 2104.04473 (1F1B, interleaved); "
        "Qi et al., arXiv 2401.10241 (zero bubble)"
    )
    elsewhere: ClassVar = ("pipeline_parallel", "pp")
    needs_several_gpus: ClassVar = True
    searched: ClassVar = False

    n: int = between(2, 512)
    """Number of stages that the layers are cut into, as evenly as possible. The longer ones come first."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"
    """Order of a GPU's micro-batches: `gpipe` all forward, then all backward; `1f1b` a backward pass as soon
    as possible, with at most n micro-batches waiting. `interleaved` is 1f1b with several parts of the layers
    on each GPU: they wait less for each other, and keep and send more. `zero_bubble` has them compute
    gradients of weights separately, while they would wait.
    """

    chunks: int = between(1, 64, default=2)
    """Number of parts of the layers on each GPU, far from each other, under `interleaved` and
    `zero_bubble`."""

    def install(self, setup: Setup) -> Setup:
        """Set the Setup's `parallel` field to cut the layers into stages."""
        schedule = SCHEDULES[self.schedule]
        return several_gpus.along(setup, stages=self.n, schedule=schedule, chunks=self._chunks)

    @property
    def _chunks(self) -> int:
        return self.chunks if self._interleaves else 1

    @property
    def _interleaves(self) -> bool:
        return self.schedule in ("interleaved", "zero_bubble")

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: models or settings that cannot be cut into stages, or are not
        simulated on several GPUs.
        """
        setup = setup_of(*(recipe[slot] for slot in roster.slots_of_several_gpus()))
        wish = PARALLEL.of(setup)
        assert wish is not None
        if SHARDING.of(setup) is not None or wish.states == "sharded" or wish.on_host:
            yield f"it is not simulated together with {recipe[Slot.SHARDING]}. Try 'fsdp' or 'ddp'."
        if wish.context * wish.experts > 1:
            yield (
                "stages are not simulated together with sequences or experts that GPUs share. Leave "
                "one of them out."
            )
        # torch's `replicate`, for copies of split matrices, is part of FSDP2.
        by_fsdp = wish.weights == "sharded" or (wish.copies and wish.tensor > 1)
        if self.schedule == "zero_bubble" and by_fsdp:
            yield (
                "schedule=zero_bubble computes gradients of weights where torch's FSDP2 does not see them "
                f"(torch 2.13 trained other weights), so it cannot be combined with "
                f"{recipe[Slot.SHARDING]} here. "
                "Try schedule=interleaved."
            )
        # With a data axis, the technique of that axis yields these setups.
        if wish.weights == "alone":
            yield from several_gpus.objections(job, recipe, wish)
        yield from self._about_model(job)
        yield from self._about_recipe(recipe)

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield settings with as many stages as a host may have GPUs."""
        yield from (cls(n=n) for n in (2, 4, 8))

    def _about_model(self, job: Job) -> Iterator[str]:
        if job.model.module is not None:
            return  # several_gpus.objections refuses it
        config = job.config_to_read()
        if job.task != "causal-lm" or getattr(config, "is_encoder_decoder", False):
            yield (
                "only decoders that train as causal-lm are cut into stages, and the task is "
                f"{job.task}. Leave it out."
            )
            return
        if self.n * self._chunks > job.model.layers:
            of_each = f" of {self._chunks} parts each" if self._chunks > 1 else ""
            yield (
                f"{job.model.name} has {job.model.layers} layers. Take at most so many stages, and these are "
                f"{self.n}{of_each}."
            )

    def _about_recipe(self, recipe: TechniqueBySlot) -> Iterator[str]:
        pieces: int = recipe[Slot.BATCHING].value
        # GPipe also runs with fewer micro-batches than stages.
        if pieces < self.n and self.schedule != "gpipe":
            waits = (self.n - 1) / (pieces + self.n - 1)  # share of waits: Narayanan et al., 2.2.1
            yield (
                f"{self.n} stages need at least {self.n} micro-batches, and there are {pieces}: with fewer "
                f"a GPU waits for others {waits:.0%} of a step. Add micro_batches({2 * self.n})."
            )
        if pieces == 1 and self.schedule == "gpipe":
            yield (f"with one micro-batch only one GPU works at a time. Add micro_batches({2 * self.n}).")
        yield from self._about_chunks(pieces, recipe)
        if recipe[Slot.PRECISION].alone.scale_gradients:
            yield f"it is not simulated together with {recipe[Slot.PRECISION]}. Try 'bf16'."

    def _about_chunks(self, pieces: int, recipe: TechniqueBySlot) -> Iterator[str]:
        rounds, checkpoint = max(1, pieces // self.n), recipe[Slot.CHECKPOINTING].value
        if not self._interleaves:
            if self.chunks != Pipeline(n=self.n).chunks:
                yield (
                    f"schedule={self.schedule} has one part of the layers on each GPU, not "
                    f"{self.chunks}. Leave chunks out."
                )
            return
        if self._chunks == 1 and self.schedule == "interleaved":
            yield "one part of the layers on each GPU is schedule=1f1b. Take chunks=2, or that."
        if pieces % rounds:  # ScheduleInterleaved1F1B: "a multiple of the number of rounds"
            yield (
                f"schedule={self.schedule} runs {pieces} micro-batches in {rounds} rounds, which must be "
                f"alike. Take micro_batches({pieces // self.n * self.n})."
            )
        if checkpoint is not None and checkpoint.layers_per_span != 1 and self._chunks > 1:
            yield (
                f"{recipe[Slot.CHECKPOINTING]} recomputes layers together that other GPUs' layers lie "
                "between. Try 'every_layer'."
            )

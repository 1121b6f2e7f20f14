"""Technique of activation checkpointing: the first k layers of a stack are recomputed in the backward pass;
the others keep their activations.

It is for a job that almost fits. Each recomputed layer frees its activations and costs its own forward pass
again. So bytes and seconds are on about a line between keep_all and every_layer, in steps of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.job.kv_prefix import dropped_prefix
from snugfit.techniques.setting import between
from snugfit.techniques.setup import CheckpointWish
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class FirstLayers(Technique):
    """Computes the first k layers again in the backward pass, and keeps the others' activations."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "Megatron-LM's recompute_method=block with recompute_num_layers=k"
    elsewhere: ClassVar = ("recompute_num_layers", "recompute_method", "activations_checkpoint_num_layers")

    k: int = between(1, 10_000)
    """Number of recomputed layers, from the first, in each of encoder and decoder if the model has both. For
    all layers, use `every_layer`.
    """

    @property
    def value(self) -> CheckpointWish:
        """Return the checkpointing setting for the first k layers, each recomputed by itself."""
        # Backward reaches the first layers last, when the activations of all others are freed.
        return CheckpointWish(first=self.k)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield an objection to prefix tuning, since recomputed layers would drop its keys and values."""
        return dropped_prefix(job)

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning if the model has fewer than k layers: then every layer is recomputed."""
        if (layers := job.model.layers) and self.k >= layers:
            yield (
                f"{job.model.name} has {layers} layers, so every layer is recomputed. Give a smaller "
                "number to recompute fewer."
            )

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan can choose the number k of layers: the number of layers is unknown.
        Empty if it is known.
        """
        if job.model.layers > 1:
            return ""
        return f"its config has no number of layers (--keep '{cls.name}(2)' plans with two)"

    @classmethod
    def grades(cls, job: Job) -> Sequence[Self]:
        """Return first_layers(k) for k from 1 to L - 1 in a model with L layers. Each recomputes more and
        needs less memory than the one before.
        """
        # The technique for all layers is `every_layer`.
        return [cls(k=k) for k in range(1, job.model.layers)]

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield this technique for half of the model's layers, the only setting that a plan tries at
        first."""
        yield cls(k=max(1, job.model.layers // 2))

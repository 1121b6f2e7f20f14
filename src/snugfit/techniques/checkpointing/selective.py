"""Each layer keeps its input and what was costly to compute; the rest is computed again.

Products with weights and attention take nearly all of a layer's time, and what they give is a part of what a
layer keeps. Kept, they leave norms, activation functions, casts and sums to be computed again. The host pays
for it: every operator of such a layer passes through Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from snugfit.job.kv_prefix import dropped_prefix
from snugfit.techniques.setup import CheckpointWish, Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

What = Literal["attention", "products", "every_other_product"]


@dataclass(frozen=True, kw_only=True)
class Selective(Technique):
    """Keeps each layer's input and its costly products, and computes the rest of the layer again."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = (
        "torch.utils.checkpoint.create_selective_checkpoint_contexts; Korthikanti et al., arXiv 2205.05198"
    )
    elsewhere: ClassVar = ("selective_checkpointing", "selective_activation_checkpointing")

    what: What
    """What is kept: `attention` (fused attention without dropout), `products` (attention, products with
    weights and convolutions) or `every_other_product` (attention and every second of these)."""

    def install(self, setup: Setup) -> Setup:
        """Makes each layer a span of its own that keeps the results of some operators."""
        return replace(setup, checkpoint=CheckpointWish(keep=self.what))

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """A prefix of keys and values would be dropped; attention that is not fused cannot be kept."""
        yield from dropped_prefix(job)
        if self.what == "attention" and recipe[Slot.ATTENTION].install(Setup()).attention == "eager":
            yield (
                f"{recipe[Slot.ATTENTION]} attention is many operators, of which nothing would be kept. Try "
                "'sdpa', or 'selective(products)'."
            )

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Attention with dropout is computed again."""
        if dropout := _attention_dropout(job):
            yield f"{self}: attention has dropout ({dropout}), so it is computed again and not kept."

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """All products, and attention alone where it can be kept. What lies between is tried when named: one
        more would be rehearsed in each precision and attention."""
        yield cls(what="products")
        if not _attention_dropout(job):
            yield cls(what="attention")


def _attention_dropout(job: Job) -> str:
    """The dropout of the model's attention as its config names it; empty where it has none, or no config."""
    if job.model.module is not None:
        return ""
    facts = job.transformers_config().to_dict().items()
    return next(
        (f"{k}={v}" for k, v in facts if "att" in k and "drop" in k and isinstance(v, float) and v), ""
    )

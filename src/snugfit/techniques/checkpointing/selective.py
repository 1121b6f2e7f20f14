"""Technique of selective checkpointing: each layer keeps its input and the results of its slow operators, and
recomputes the rest.

Products with weights and attention take nearly all of a layer's time, and their results are only a part of
its activations. These are kept, so norms, activation functions, casts and sums are computed again. The price
is host time: every operator of such a layer passes through Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from snugfit.job.inputs import has_sequence
from snugfit.job.job import dropout_among
from snugfit.job.kv_prefix import dropped_prefix
from snugfit.techniques.seeded_dropout import draws_once, may_be_seeded, seeds_dropout, try_seeds
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
    """Results that a recomputed layer keeps: `attention` (fused), `products` (attention, products with
    weights, convolutions) or `every_other_product` (attention, every second product). Attention with dropout
    is kept only in a recorded step with seeded dropout.
    """

    def install(self, setup: Setup) -> Setup:
        """Set checkpointing of each layer by itself, with the results of some operators kept. Attention with
        dropout is kept only in CUDA graphs with seeded dropout, which cannot draw random numbers twice.
        """
        # A recorded step (CUDA graph) cannot draw the same numbers twice, so attention is kept. Seeds repeat
        # all other dropout.
        drawn = draws_once(setup) and seeds_dropout(setup)
        return setup.with_fields(checkpoint=CheckpointWish(keep=self.what, keep_drawn=drawn))

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield objections to prefix tuning, whose keys and values would be dropped, and to unfused
        attention, whose result cannot be kept.
        """
        yield from dropped_prefix(job)
        if self.what == "attention" and recipe[Slot.ATTENTION].value == "eager":
            yield (
                f"{recipe[Slot.ATTENTION]} attention is many operators, none of which would be kept. Try "
                "'sdpa', or 'selective(products)'."
            )

    def warnings_beside(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield a warning that attention with dropout is recomputed, unless the step is recorded as a CUDA
        graph and has seeded dropout.
        """
        if reason := self.planned_without(job, recipe):
            yield f"{reason}."

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan chooses selective checkpointing: sequences are short, or attention is
        not kept. Empty if a plan may. Recomputing fewer layers then saves the same bytes in less time, as
        measured and predicted.
        """
        stated = {} if job.model.module is not None else job.model.config
        # The width in the job's config makes an import of transformers unnecessary for most jobs.
        short = not has_sequence(job.task) or job.sequence_length < _stated_width(stated)
        if dropout := dropout_among(stated, part="att") if short else job.stated_dropout(of="att"):
            if may_be_seeded(stated.get("model_type")):  # the only recomputation that CUDA graphs can record
                return ""
            return f"attention has dropout ({dropout}), so it is computed again and not kept"
        # A token costs 24 h^2 FLOPs in products with weights and 4 s h in attention. These are below a
        # seventh if s < h.
        if short or job.sequence_length < _width(job):
            return (
                "attention is less than a seventh of a layer's work where sequences are shorter than the "
                f"model is wide (--keep '{cls.name}(products)' plans with it)"
            )
        return ""

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the setting that a plan tries: `attention` if it can be kept, else `products`.

        Further settings are for users who name them. Recomputing fewer layers takes less time than keeping
        all products.
        """
        lost = job.stated_dropout(of="att") and not may_be_seeded(job.model.config.get("model_type"))
        yield cls(what="products" if lost else "attention")

    def planned_without(self, job: Job, recipe: TechniqueBySlot) -> str:
        """Return the reason why a plan skips selective checkpointing beside other techniques: attention with
        dropout would be computed again. Empty if it would not.
        """
        dropout = job.stated_dropout(of="att")
        is_seeded = seeds_dropout(recipe[Slot.KERNELS].alone)
        if not dropout or (is_seeded and draws_once(recipe[Slot.ENGINE].alone)):
            return ""
        unless = try_seeds(", unless the step has '{} + {}'")
        return f"attention has dropout ({dropout}), so it is computed again and not kept{unless}"


def _stated_width(facts: Mapping[str, Any]) -> int:
    """Return the hidden size in the model's own config, without importing transformers; 0 if the config has
    sub-configs."""
    # A config with several parts has a width for each, and only transformers can return that of the text.
    parts = any(isinstance(value, Mapping) for key, value in facts.items() if key.endswith("config"))
    width = 0 if parts else facts.get("hidden_size", 0)
    return width if isinstance(width, int) else 0


def _width(job: Job) -> int:
    """Return the model's hidden size (elements of a token's vector between layers); 0 if the
    config has none.
    """
    return getattr(job.config_to_read().get_text_config(), "hidden_size", 0)

"""Lion of bitsandbytes with its moment in managed memory, which the driver moves between host and GPU.

The state is that of Lion, in 32 bits or in 8 (`lion`, `lion_8bit`); where it is, and what is not predicted of
it, stands in `optimizer/paged_adamw.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Call, OptimizerWish, Setup
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class PagedLion(Technique):
    """Lion with its moment in memory that goes to the host when the GPU is full."""

    fidelity: ClassVar = Fidelity.LEARNS
    needs: ClassVar = ("bitsandbytes>=0.50",)
    extra: ClassVar = "bnb"
    on_cpu: ClassVar = "pages nothing: its states are in the host's memory already"
    source: ClassVar = (
        "Chen et al., arXiv 2302.06675; Dettmers et al., arXiv 2305.14314; bitsandbytes.optim.PagedLion"
    )
    elsewhere: ClassVar = ("paged_lion_32bit",)
    counterparts: ClassVar = (
        *(
            Counterpart(
                arguments={"optim": f"paged_lion_{bits}bit", "adam_beta2": 0.99}, settings={"bits": bits}
            )
            for bits in (32, 8)
        ),
        *(
            Counterpart(
                arguments={"optim": f"paged_lion_{bits}bit"},
                settings={"bits": bits},
                note="TrainingArguments give it AdamW's second beta unless adam_beta2 is 0.99",
            )
            for bits in (32, 8)
        ),
    )

    bits: Literal[32, 8] = 32
    """Bits of the moment."""

    embeddings: Literal[32, 8] = 32
    """Bits of the moment of embedding tables, where the others have 8."""

    def install(self, setup: Setup) -> Setup:
        """Takes bitsandbytes' Lion; the overrides for embeddings are set before it is made."""
        wish = OptimizerWish(
            factory=Call(
                path="bitsandbytes.optim:Lion",
                arguments={"betas": [0.9, 0.99], "optim_bits": self.bits, "is_paged": True},
            ),
            prepare=Call(
                path="snugfit.step.bitsandbytes_optimizers:keep_embeddings",
                arguments={"bits": self.embeddings},
            ),
            trainer_name=f"paged_lion_{self.bits}bit" if self.embeddings == 32 else None,
            shapes=Call(path="snugfit.step.bitsandbytes_optimizers:shapes"),
        )
        return setup.with_fields(optimizer=wish)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """A width of embeddings means nothing where all have 32 bits."""
        if self.bits == 32 and self.embeddings == 8:
            yield "embeddings=8 needs bits=8."

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """What moves between host and GPU is not known before a run."""
        return "how much of its states goes to the host and back is not predicted, so no plan chooses it"

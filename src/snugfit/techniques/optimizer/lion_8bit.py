"""Lion of bitsandbytes with its one moment in 8 bits, in blocks of 256 that share one scale.

State of a parameter of 4,096 elements or more: a byte an element and 4 bytes a block, 1.02 in all against
AdamW's 8 and Lion's 4. `embeddings=32` keeps that of embedding tables at 32 bits; the rest stands in
`step/bitsandbytes_optimizers.py`. The learning rate is Lion's, not AdamW's (`optimizer/lion.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Call, OptimizerWish, Setup
from snugfit.techniques.technique import Fidelity, Technique

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Lion8bit(Technique):
    """Lion with its moment in 8 bits, block by block: an eighth of AdamW's state."""

    fidelity: ClassVar = Fidelity.LEARNS
    needs: ClassVar = ("bitsandbytes>=0.50",)
    extra: ClassVar = "bnb"
    source: ClassVar = (
        "Chen et al., arXiv 2302.06675; Dettmers et al., arXiv 2110.02861; bitsandbytes' Lion8bit"
    )
    elsewhere: ClassVar = ("lion8bit",)
    counterparts: ClassVar = (
        Counterpart(arguments={"optim": "lion_8bit", "adam_beta2": 0.99}),
        Counterpart(
            arguments={"optim": "lion_8bit"},
            note="TrainingArguments give it AdamW's second beta unless adam_beta2 is 0.99",
        ),
    )

    embeddings: Literal[32, 8] = 32
    """Bits of the moment of embedding tables."""

    def install(self, setup: Setup) -> Setup:
        """Takes bitsandbytes' Lion; the overrides for embeddings are set before it is made."""
        wish = OptimizerWish(
            factory=Call(path="bitsandbytes.optim:Lion8bit", arguments={"betas": [0.9, 0.99]}),
            prepare=Call(
                path="snugfit.step.bitsandbytes_optimizers:keep_embeddings",
                arguments={"bits": self.embeddings},
            ),
            trainer_name="lion_8bit" if self.embeddings == 32 else None,
            shapes=Call(path="snugfit.step.bitsandbytes_optimizers:shapes"),
        )
        return setup.with_fields(optimizer=wish)

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Embeddings in 32 bits, as the HF Trainer does it, and everything in 8 bits."""
        yield from (cls(), cls(embeddings=8))

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """A plan keeps the job's learning rate, which is AdamW's."""
        return "it needs a third to a tenth of AdamW's learning rate, so no plan exchanges them by itself"

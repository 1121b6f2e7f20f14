"""AdamW of bitsandbytes: both moments in 8 bits, in blocks of 256 that share one scale.

State of a parameter of 4,096 elements or more: 2 bytes an element and 8 bytes a block, 2.03 in all against
AdamW's 8. `embeddings=32` keeps the moments of embedding tables at 32 bits, as the HF Trainer does; the
reasons and the rest stand in `step/bitsandbytes_optimizers.py`.
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
class AdamW8bit(Technique):
    """AdamW with both moments in 8 bits, block by block: a quarter of the state."""

    fidelity: ClassVar = Fidelity.ROUNDS
    needs: ClassVar = ("bitsandbytes>=0.50",)
    extra: ClassVar = "bnb"
    source: ClassVar = "Dettmers et al., arXiv 2110.02861; bitsandbytes.optim.AdamW8bit"
    elsewhere: ClassVar = ("adamw_bnb_8bit", "adamw_bnb", "adam8bit", "adamw8bit", "adam_8bit")
    counterparts: ClassVar = (
        Counterpart(arguments={"optim": "adamw_bnb_8bit"}),
        Counterpart(arguments={"optim": "adamw_8bit"}),
    )

    embeddings: Literal[32, 8] = 32
    """Bits of the moments of embedding tables."""

    def install(self, setup: Setup) -> Setup:
        """Takes bitsandbytes' AdamW; the overrides for embeddings are set before it is made."""
        wish = OptimizerWish(
            factory=Call(path="bitsandbytes.optim:AdamW8bit"),
            prepare=Call(
                path="snugfit.step.bitsandbytes_optimizers:keep_embeddings",
                arguments={"bits": self.embeddings},
            ),
            trainer_name="adamw_bnb_8bit" if self.embeddings == 32 else None,
            shapes=Call(path="snugfit.step.bitsandbytes_optimizers:shapes"),
        )
        return setup.with_fields(optimizer=wish)

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Embeddings in 32 bits, as the HF Trainer does it, and everything in 8 bits."""
        yield from (cls(), cls(embeddings=8))

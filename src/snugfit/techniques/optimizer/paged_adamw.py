"""AdamW of bitsandbytes with its moments in managed memory, which the driver moves between host and GPU.

The state is that of AdamW, in 32 bits or in 8 (`adamw_8bit`), but for parameters of 100,000 elements or more
it is none of torch's allocator: it stays on the GPU while there is room, and goes to the host, page by page,
when activations need the room (Dettmers et al., arXiv 2305.14314, section 3). So a step fits whose states do
not fit beside its activations; each page that went is brought back in the update, over the link to the host.
How many go depends on all else that the GPU holds, and is not predicted. Measured: a step of Llama-3.2-1B
(2 x 512 tokens, 9.2 GiB of states) took 66 to 73 ms on an H200 with room for all, and 73 to 87 ms where other
tensors left 2 GiB for the states (`results/h200-2026-11-23/optimizers`).
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
class PagedAdamW(Technique):
    """AdamW with its moments in memory that goes to the host when the GPU is full."""

    fidelity: ClassVar = Fidelity.ROUNDS
    needs: ClassVar = ("bitsandbytes>=0.50",)
    extra: ClassVar = "bnb"
    on_cpu: ClassVar = "pages nothing: its states are in the host's memory already"
    source: ClassVar = "Dettmers et al., arXiv 2305.14314; bitsandbytes.optim.PagedAdamW"
    elsewhere: ClassVar = ("paged_adamw_32bit",)
    counterparts: ClassVar = (
        Counterpart(arguments={"optim": "paged_adamw_32bit"}, settings={"bits": 32}),
        Counterpart(arguments={"optim": "paged_adamw_8bit"}, settings={"bits": 8}),
    )

    bits: Literal[32, 8] = 32
    """Bits of the moments."""

    embeddings: Literal[32, 8] = 32
    """Bits of the moments of embedding tables, where the others have 8."""

    def install(self, setup: Setup) -> Setup:
        """Takes bitsandbytes' AdamW; the overrides for embeddings are set before it is made."""
        wish = OptimizerWish(
            factory=Call(
                path="bitsandbytes.optim:AdamW", arguments={"optim_bits": self.bits, "is_paged": True}
            ),
            prepare=Call(
                path="snugfit.step.bitsandbytes_optimizers:keep_embeddings",
                arguments={"bits": self.embeddings},
            ),
            trainer_name=f"paged_adamw_{self.bits}bit" if self.embeddings == 32 else None,
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

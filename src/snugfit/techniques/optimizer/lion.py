"""Lion of bitsandbytes: the sign of a momentum is the update, so one 32-bit moment is all its state.

State: 4 bytes an element, half of AdamW's, and no temporaries. Every element moves by the learning rate
itself, so it wants one that is a tenth to a third of AdamW's, with as much more decay (Chen et al.,
section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Call, OptimizerWish, Setup
from snugfit.techniques.technique import Fidelity, Technique

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Lion(Technique):
    """The sign of a momentum as the update: one 32-bit moment, half of AdamW's state."""

    fidelity: ClassVar = Fidelity.LEARNS
    needs: ClassVar = ("bitsandbytes>=0.50",)
    extra: ClassVar = "bnb"
    source: ClassVar = "Chen et al., arXiv 2302.06675; bitsandbytes.optim.Lion"
    elsewhere: ClassVar = ("lion_32bit", "lion32bit")
    counterparts: ClassVar = (
        Counterpart(arguments={"optim": "lion_32bit", "adam_beta2": 0.99}),
        Counterpart(
            arguments={"optim": "lion_32bit"},
            note="TrainingArguments give it AdamW's second beta unless adam_beta2 is 0.99",
        ),
    )

    def install(self, setup: Setup) -> Setup:
        """Takes bitsandbytes' Lion, whose moment has 32 bits."""
        wish = OptimizerWish(
            factory=Call(path="bitsandbytes.optim:Lion", arguments={"betas": [0.9, 0.99]}),
            trainer_name="lion_32bit",
            shapes=Call(path="snugfit.step.bitsandbytes_optimizers:shapes"),
        )
        return setup.with_fields(optimizer=wish)

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """A plan keeps the job's learning rate, which is AdamW's."""
        return "it needs a third to a tenth of AdamW's learning rate, so no plan exchanges them by itself"

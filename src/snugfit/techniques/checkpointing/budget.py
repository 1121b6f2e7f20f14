"""Each compiled layer keeps a share of what it would keep, and computes the rest again in its backward pass.

torch cuts a compiled layer into a forward and a backward program. What goes from one to the other is kept:
without a budget whatever is worth its bytes, for what a fused kernel computes again costs nearly nothing.
With one, torch looks for the results whose recomputation takes the fewest multiplications and additions,
until what is kept beyond the layer's inputs is that share of what it was (a knapsack). 0 keeps the inputs
alone, as `every_layer` does; but only what the backward program needs is computed again.

A layer's inputs are its weights too. Autocast keeps copies of 16 bits in the place of weights of 32, so where
activations are few a layer keeps less than its inputs, and then torch heeds no budget but 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import between
from snugfit.techniques.setup import CompileWish, Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

PLANNED = (0.75, 0.5, 0.25)
"""Shares that a plan may choose."""


@dataclass(frozen=True, kw_only=True)
class Budget(Technique):
    """Lets each compiled layer keep a share of its activations, and compute the rest again."""

    fidelity: ClassVar = Fidelity.ROUNDS
    lowered: ClassVar = True
    needs: ClassVar = ("triton>=3.5",)
    extra: ClassVar = "compile"
    caveat: ClassVar = (
        "three steps on an H200 whose host others shared took the bytes that were predicted, and 4 to "
        "64 % more time."
    )
    source: ClassVar = "torch._functorch.config.activation_memory_budget (solver dp, estimator flops)"
    elsewhere: ClassVar = ("activation_memory_budget", "memory_budget")
    counterparts: ClassVar = tuple(
        Counterpart(
            arguments={
                "activation_checkpointing": False,
                compiles: True,
                "functorch.activation_memory_budget": Setting("share"),
            }
        )
        for compiles in ("layers.compile", "forward.compile", "torch_compile")
    )

    share: float = between(0.0, 1.0)
    """Of what a compiled layer would keep beyond its inputs: 1 keeps all of it, and 0 nothing."""

    def install(self, setup: Setup) -> Setup:
        """Compiled programs keep no more than this."""
        return setup.with_fields(compile=replace(setup.compile or CompileWish(), budget=float(self.share)))

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Without a compiler nobody cuts a layer; where nothing is kept, neither are dropout's masks."""
        if recipe[Slot.ENGINE].install(Setup()).compile is None:
            yield "it is for layers that are compiled. Try 'compiled + budget(0.5)', or 'every_layer'."
        if self.share == 0 and (dropout := _dropout(job)):
            yield (
                f"the model has dropout ({dropout}), whose masks would be others in the backward pass. "
                "Try 'budget(0.1)', or 'every_layer'."
            )

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Three quarters, a half and a quarter."""
        yield from (cls(share=share) for share in PLANNED)


def _dropout(job: Job) -> str:
    """The model's dropout as its config names it; empty where it has none, or no config."""
    if job.model.module is not None:
        return ""
    facts = job.transformers_config().to_dict().items()
    return next((f"{k}={v}" for k, v in facts if "drop" in k and isinstance(v, float) and v), "")

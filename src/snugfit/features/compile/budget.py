"""Technique by which each compiled layer keeps a fraction of its activations, and recomputes the rest in the
backward pass.

torch splits a compiled layer into a forward and a backward program. It keeps some results of the first for
the second. Without a budget, torch keeps each result that is expensive to recompute, and recomputes the
others in fused kernels. With a budget, torch solves a knapsack problem. It recomputes the results with the
fewest operations, until the kept bytes beyond the layer's inputs are within the budget. A budget of 0 keeps
only the inputs, like `every_layer`, but recomputes only those results that the backward program needs.

Among a layer's inputs are its weights. With autocast, 16-bit copies are kept instead of fp32 weights. A layer
with few activations may then keep fewer bytes than its inputs have, and torch ignores every budget but 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.features.compile.fields import COMPILE, CompileWish
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

PLANNED = (0.75, 0.5, 0.25)
"""Shares of a layer's activation bytes that a plan may try as a memory budget of compiled code."""


@dataclass(frozen=True, kw_only=True)
class Budget(Technique):
    """Lets each compiled layer keep a fraction of its activations, and recompute the rest in the backward
    pass.
    """

    fidelity: ClassVar = Fidelity.ROUNDS
    lowered: ClassVar = True
    grade_cost: ClassVar = 0.5
    needs: ClassVar = ("triton>=3.5",)
    extra: ClassVar = "compile"
    caveat: ClassVar = (
        "three steps on an H200 whose host others shared took the bytes that were predicted, and 4 to "
        "64 % more time. snugfit measure shows yours."
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
    """Share of the bytes that a compiled layer would keep beyond its inputs: 1 keeps all of them, and 0 none.
    """

    def install(self, setup: Setup) -> Setup:
        """Set the fraction of its activations that a compiled layer keeps for its backward pass
        (`activation_memory_budget`).
        """
        return setup.with_fields(
            compile=replace(COMPILE.of(setup) or CompileWish(), budget=float(self.share))
        )

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: layers are not compiled, or a budget of 0 would lose dropout
        masks.
        """
        if COMPILE.of(recipe[Slot.ENGINE].alone) is None:
            yield "it is for layers that are compiled. Try 'compiled + budget(0.5)', or 'every_layer'."
        # torch ignores the marks that keep random numbers if the budget is 0 (`memory_budget.py`).
        if self.share == 0 and (dropout := job.stated_dropout()):
            yield (
                f"the model has dropout ({dropout}), whose masks would be others in the backward pass. "
                "Try 'budget(0.1)', or 'every_layer'."
            )

    @classmethod
    def grades(cls, job: Job) -> Sequence[Self]:
        """Return memory budgets of three quarters, a half and a quarter of a layer's activations. Each budget
        compiles the layer differently.
        """
        return [cls(share=share) for share in PLANNED]

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield this technique with each memory budget that a plan may try."""
        yield from cls.grades(job)

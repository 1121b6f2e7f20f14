"""Technique by which each compiled layer keeps a fraction of its activations, and recomputes the rest in the
backward pass.

torch cuts a compiled layer into a forward and a backward program. Results that go from one to the other are
kept. Without a budget torch keeps every result that is worth its bytes; a fused kernel recomputes the others
at almost no cost. With a budget torch solves a knapsack problem. It recomputes the results with the fewest
multiplications and additions, until the bytes beyond the layer's inputs fall to that share. 0 keeps the
inputs alone, as `every_layer` does, but recomputes only the needs of the backward program.

A layer's inputs include its weights. Autocast keeps 16-bit copies instead of 32-bit weights. So with few
activations a layer keeps less than its inputs, and torch then ignores every budget but 0.
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

"""Layers compiled by torch.compile: pointwise operators run as few fused kernels, and fewer results are kept.

What a layer computes between its products (norms, activation functions, casts, dropout, residuals) becomes a
few kernels that Triton compiles, so less is written to memory and launched. The backward pass computes cheap
results again where a kept one would cost more. Each of the model's repeated layers is compiled by itself, and
layers that are alike share one program: that takes seconds where a whole model takes a minute, and gains
nearly as much.

The first step compiles. It pays where a run has many steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import CompileWish, Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Compiled(Technique):
    """Compiles the model's repeated layers, each by itself."""

    fidelity: ClassVar = Fidelity.ROUNDS
    lowered: ClassVar = True
    needs: ClassVar = ("triton>=3.5",)
    extra: ClassVar = "compile"
    source: ClassVar = "torch.nn.Module.compile; Ansel et al., ASPLOS 2024 (PyTorch 2)"
    elsewhere: ClassVar = ("compile", "torch_compile", "regional_compilation")
    counterparts: ClassVar = (
        Counterpart(arguments={"torch_compile": False, "layers.compile": True}),
        Counterpart(
            arguments={"torch_compile": True},
            note="torch_compile compiles the whole model in a minute, and attention in it falls to a kernel "
            "that stores every score; what is predicted and run here are the model's layers, compiled one by "
            "one. Leave torch_compile out when you train the recipe",
        ),
    )

    what: Literal["layers", "model"] = "layers"
    """What is compiled: the model's repeated `layers`, and nothing around them."""

    def install(self, setup: Setup) -> Setup:
        """Compiles layers when the modules in them are final."""
        return replace(setup, compile=CompileWish(what=self.what))

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Kernels of other libraries, dispatch modes and layers that are joined do not compile."""
        setup = recipe[Slot.CHECKPOINTING].install(recipe[Slot.ADAPTERS].install(Setup()))
        if setup.quantize is not None:
            yield f"{recipe[Slot.ADAPTERS]}: products with weights in 4 bits are not compiled. Try 'lora'."
        wish = setup.checkpoint
        if wish is not None and (wish.keep or wish.layers_per_span != 1):
            yield (
                f"{recipe[Slot.CHECKPOINTING]} looks into layers that are compiled, or joins several. Try "
                "'every_layer' or 'every_nth_layer'."
            )
        if not job.trains:
            yield "compiled layers are simulated in training only. Leave it out."

    def planned_without(self, recipe: TechniqueBySlot) -> str:
        """Other attention than torch's own choice, of which no compiled step was measured."""
        attention = recipe[Slot.ATTENTION]
        if attention.plain:
            return ""
        return f"never measured with {attention} (--keep '{attention} + {self}' plans with both)"

"""Compiled by torch.compile, pointwise operators run as few fused kernels, and fewer results are kept.

What a layer computes between its products (norms, activation functions, casts, dropout, residuals) becomes a
few kernels that Triton compiles, so less is written to memory and launched. The backward pass computes cheap
results again where a kept one would cost more.

`layers` compiles each of the model's repeated layers by itself, and layers that are alike share one program:
that takes seconds where a whole model takes a minute, and gains nearly as much. `model` compiles the forward
pass and its loss as one, as `torch_compile=True` of the Trainer does: the embeddings, the head and the loss
fuse too. Transformers may then make an explicit mask of what would be none (version 5.17 does, 5.23 does not
where no mask is given), and attention with it falls to a kernel that stores every score: BERT-large with 4 x
512 tokens took 8.3 GB on an H200, and 6.6 GB uncompiled.

The first step compiles. It pays where a run has many steps. Plans look at layers; with `--keep
'compiled(what=model)'` they look at the model. Such recipes are simulated from models of few layers where
that is exact (`rehearsal/few_layers.py`), and from the whole one else, which takes up to a minute.
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
    """Compiles the model's repeated layers, each by itself, or the whole model."""

    fidelity: ClassVar = Fidelity.ROUNDS
    lowered: ClassVar = True
    needs: ClassVar = ("triton>=3.5",)
    extra: ClassVar = "compile"
    source: ClassVar = "torch.nn.Module.compile; Ansel et al., ASPLOS 2024 (PyTorch 2)"
    elsewhere: ClassVar = ("compile", "torch_compile", "regional_compilation")
    counterparts: ClassVar = (
        Counterpart(arguments={"torch_compile": False, "layers.compile": True}),
        Counterpart(arguments={"torch_compile": True}, settings={"what": "model"}),
    )

    what: Literal["layers", "model"] = "layers"
    """What is compiled: the model's repeated `layers`, and nothing around them, or all of the `model`."""

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
        if self.what == "model" and not recipe[Slot.HEAD].plain:
            head = recipe[Slot.HEAD]
            yield f"{head} was not tried in a model that is compiled whole. Try 'compiled + {head}'."

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """A whole model compiles for a minute, and its attention may be another."""
        if self.what == "model":
            yield (
                "a whole model takes a minute to compile, and attention in it may store every score, where "
                "transformers makes a mask in it. 'compiled' takes seconds and keeps attention fused. A "
                "Llama-3.2-1B on an H200 took the bytes that were predicted, and 11 % more time."
            )

    def planned_without(self, recipe: TechniqueBySlot) -> str:
        """Other attention than torch's own choice, of which no compiled step was measured."""
        attention = recipe[Slot.ATTENTION]
        if attention.plain:
            return ""
        return f"never measured with {attention} (--keep '{attention} + {self}' plans with both)"

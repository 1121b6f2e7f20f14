"""Technique `flash`: FlashAttention-2 by the package flash-attn (transformers'
`attn_implementation="flash_attention_2"`).

torch includes the same kernels. Without a mask `sdpa` runs them, or cuDNN's. So without padding this
technique only adds a package that has to be compiled. With a padding mask, `sdpa` runs a kernel that takes
the mask as a matrix. Here transformers gathers the rows without padding around each layer's attention, and
scatters them back. Attention then computes no padding, but gathering has its own costs, and the host waits
for the device in every layer. `padding_free` gathers once for the whole model, and needs no package.

It was not measured on a GPU. The prediction uses torch's own FlashAttention-2, with or without the package.
To measure or train with it, flash-attn must be installed. FlashAttention-3 is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from snugfit.job.job import Job
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

HALVES = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Flash(Technique):
    """Computes attention by the package flash-attn, without padding."""

    fidelity: ClassVar = Fidelity.SAME
    least_capability: ClassVar = (8, 0)
    unplanned: ClassVar = "it was measured on no GPU, so no plan chooses it by itself"
    value: ClassVar = "flash_attention_2"
    source: ClassVar = "Dao, arXiv 2307.08691; flash_attn.flash_attn_func and flash_attn_varlen_func"
    elsewhere: ClassVar = ("flash_attention_2", "flash_attention", "flash_attn", "fa2")
    counterparts: ClassVar = (Counterpart(arguments={"model.attn_implementation": "flash_attention_2"}),)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against this technique: a dtype other than 16 bits, or a model that cannot call
        the package.
        """
        checkpoint = recipe[Slot.CHECKPOINTING].value
        if reason := _why_not(job):
            yield f"{reason}. Take 'sdpa'."
        dtype = recipe[Slot.PRECISION].alone.product_dtype(job)
        if dtype not in HALVES:
            yield f"it computes in 16 bits, and {recipe[Slot.PRECISION]} in {dtype}. Add 'bf16'."
        # Selective checkpointing recognizes torch's attention operators, and not this kernel.
        if checkpoint is not None and checkpoint.keep:
            yield f"{recipe[Slot.CHECKPOINTING]} does not know its kernel. Take 'every_layer' or 'sdpa'."

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning that the prediction uses torch's FlashAttention-2, and that names an equivalent
        technique.
        """
        yield (
            "it was predicted by torch's own FlashAttention-2, whose tensors are the same; to run it, the "
            "package flash-attn must be installed."
        )
        if not job.padding:
            # On Hopper, torch prefers the attention kernels of cuDNN.
            yield (
                "try 'sdpa': without padding it takes the same kernels, or cuDNN's on Hopper, and "
                "needs no package."
            )

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield no settings, so that no plan uses `flash`."""
        # Plans do not try it: it was not measured on a GPU (`unplanned`).
        return iter(())


def _why_not(job: Job) -> str:
    """Return the reason why this job's model cannot use the package flash-attn; empty if it can."""
    model = job.model_class()
    if not getattr(model, "_supports_flash_attn", False):
        return f"transformers has no FlashAttention for {model.__name__}"
    return ""

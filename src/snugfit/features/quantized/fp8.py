"""Matrix products of linear layers in 8-bit floats, by torchao; everything else as with the technique `bf16`.

Both matrices of a product are scaled so that their largest element is the largest that 8 bits represent. Then
they are rounded to 8 bits (e4m3: 3 bits of mantissa; gradients with `tensorwise` e5m2: 2), multiplied, and
scaled back. This applies to all three products of a linear layer: forward, the input's gradient and the
weight's gradient. From Ada Lovelace and Hopper on, tensor cores compute them at twice the rate of 16 bits.
`tensorwise` has one scale for a matrix, `rowwise` one for each row. `rowwise` is more accurate where few
elements are large, and slower: separate kernels rescale two of its three products.

Other operators run as with `bf16`: autocast, with weights in their loaded dtype. accelerate (and the Trainer
over it) does the same where `mixed_precision` is `fp8`. Everything but the linear layers of the repeated
layers (embeddings, norms, attention, the head, the loss) is computed as with `bf16`. The technique saves no
memory: weights, gradients, optimizer states and saved activations stay in 16 or 32 bits.

Separate kernels find the largest element, scale and round, and read and write each matrix about ten times.
Compilation (`compiled`) fuses them into two. Uncompiled they take longer than the faster products save,
unless matrices are very large. So torchao recommends compilation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from snugfit.features.quantized.fields import Float8Wish
from snugfit.job.build import instantiate
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Fp8(Technique):
    """Computes matrix products of linear layers in 8-bit floats, and all other operators as bf16 does."""

    fidelity: ClassVar = Fidelity.LEARNS
    needs: ClassVar = ("torchao>=0.18",)
    extra: ClassVar = "fp8"
    single_process: ClassVar = True
    least_capability: ClassVar = (8, 9)
    caveat: ClassVar = (
        "the seconds of products in 8-bit floats take the rate of the data sheet, and the share of it "
        "that products in bfloat16 reach. Four steps on an H200 whose host others shared took the bytes "
        "that were predicted and 10 to 84 % more time. snugfit measure shows yours."
    )
    source: ClassVar = "Micikevicius et al., arXiv 2209.05433; torchao.float8.convert_to_float8_training"
    elsewhere: ClassVar = ("float8", "fp8_mixed")
    advice: ClassVar = {
        "mxfp8": "blocks with a scale of their own are not supported so far. 'fp8' scales whole matrices, or "
        "with rowwise their rows."
    }
    counterparts: ClassVar = tuple(
        Counterpart(arguments={"bf16": True, "fp16": False, "layers.float8": name}, settings={"recipe": name})
        for name in ("tensorwise", "rowwise")
    )

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Range of one scale: a whole matrix, or each of its rows."""

    def install(self, setup: Setup) -> Setup:
        """Return the setup with autocast as in bf16, and with the conversion of linear layers."""
        return setup.with_precision(products="bfloat16").with_fields(float8=Float8Wish(recipe=self.recipe))

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against this technique: no trained linear layers, or other techniques that do not
        combine with it.
        """
        checkpoint = recipe[Slot.CHECKPOINTING].value
        if not job.trains:
            yield "its products are simulated in training only. Try 'bf16'."
        elif reason := _why_unconverted(job):
            yield f"{reason}. Try 'bf16'."
        if not recipe[Slot.ADAPTERS].plain:
            yield (
                f"{recipe[Slot.ADAPTERS]} freezes the linear layers, and torchao would compute gradients of "
                "their weights all the same; the adapters are too thin to gain. Try 'bf16'."
            )
        if checkpoint is not None and checkpoint.keep:
            yield (
                f"{recipe[Slot.CHECKPOINTING]} knows products by their operators, and these have others. "
                "Try 'every_layer'."
            )


def _why_unconverted(job: Job) -> str:
    """Return the reason why no linear layer of this job's model can use 8-bit floats; empty if some can."""
    from snugfit.features.quantized.float8 import why_unconverted

    module = job.model.module
    if module is not None:
        return why_unconverted(module)
    key = f"{job.task} {json.dumps(job.model.config, sort_keys=True, default=str)}"
    if key not in _REASONS:
        import torch

        with torch.device("meta"):
            _REASONS[key] = why_unconverted(instantiate(job, dtype="float32", attention="eager"))
    return _REASONS[key]


_REASONS: dict[str, str] = {}
"""Cached reasons against the technique, by task and config. Building a model without data takes up to a
second.
"""

"""Weights of linear layers in 4 or 8 bits by bitsandbytes, for inference.

transformers quantizes while it loads (`BitsAndBytesConfig`). Formats and kernels are those of the technique
`qlora`. Four bits are NF4 with one scale for 64 weights, and `double` stores the scales in 8 bits. Eight bits
are integers with one scale for a row. Embeddings, normalisations and the head stay as they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from snugfit.features.quantized.fields import QuantizeWish
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class LowBits(Technique):
    """Loads the weights of linear layers in 4 or 8 bits, for inference (evaluation and generation)."""

    # Quantized weights change a model's outputs, so plans use them only with permission.
    fidelity: ClassVar = Fidelity.LEARNS
    caveat: ClassVar = "no GPU measured its products in evaluation or generation, so seconds are uncertain."
    needs: ClassVar = ("bitsandbytes>=0.50",)
    extra: ClassVar = "qlora"
    source: ClassVar = "Dettmers et al., arXiv 2208.07339, 2305.14314; transformers.BitsAndBytesConfig"

    bits: Literal[4, 8] = 4
    """Bits of a weight."""

    double: bool = False
    """True quantizes the scales of 4-bit weights too."""

    def install(self, setup: Setup) -> Setup:
        """Return the setup with the quantization of weights while the model is built."""
        return setup.with_fields(quantize=QuantizeWish(bits=self.bits, double=self.double))

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against this technique: training, and models that transformers does not build."""
        if job.trains:
            yield "quantized weights do not train. Try 'qlora', which trains adapters too."
        if job.model.module is not None:
            yield (
                "weights are quantized while transformers loads a model, and this module is loaded already. "
                "Load it with quantization_config=BitsAndBytesConfig(...), and leave this out."
            )
        if self.bits == 8 and job.build_on == "host":
            yield "weights of 8 bits are quantized on the GPU. Leave build_on out, or try low_bits."

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why a plan leaves this technique out: the job trains, or its model is a user's
        module.
        """
        if job.trains:
            return "quantized weights do not train"
        return "the module's weights are loaded already" if job.model.module is not None else ""

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the technique with 4 and with 8 bits, for an inference job with a model that transformers
        builds.
        """
        if not job.trains and job.model.module is None:
            yield from (cls(bits=8), cls(bits=4))

"""QLoRA: frozen weights in 4 or 8 bits, with trained LoRA adapters (Dettmers et al., arXiv 2305.14314).

bitsandbytes stores each linear layer's weight as 4-bit numbers of NF4, two to a byte, with one scale for 64
of them. With `double` the scales themselves are 8-bit numbers: 0.516 bytes a weight in all, else 0.5625. Each
product, forward and backward, dequantizes the whole weight into the dtype of the computation. This temporary
tensor is as large as the largest layer. Small batches use a kernel without it. Embeddings, normalisations,
the head and fused experts (`experts.py`) are not quantized. `experts=true` quantizes experts too
(`packed_experts.py`). `experts=mxfp4` keeps those of gpt-oss in their own format (OCP Microscaling Formats
1.0). It has a scale of 8 bits for 32 numbers: 0.531 bytes a weight.

With `bits=8` weights are integers with one scale for a row (LLM.int8(), arXiv 2208.07339): 1 byte a weight.

The precision slot sets the other dtypes. With `bf16` or `fp16`, all unquantized weights are fp32 and products
are computed in 16 bits. That is `prepare_model_for_kbit_training` of peft and `bf16=True` of the Trainer, as
in axolotl and the guides of transformers and peft. With `bf16_pure` everything is bfloat16 but the adapters,
which are fp32, as TRL and LLaMA-Factory load it. Then embeddings and head are half as large. Weights are
quantized from the dtype of the computation, one by one. So at most one unquantized weight is on the GPU at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from snugfit.features.adapters.low_rank import ARGUMENTS, LowRank
from snugfit.features.quantized.fields import MXFP4, QuantizeWish
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import ALL_LINEAR, Fidelity, Slot, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

GPT_OSS = "gpt_oss"
"""Model type whose files have experts in MXFP4."""

_CONFIG = {
    **ARGUMENTS,
    "model.quantization_config.load_in_4bit": True,
    "model.quantization_config.bnb_4bit_use_double_quant": Setting("double"),
}


@dataclass(frozen=True, kw_only=True)
class Qlora(LowRank):
    """Freezes the model in 4 or 8 bits and trains low-rank updates of some of its matrices."""

    title: ClassVar = "QLoRA"
    fidelity: ClassVar = Fidelity.LEARNS
    needs: ClassVar = ("peft>=0.19", "bitsandbytes>=0.50")
    extra: ClassVar = "qlora"
    source: ClassVar = "Dettmers et al., arXiv 2305.14314; transformers.BitsAndBytesConfig, peft.LoraConfig"
    advice: ClassVar = dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "4bit", "8bit", "int4", "int8", "nf4", "bitsandbytes"),
        "'qlora' keeps the frozen weights in 4 bits (bits=8: in 8) and trains LoRA adapters.",
    )
    counterparts: ClassVar = (
        Counterpart(arguments={**_CONFIG, "model.quantization_config.bnb_4bit_quant_type": "nf4"}),
        Counterpart(
            arguments={**_CONFIG, "model.quantization_config.bnb_4bit_quant_type": "fp4"},
            note="nf4 in the place of fp4: other numbers, of the same bytes",
        ),
        Counterpart(
            arguments={
                **ARGUMENTS,
                "model.quantization_config.load_in_4bit": False,
                "model.quantization_config.load_in_8bit": True,
            },
            settings={"bits": 8},
        ),
    )

    double: bool = True
    """True quantizes the scales of 4-bit weights too."""

    bits: Literal[4, 8] = 4
    """Bits of a frozen weight."""

    experts: Literal[False, True, "mxfp4"] = False
    """True stores the weights of experts in 4 bits too, which bitsandbytes leaves in 16. `mxfp4` keeps those
    of gpt-oss's files as they are.
    """

    def install(self, setup: Setup) -> Setup:
        """Return the setup with the quantization of weights while the model is built, and with peft's
        adapters.
        """
        quantize = QuantizeWish(bits=self.bits, double=self.double, experts=self.experts)
        return super().install(setup).with_fields(quantize=quantize)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against this technique: a model that transformers does not build, or techniques
        that read the weights.
        """
        if job.model.module is not None:
            yield (
                "weights are quantized while transformers loads a model, and this module is "
                "loaded already. Load it with quantization_config=BitsAndBytesConfig(load_in_4bit=True), add "
                "the adapters (peft.get_peft_model), and leave adapters out of the recipe; or use lora."
            )
        if self.bits == 8 and job.build_on == "host":
            yield "weights of 8 bits are quantized on the GPU. Leave build_on out, or try bits=4."
        if self.bits == 8 and not recipe[Slot.SHARDING].plain:
            yield f"8-bit weights are not simulated together with {recipe[Slot.SHARDING]}. Try bits=4."
        if self.experts:
            yield from self._objections_to_experts(job, recipe)
        yield from super().objections(job, recipe)
        engine, checkpointing = (recipe[slot] for slot in (Slot.ENGINE, Slot.CHECKPOINTING))
        if engine.alone.lowering is not None:
            yield f"products with quantized weights are not compiled, so leave {engine} out, or try 'lora'."
        if (wish := checkpointing.value) is not None and wish.keep:
            yield (
                f"products with quantized weights are bitsandbytes' own operators, of which {checkpointing} "
                "keeps nothing. Try 'every_layer', or 'lora'."
            )

    def _objections_to_experts(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against experts in 4 bits."""
        if self.bits == 8:
            yield "experts=true needs bits=4."
        if not any("expert" in key for key in job.model.config):
            yield f"{job.model.name} has no experts. Leave experts out."
        elif self.experts == MXFP4:
            yield from self._objections_to_mxfp4(job, recipe)
        if recipe[Slot.KERNELS].name != "fused":
            yield (
                f"experts of 4 bits are unpacked for each product by 'fused', and {recipe[Slot.KERNELS]} "
                "would keep them unpacked. Add 'fused'."
            )

    def _objections_to_mxfp4(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against experts in MXFP4."""
        if (kind := job.model.config.get("model_type")) != GPT_OSS:
            yield f"experts=mxfp4 is the format of gpt_oss, and this model is {kind}. Try experts=true."
        if not recipe[Slot.SHARDING].plain:
            yield f"experts=mxfp4 was not tried together with {recipe[Slot.SHARDING]}. Try experts=true."

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the technique with common LoRA ranks on every linear layer, as in the paper."""
        if job.model.module is None:
            yield from (cls(r=rank, targets=(ALL_LINEAR,)) for rank in (8, 64))

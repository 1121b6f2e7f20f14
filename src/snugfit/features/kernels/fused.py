"""Technique `fused`: snugfit's own kernels for the operators between a layer's matrix products, one kernel
for each group, forward and backward.

Dropout, residual and norm are one kernel, bias and GELU another. Masks of dropout are not stored but drawn
again in the backward pass. Their seed comes from torch's own generator in each forward pass, so a run resumes
bit for bit. Queries, keys and values are one matrix product. Weights keep their names in the model. Norms
return their result in the dtype of the products. Encoders that norm after a layer have the residual in 32
bits beside it, as under autocast. FSDP2 gathers adjacent weights into one buffer if its processes have equal
parts of each. Passes copy other gathered weights of a joint product side by side.

In decoders, the addition of a branch and the norm after it are one kernel. So are the gated activation, and
the rotation of queries and keys, which runs in place in their product. The stream of tokens stays in 32 bits
where autocast leaves it there. Layers save the stream, queries, keys and values, and the product of gate and
up. They recompute normed tensors and the input of the last product. The product of gate and up is the largest
of them. With `recomputed_mlps` that many layers, from the first, recompute it too. This frees more bytes for
a second than recomputing whole layers does. Beside `chunked_loss` a kernel writes the gradient of logits over
the logits.

Experts are grouped products over rows sorted by expert, so that no size depends on the routing
(`decoders/experts/`). Adapters of experts are applied to the rows.

LoRA adapters of decoders are part of the joint products (`operations/low_rank.py`), which are added to their
updates. Frozen weights get no gradients, and the layer's input is not copied. Weights of 4 bits are unpacked
for each product (`operations/four_bits.py`). Layers with unsupported settings of peft run its own code, and a
warning lists the settings (`operations/adapted.py`). So do encoders' layers.

Dropout masks differ from those of torch. Attention is torch's own: `sdpa`, which uses its fast kernels for a
batch without a mask, or `padding_free`. A padded batch of an encoder in 16 bits runs the kernels for
sequences of several lengths, without a mask. With `padding_free` its padding is not computed at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.features.kernels.attentions import PADDING_FREE
from snugfit.features.kernels.decoders.experts.forms import has_experts
from snugfit.features.kernels.decoders.forms import fused_parts
from snugfit.features.kernels.fields import FusedWish
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot
from snugfit.techniques.wish import used_wishes

if TYPE_CHECKING:
    from snugfit.job.job import Job

ENCODERS = ("bert", "distilbert", "electra", "gpt2", "roberta", "vit")
"""Model types of transformers whose encoder layers `encoders.py` supports; also GPT-2."""

COVERED = (
    f"{', '.join(ENCODERS)}, decoders with the code of Llama, Qwen, Mistral, Gemma, Phi-3 or GLM-4, and "
    "experts with that of Mixtral or gpt-oss"
)
"""Models of the technique in messages."""

TILE, LONG = 8192, 32768
"""Tokens of an MLP's tile in plans, and the least length of their sequences (chosen). Products of 8,192 rows
fill a GPU, and a recomputed layer of shorter sequences has no wider tensors than its attention's."""


@dataclass(frozen=True, kw_only=True)
class Fused(Technique):
    """Runs snugfit's Triton kernels for norms, activations and dropout, and computes queries, keys and values
    by one matrix product.
    """

    fidelity: ClassVar = Fidelity.ROUNDS
    needs: ClassVar = ("triton>=3.0",)
    extra: ClassVar = "compile"
    on_cpu: ClassVar = "runs as plain torch code: its kernels are for GPUs"
    least_capability: ClassVar = (8, 0)  # older GPUs were not tested
    source: ClassVar = (
        "the fusions of Ivanov et al., arXiv 2007.00072; dropout as in Tillet et al.'s Triton tutorials; "
        "Philox: Salmon et al., SC 2011"
    )

    recomputed_mlps: int = between(0, 10_000, default=0)
    """Number of decoder layers, from the first, whose product of gate and up is recomputed in the backward
    pass."""

    mlp_tokens: int | None = between(16, 1 << 20, default=None)
    """Tokens for which a gated MLP is computed at a time. Its products are computed again in the backward
    pass. The default computes all tokens at once."""

    @property
    def within_modules(self) -> bool:
        """Return True: each layer reads only its own weights."""
        return True

    def install(self, setup: Setup) -> Setup:
        """Return the setup with snugfit's kernels in place of the code of the model's modules."""
        wish = FusedWish(recomputed_mlps=self.recomputed_mlps, mlp_tokens=self.mlp_tokens)
        return setup.with_fields(fused_kernels=wish)

    def is_searched(self) -> bool:
        """Return True if all layers are alike, so that a simulation of a few layers suffices."""
        return not self.recomputed_mlps

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against this technique: an unsupported model, attention that is not torch's, or
        other changes of its code.
        """
        if reason := self.planning_objection(job):
            yield f"{reason} Try 'torch_kernels'."
        elif self.recomputed_mlps and not _is_gated(job):
            yield f"no gated MLP is in {job.model.name}. Try 'fused', or 'first_layers'."
        if self.mlp_tokens:
            yield from self._objections_to_tiles(job, recipe)
        if not job.trains:
            yield "its kernels are those of training. Try 'torch_kernels'."
        if recipe[Slot.ENGINE].alone.lowering is not None:
            yield (
                f"{recipe[Slot.ENGINE]} compiles the code that it would replace, and was not tested with "
                "it. Leave one of them out."
            )
        if recipe[Slot.ATTENTION].value not in ("sdpa", PADDING_FREE):
            yield f"it needs torch's attention, and {recipe[Slot.ATTENTION]} is another. Take 'sdpa'."

    def _objections_to_tiles(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against MLPs in tiles: no such MLP, kept products, or adapters with dropout."""
        checkpoint = recipe[Slot.CHECKPOINTING].value
        if not _has_tiles(job):
            yield f"no MLP of {job.model.name} is computed in tiles. Try 'fused'."
        if self.recomputed_mlps:
            yield "mlp_tokens recomputes the product of gate and up in all layers. Leave recomputed_mlps out."
        if checkpoint is not None and checkpoint.keep not in ("", "attention"):
            yield f"{recipe[Slot.CHECKPOINTING]} keeps the products of all tiles. Try 'selective(attention)'."
        if job.model.module is None and getattr(recipe[Slot.ADAPTERS], "dropout", None):
            yield (
                f"{recipe[Slot.ADAPTERS]} drops elements of an MLP's input, whose masks are drawn for all "
                "tokens at once. Try dropout=0.0, or 'fused'."
            )

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning if the model has fewer layers than the setting recomputes."""
        if (layers := job.model.layers) and self.recomputed_mlps > layers:
            yield (
                f"{job.model.name} has {layers} layers, so all of them recompute the product. Give a "
                "smaller number to recompute fewer."
            )

    def warnings_beside(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield a warning if layers with adapters run peft's own code."""
        if reason := _own_code(job, recipe[Slot.ADAPTERS]):
            yield f"layers with adapters run peft's own code, as there are no kernels for {reason}."

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the technique for supported models, and with MLPs in tiles for long sequences."""
        if cls.planning_objection(job):
            return
        yield cls()
        if job.sequence_length >= LONG and job.model.module is None and _has_tiles(job):
            yield cls(mlp_tokens=TILE)

    def smaller(self, job: Job) -> Sequence[Self]:
        """Return settings that need less memory. Each recomputes the product of gate and up in one more
        decoder layer, up to all.
        """
        if self.recomputed_mlps or job.model.module is not None or not _is_gated(job):
            return ()
        return [replace(self, recomputed_mlps=k) for k in range(1, job.model.layers + 1)]

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan uses this technique: it changes nothing in this job's model. Return
        an empty text if it has an effect.
        """
        module = job.model.module
        if module is None:
            types = {str(job.model.config.get("model_type"))}
        else:
            names = [type(one).__module__.rpartition(".modeling_") for one in module.modules()]
            types = {name for folder, _, name in names if folder == f"transformers.models.{name}"}
        if any(name in ENCODERS or fused_parts(name) or has_experts(name) for name in types):
            return ""
        name = types.pop() if module is None else type(module).__name__
        return f"fused has no kernels for {name}. It covers {COVERED}."


def _own_code(job: Job, adapters: Technique) -> str:
    """Return the settings of adapters for which no kernels exist; empty if all are supported."""
    if job.model.module is not None:
        from snugfit.features.kernels.operations.adapted import unsupported_settings

        return ", ".join(unsupported_settings(job.model.module))
    if not any(wish.freezes for wish in used_wishes(adapters.alone)):
        return ""
    if job.model.config.get("model_type") == "gpt2":
        return "adapters of a Conv1D"
    if getattr(adapters, "bits", 4) == 8:
        return "weights of 8 bits"
    has_dora, drops = getattr(adapters, "dora", False), getattr(adapters, "dropout", 0.0)
    return "DoRA with dropout" if has_dora and drops else ""


def _has_tiles(job: Job) -> bool:
    """Return True if MLPs of the job's model can be computed in tiles, which experts' cannot; a user's own
    module is checked later.
    """
    return job.model.module is not None or "MLP" in fused_parts(str(job.model.config.get("model_type")))


def _is_gated(job: Job) -> bool:
    """Return True if the layers of the job's model have gated MLPs; a user's own module is checked later."""
    if job.model.module is not None:
        return True
    model_type = str(job.model.config.get("model_type"))
    parts = fused_parts(model_type)
    return has_experts(model_type) or ("MLP" in parts and "Experts" not in parts)

"""torch's flex_attention: one attention kernel that the compiler generates from the model's own mask.

transformers divides the mask into blocks of 128 x 128 scores. The kernel skips blocks that are masked
completely: padding, positions outside of a window, other sequences in the same row. The matrix of all scores
never exists. Unlike other fused kernels, its backward pass needs no fp32 copy of the queries' gradient.
transformers compiles the kernel at its first call; the rest of the model is not compiled.

The technique needs Triton and a GPU, because flex_attention has no backward pass on a CPU. Without a mask, or
with a causal one, `sdpa` has hand-written kernels. The predicted seconds are those of flash attention over
all positions, without a discount for masked blocks. A Llama-3.2-1B on an H200 took the predicted bytes and a
tenth less time. Its first step took 19 s; the time to compile the attention is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from snugfit.job.job import Job
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
"""Keys of model configs that have the dropout rate of attention scores."""


@dataclass(frozen=True, kw_only=True)
class Flex(Technique):
    """Computes attention by torch's flex_attention, compiled, which skips blocks that a mask hides."""

    fidelity: ClassVar = Fidelity.SAME
    least_capability: ClassVar = (8, 0)
    needs: ClassVar = ("triton>=3.0",)
    extra: ClassVar = "compile"
    unplanned: ClassVar = "one step of it was measured, so no plan chooses it by itself"
    caveat: ClassVar = "the first step compiles its kernels, which takes some seconds that are not predicted."
    value: ClassVar = "flex_attention"
    source: ClassVar = "Dong et al., arXiv 2412.05496; torch.nn.attention.flex_attention"
    elsewhere: ClassVar = ("flex_attention", "flexattention")
    counterparts: ClassVar = (Counterpart(arguments={"model.attn_implementation": "flex_attention"}),)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: dropout in attention, or checkpointing that keeps a part of
        attention.
        """
        wish = recipe[Slot.CHECKPOINTING].value
        if reason := _why_not(job):
            yield f"{reason}. Take 'sdpa'."
        if wish is not None and wish.keep:
            yield f"{recipe[Slot.CHECKPOINTING]} does not know its kernel. Take 'every_layer' or 'sdpa'."

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield no settings, so that no plan tries flex_attention."""
        return iter(())


def _why_not(job: Job) -> str:
    """Return why this job's model cannot use flex_attention; empty if it can."""
    model, module = job.model_class(), job.model.module
    if not getattr(model, "_supports_flex_attn", False):
        return f"transformers has no flex_attention for {model.__name__}"
    config: Any = job.config_to_read() if module is None else module.config
    # T5's position bias is added to the scores.
    if config.is_encoder_decoder:
        return f"{model.__name__} adds its positions to the scores, which was not tested with it"
    text = config.get_text_config()
    drops = {key: share for key in DROPOUTS if (share := getattr(text, key, 0.0))}
    if job.trains and drops:
        dropouts = ", ".join(f"{key} = {share}" for key, share in drops.items())
        return f"it drops no scores of attention, and the config of {job.model.name} has {dropouts}"
    return ""

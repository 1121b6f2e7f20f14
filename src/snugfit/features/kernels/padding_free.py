"""Technique `padding_free`: the sequences of a batch are concatenated without padding, and attention stays
within each.

A batch of B sequences is as long as its longest, and every layer computes the padding too. Here the padding
is dropped before the model begins, so a step's activations, logits and time are proportional to the real
tokens. Results are the same: attention within each sequence, the loss over the same tokens. Only dropout
masks differ.

Attention is FlashAttention's for sequences of several lengths, which torch includes (the operator behind
`torch.nn.attention.varlen`). It needs 16 bits, Ampere or later, and heads of up to 256 numbers, but no
package. In batches without padding, the only effect is to bypass torch's own choice of an attention kernel
(on Hopper cuDNN's).

snugfit's own loop drops the padding on the host without waiting. A step in a CUDA graph pads its rows to few
lengths. In other loops (the Trainer, Accelerate, a user's own) the batch is on the device when the model is
called. There the host waits once per micro-batch to read the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from snugfit.features.kernels.attentions import PADDING_FREE
from snugfit.job.job import Job, Task
from snugfit.job.kv_prefix import prompt_kind
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot, setup_of

TASKS = (Task.CAUSAL_LM, Task.MASKED_LM, Task.TOKEN_CLASSIFICATION)
"""Tasks whose models have one output for each token."""

TOKEN_OUTPUT_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")
"""Endings of transformers' class names of models with one output for each token."""

FIRST_TOKEN_POOLED = ("bert", "roberta", "electra", "distilbert", "xlm-roberta", "camembert")
"""Model types of transformers that classify a sequence by its first token's hidden state."""

HALVES = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class PaddingFree(Technique):
    """Drops the padding of a batch and concatenates its sequences, with
    attention within each."""

    fidelity: ClassVar = Fidelity.SAME
    least_capability: ClassVar = (8, 0)
    drops_padding: ClassVar = True
    value: ClassVar = PADDING_FREE
    source: ClassVar = (
        "Dao, arXiv 2307.08691; torch.nn.attention.varlen's operator; transformers' "
        "DataCollatorWithFlattening, trl's padding_free"
    )
    elsewhere: ClassVar = ("varlen", "varlen_attention", "packing", "remove_padding", "unpad", "unpadding")

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against this technique: a model without an output for each token, or with
        unsupported attention.
        """
        setup = setup_of(*(recipe[slot] for slot in (Slot.PRECISION, Slot.SHARDING)))
        if not job.trains:
            yield "it drops padding in training alone. Take 'sdpa'."
        elif reason := _why_not(job):
            yield f"{reason} Try 'sdpa'."
        dtype = setup.product_dtype(job)
        if dtype not in HALVES:
            yield f"its attention computes in 16 bits, and {recipe[Slot.PRECISION]} in {dtype}. Add 'bf16'."
        for other in (recipe[slot] for slot in (Slot.TENSOR_PARALLEL, Slot.PIPELINE_PARALLEL)):
            if not other.plain:
                yield f"it is not simulated together with {other}. Take 'sdpa'."

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the technique without settings, for models that it supports."""
        if not _why_not(job):
            yield cls()

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan uses this technique; empty if a plan may. Batches without padding
        need no import of the model.
        """
        return _why_not(job) if job.padding else "batches have no padding, so there is none to drop"

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning if the job's batches have no padding to drop."""
        if not job.padding:
            yield "batches have no padding, so there is none to drop. Try 'sdpa', which is as small."


def _why_not(job: Job) -> str:
    """Return the reason why the padding of this job's batches cannot be dropped; empty if it can."""
    module, model = job.model.module, job.model_class()
    config: Any = job.config_to_read() if module is None else getattr(module, "config", None)
    known = job.task in TASKS if module is None else model.__name__.endswith(TOKEN_OUTPUT_SUFFIXES)
    # A head for sequences is supported only if it reads the first token.
    if model.__name__.endswith("ForSequenceClassification"):
        known = config.model_type in FIRST_TOKEN_POOLED
    if not known:
        more = f"it knows {', '.join(TASKS)}, and encoders that classify a sequence by its first token."
        return f"the outputs of {model.__name__} may belong to whole sequences; {more}"
    if not getattr(model, "_supports_flash_attn", False) or config.is_encoder_decoder:
        return f"{model.__name__} does not support FlashAttention, whose kernels it needs."
    if module is not None and (kind := prompt_kind(module)):
        # A prompt would have to be inserted into each sequence of the row.
        return (
            f"the model's {kind} adapters put a prompt before each sequence, and one row has one beginning."
        )
    return ""

"""Technique `chunked_loss`: a language model's loss in chunks of tokens, so that all logits never exist at
once.

Logits of 4,096 tokens over a vocabulary of 128,256 take 1 GiB in bfloat16. A copy in 32 bits, softmax and
gradient bring that to about six times as much. For small models that exceeds all other memory. With chunks,
the peak is at the end of the forward pass. There all activations are alive, and gradients of the head already
exist.

A head may have a kernel (`LossKernel`), which computes a chunk's loss and overwrites its logits with their
gradient. No other tensor of their size is allocated. So chunks in 16 bits have twice as many tokens there,
and the head's gradient is accumulated half as often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.job.inputs import has_classes
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setting import between
from snugfit.techniques.setup import LOGITS_BYTES, LogitsWish
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss(Technique):
    """Computes logits, loss and gradient for some tokens at a time, and never
    all logits at once."""

    # With 16-bit products, the head's gradient is rounded once per chunk, also for fp32 weights under
    # autocast.
    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = (
        "the fused linear cross-entropy of Hsu et al., arXiv 2410.10989 (Liger), in plain torch; torch's own "
        "is torch.nn.functional.linear_cross_entropy"
    )
    elsewhere: ClassVar = (
        "chunked_nll",
        "chunked_cross_entropy",
        "fused_linear_cross_entropy",
        "linear_cross_entropy",
        "cut_cross_entropy",
    )
    counterparts: ClassVar = tuple(
        Counterpart(
            arguments={"loss_type": name}, note="TRL cuts the vocabulary where snugfit cuts the tokens"
        )
        for name in ("nll", "chunked_nll")
    )

    tokens: int | None = between(1, 1 << 20, default=None)
    """Tokens at a time, by default the power of two with up to 256 MiB of logits (in 32 bits; with a kernel,
    in their dtype).
    """

    @property
    def within_modules(self) -> bool:
        """Return True: the head's weight is read in the model's forward pass only."""
        return True

    @property
    def value(self) -> LogitsWish:
        """Return the technique's setting: the number of tokens whose logits are computed at once."""
        return LogitsWish(tokens=self.tokens)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reason against this technique for a model without a head over a vocabulary."""
        if job.trains and (reason := _lacks_vocabulary(job)):
            yield f"{reason}. Try 'whole_logits'."

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the technique without settings, for models with a vocabulary."""
        if not _lacks_vocabulary(job):
            yield cls()

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan uses chunked logits: no vocabulary, or so few logits that one chunk
        contains them.
        """
        vocabulary = job.model.config.get("vocab_size")
        if reason := _lacks_vocabulary(job):
            return reason
        # Only the decoder's tokens have logits.
        length = job.target_length if job.task == "seq2seq-lm" else job.sequence_length
        # The sizes of logits are compared in fp32, as for the default chunk.
        if vocabulary and 4 * vocabulary * job.batch_size * length <= LOGITS_BYTES:
            return "all logits of this job are no more than one chunk"
        return ""


def _lacks_vocabulary(job: Job) -> str:
    """Return the reason why the job's model has no logits over a vocabulary; empty if it may have some."""
    module = job.model.module
    if module is not None and not hasattr(module, "get_output_embeddings"):
        return f"{type(module).__name__} has no get_output_embeddings, which would name its head"
    if module is None and has_classes(job.task):
        return f"the loss of {job.task} is not over a vocabulary"
    return ""

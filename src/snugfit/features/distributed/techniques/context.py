"""Context parallelism by torch's ring attention: each sequence is cut over a group of GPUs.

Each GPU of a group has two pieces of every sequence, one from its front and one from its back. So all GPUs
have the same work in attention. Layers other than attention process each token alone, so pieces give the same
results. In attention, keys and values go around the ring, and the results of the pieces are merged
(`context_parallel` of torch.distributed). It helps where activations of long sequences do not fit:
activations and logits shrink by n. Weights do not shrink: `fsdp` with it shards them over all GPUs, those of
a group too.

Ring attention supports causal masks only. torch's version keeps the random numbers of its last piece alone,
so it has no dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from snugfit.features.distributed.fields import PARALLEL, RING, SHARDING, ParallelWish
from snugfit.features.distributed.techniques import several_gpus
from snugfit.job.job import Task
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import MOST_GPUS
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot, setup_of

if TYPE_CHECKING:
    from snugfit.job.job import Job

ROTARY = ("default", "linear", "llama3", "yarn")
"""Types of rotary positions whose angles depend only on a token's own position. Others (`dynamic`,
`longrope`) read the largest position of a batch, which differs between parts of a sequence.
"""

HALVES = ("bfloat16", "float16")

ALIGNED = 32
"""Alignment, in tokens, of efficient attention's statistics (`kAlignLSE`). It is the only attention kernel
for fp32. Parts whose length is no multiple of this cannot be merged.
"""

DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
"""Config keys for the dropout probability of attention."""


HOW_MEASURED = (
    "On two H100s three steps with it were measured. Bytes were exact; steps took 14 and 9 % longer "
    "and 3 % less than predicted. One step with fsdp on four H200s had exact bytes again. Groups of "
    "more than two GPUs were not measured. snugfit measure --gpus shows yours."
)


@dataclass(frozen=True, kw_only=True)
class ContextParallel(Technique):
    """Divides each sequence over n GPUs, which pass keys and values around (ring attention)."""

    fidelity: ClassVar = Fidelity.ROUNDS
    caveat: ClassVar = HOW_MEASURED
    source: ClassVar = "Liu et al., Ring Attention, arXiv 2310.01889; torch's context_parallel"
    elsewhere: ClassVar = ("context_parallel", "cp", "ring_attention")
    needs_several_gpus: ClassVar = True
    least_capability: ClassVar = (8, 0)

    n: int = between(2, MOST_GPUS)
    """Number of GPUs that share a sequence, best within one host."""

    def install(self, setup: Setup) -> Setup:
        """Set the Setup's `parallel` field to cut sequences, and its attention to ring attention."""
        # Any other attention function is kept, so that `objections` can refuse it.
        attention = RING if setup.attention == "sdpa" else setup.attention
        return several_gpus.along(setup, context=self.n).with_fields(attention=attention)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: settings that ring attention does not support, or that are not
        simulated on several GPUs.
        """
        setup = setup_of(*(recipe[slot] for slot in Slot if slot is not self.slot))
        wish = PARALLEL.of(setup) or ParallelWish(weights="alone")
        yield from several_gpus.objections(job, recipe, replace(wish, context=self.n))
        if SHARDING.of(setup) is not None:
            yield (
                f"it cannot be combined with {recipe[Slot.SHARDING]}, which is DeepSpeed's. Take "
                f"'fsdp' or 'ddp'."
            )
        if wish.ranks_of_one_part > 1 or wish.experts > 1:
            yield "it is not simulated together with tensor, pipeline or expert parallelism. Leave them out."
        if setup.attention != "sdpa":
            yield f"torch's ring attention is SDPA's, and {recipe[Slot.ATTENTION]} is another. Take 'sdpa'."
        if job.padding:
            yield (
                f"{job.padding:.0%} of each sequence is padding, and ring attention does not "
                f"support masks. Fill "
                "sequences (--padding 0; pack: true when training)."
            )
        # The dtype is that of gathered weights if they are cast, then autocast's, then that of the weights.
        yield from self._of_lengths(job, wish.dtype or setup.product_dtype(job))
        if job.model.module is None:
            yield from _of_model(job)

    def _of_lengths(self, job: Job, dtype: str) -> Iterator[str]:
        """Yield the reasons why sequences of this length cannot be split for attention in this dtype."""
        of_a_piece = 1 if dtype in HALVES else ALIGNED
        least = 2 * self.n * of_a_piece
        if not job.sequence_length % least:
            return
        below = job.sequence_length // least * least
        near = " or ".join(str(length) for length in (below, below + least) if length)
        pieces = f"{2 * self.n} equal pieces, two for each of {self.n} GPUs"
        if of_a_piece > 1:
            pieces += f", of a multiple of {ALIGNED} tokens, as attention in {dtype} needs them"
        yield (
            f"sequences of {job.sequence_length} tokens cannot be cut into {pieces}. "
            f"Try --sequence-length {near}."
        )

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield settings for groups of GPUs that fit into one host, with sequence lengths that attention
        supports in any dtype.
        """
        if job.model.module is None and not job.padding and not any(_of_model(job)):
            # Parts of sequences must suit attention in fp32, because plans may choose it.
            yield from (cls(n=n) for n in (2, 4, 8) if job.sequence_length % (2 * n * ALIGNED) == 0)

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan cuts sequences over GPUs: no group within a host can share the
        sequences. Empty if a group can.
        """
        if any(cls.settings(job)):
            return ""
        return next(_of_model(job), "sequences cannot be cut into equal pieces without padding").rstrip(".")


def _of_model(job: Job) -> Iterator[str]:
    """Yield the reasons why this model cannot use ring attention."""
    if job.task is not Task.CAUSAL_LM:
        yield f"ring attention is causal, and the task is {job.task}. It is for causal-lm."
        return
    kind: Any = job.model_class()
    facts = job.config_to_read().to_dict()
    text = facts.get("text_config") or facts
    if why := _other_attention(kind, text):
        yield f"{kind.__name__} {why}, and ring attention supports only causal attention. Leave it out."
    rope = text.get("rope_parameters") or {}
    kinds = {rope.get("rope_type", "")} if "rope_type" in rope or not rope else _types_of(rope)
    if not kinds <= {*ROTARY}:
        shown = ", ".join(sorted(kinds - {""})) or "none"
        yield (
            f"{kind.__name__} must have rotary positions ({', '.join(ROTARY)}), and its rope_type is "
            f"{shown}. Leave it out."
        )
    for name in DROPOUTS:
        if text.get(name):
            yield (
                f"attention has dropout ({name} = {text[name]}), of which ring attention makes wrong "
                f"gradients. Set {name} to 0 in the model's config."
            )


def _types_of(rope: dict[str, Any]) -> set[str]:
    """Return the types of rotary position embeddings in a config: one, or several if layers differ."""
    return {one.get("rope_type", "") for one in rope.values() if isinstance(one, dict)}


def _other_attention(kind: Any, text: dict[str, Any]) -> str:
    """Return a description of layers that mix tokens by anything but torch's causal attention; empty if there
    are none.
    """
    layers = {*(text.get("layer_types") or ())} - {"full_attention"}
    if layers:
        return f"has layers of other kinds ({', '.join(sorted(layers))})"
    if not text.get("layer_types") and text.get("sliding_window"):
        return f"looks at a window of {text['sliding_window']} tokens"
    if getattr(kind, "_is_stateful", False):
        return "carries a state from token to token"
    if not (getattr(kind, "_supports_sdpa", False) and getattr(kind, "_supports_attention_backend", False)):
        return "does not let its attention be chosen"
    return ""

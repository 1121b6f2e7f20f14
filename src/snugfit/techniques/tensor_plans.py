"""Which models tensor parallelism can cut, and into how many parts: by transformers' plan for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugfit.job.job import Job

KNOWN = (
    "colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep",
    "embedding_rowwise", "replicated_with_grad_allreduce", "replicate",
)  # fmt: skip
"""Words of a plan that torch has a style of the same meaning for (`step/wishes/mesh/tensor.py`)."""

SIZES = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key/value heads",
    "intermediate_size": "columns of the feed-forward block",
    "vocab_size": "words of the vocabulary",
}
"""What is shared evenly, by its name in a config."""


def objections(job: Job, parts: int) -> Iterator[str]:
    """Why this model cannot be cut into so many parts."""
    if job.model.module is not None:
        return
    config = job.config_to_read()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        yield (
            f"transformers has no tensor-parallel plan for {config.model_type}. Take fsdp, which spreads any "
            "model."
        )
        return
    if strange := sorted({word for word in plan.values() if word not in KNOWN}):
        yield f"the plan for {config.model_type} has {', '.join(strange)}, which is not simulated. Take fsdp."
        return
    sizes = {what: size for key, what in SIZES.items() if (size := _size(config, key)) is not None}
    uneven = [f"{size:,} {what}" for what, size in sizes.items() if size % parts]
    if uneven:
        fit = [n for n in (2, 3, 4, 5, 6, 8, 16, 32) if not any(size % n for size in sizes.values())]
        cure = f"Try {' or '.join(map(str, fit))}." if fit else "Take fsdp, which spreads any model."
        yield f"{' and '.join(uneven)} cannot be shared evenly by {parts} GPUs. {cure}"


def _size(config: Any, key: str) -> int | None:
    value = getattr(config, key, None)
    return value if isinstance(value, int) else None

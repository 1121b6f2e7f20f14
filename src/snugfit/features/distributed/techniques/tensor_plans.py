"""Checks if a model can be split by tensor parallelism into a number of shards, by transformers' plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugfit.job.job import Job

KNOWN = (
    "colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep",
    "embedding_rowwise", "replicated_with_grad_allreduce", "replicate",
)  # fmt: skip
"""Styles in transformers' tensor-parallel plans for which torch has one of the same meaning
(`features/distributed/apply/tensor.py`).
"""

EXPERT_STYLES = ("grouped_gemm", "moe_tp_experts", "ep_router", "ep_dispatch_experts")
"""Styles in transformers' tensor-parallel plans for experts. Version 5.17 has the first three; from 5.21 on,
the last replaces two of them.
"""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config keys for the number of experts in a layer."""

SIZES = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key/value heads",
    "intermediate_size": "columns of the feed-forward block",
    "vocab_size": "words of the vocabulary",
}
"""Config keys for sizes that must be divisible by the number of ranks, with their names in messages."""


def objections(job: Job, parts: int, *, experts: bool = False) -> Iterator[str]:
    """Yield the reasons why this model cannot be split into this many shards. With `experts`, whole experts
    are distributed; otherwise each expert is split.
    """
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
    spread = _expert_plan(config)
    # The plan does not split experts that stay whole.
    left = {word for rule, word in plan.items() if not (experts and is_of_experts(rule, spread))}
    if strange := sorted(left - {*KNOWN}):
        cure = f"Add expert({parts})" if spread and not experts else "Take fsdp"
        yield f"the plan for {config.model_type} has {', '.join(strange)}, which is not simulated. {cure}."
        return
    sizes = {what: size for key, what in SIZES.items() if (size := _size(config, key)) is not None}
    uneven = [f"{size:,} {what}" for what, size in sizes.items() if size % parts]
    if uneven:
        fit = [n for n in (2, 3, 4, 5, 6, 8, 16, 32) if not any(size % n for size in sizes.values())]
        cure = f"Try {' or '.join(map(str, fit))}." if fit else "Take fsdp, which spreads any model."
        yield f"{' and '.join(uneven)} cannot be shared evenly by {parts} GPUs. {cure}"


def objections_to_experts(job: Job, parts: int) -> Iterator[str]:
    """Yield why the experts of this model cannot be divided over this many GPUs."""
    if job.model.module is not None:
        return
    config = job.config_to_read()
    if not _expert_plan(config):
        yield f"transformers has no expert-parallel plan for {config.model_type}. Leave it out."
        return
    experts = next((size for key in EXPERTS if (size := _size(config, key)) is not None), None)
    if experts is None or experts % parts:
        yield (
            f"{experts or 'an unknown number of'} experts cannot be shared evenly by {parts} GPUs. "
            "Choose a divisor, or leave it out."
        )


def is_of_experts(rule: str, expert_plan: Iterable[str]) -> bool:
    """Return True if an entry of a tensor-parallel plan is for experts (mixture of experts) or a part of
    one.
    """
    return any(rule == one or rule.startswith(f"{one}.") for one in expert_plan)


def _expert_plan(config: Any) -> dict[str, str]:
    plan: dict[str, str] = getattr(config, "base_model_ep_plan", None) or {}
    # A plan with styles that are not simulated counts as no plan.
    return plan if set(plan.values()) <= {*EXPERT_STYLES} else {}


def _size(config: Any, key: str) -> int | None:
    value = getattr(config, key, None)
    return value if isinstance(value, int) else None

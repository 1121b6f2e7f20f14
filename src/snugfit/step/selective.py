"""Selective checkpointing: keep the results of some operators of a checkpointed layer.

torch runs such a layer under a dispatch mode (`torch.utils.checkpoint.create_selective_checkpoint_contexts`).
Results of a listed operator are kept. The recomputation in the backward pass reuses them, so every sum stays
the same, bit for bit.

Products with weights and fused attention are kept: they take nearly all of a layer's time. Products of two
activations are not kept. In unfused attention they are its scores, which are large.

Attention with dropout is computed again, because it draws random numbers. A reused result draws none, and
each later dropout would have another mask than in the forward pass. Attention is kept if no later dropout
draws random numbers (`techniques/seeded_dropout.py`). A layer with other draws is then refused.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from typing import Any

from snugfit.errors import RecipeError

ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
)
"""Names of torch's fused attention operators."""

PRODUCTS = (*ATTENTION, "aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::convolution")
"""Names of the operators that multiply by weights, and of fused attention."""

EVERY_OTHER = "every_other_product"

KEPT_OPERATORS = {"attention": ATTENTION, "products": PRODUCTS, EVERY_OTHER: PRODUCTS}
"""Names of the operators whose results a recomputed layer keeps, by the value of the technique's setting."""


def checkpoint_arguments(keep: str, keep_drawn: bool = False) -> dict[str, Any]:
    """Return the arguments that make `torch.utils.checkpoint.checkpoint` selective; empty if no results are
    kept."""
    if not keep:
        return {}
    contexts = functools.partial(selective_contexts, KEPT_OPERATORS[keep], every_other=keep == EVERY_OTHER)
    return {"context_fn": functools.partial(contexts, refuse=refuse_draws) if keep_drawn else contexts}


def refuse_draws(operator: Any) -> None:
    """Raise `RecipeError` for an operator that draws random numbers and is not fused attention."""
    import torch

    if torch.Tag.nondeterministic_seeded in operator.tags and operator.name() not in ATTENTION:
        raise RecipeError(
            f"A layer that is recomputed draws random numbers by {operator.name()}, which would be others "
            "the second time where the step is recorded. Leave 'captured' or the checkpointing out."
        )


def selective_contexts(operators: tuple[str, ...], every_other: bool = False, refuse: Any = None) -> Any:
    """Return the contexts of a layer's forward pass and recomputation, for torch's checkpoints. The results
    of `operators` are saved and not computed again. With `every_other`, only the first, third, fifth ...
    product is saved.

    Attention with dropout is computed again: it draws random numbers, and later draws depend on them. With
    `refuse` it is kept; `refuse` is called for each other operator, and raises for one that draws.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    products = {False: 0, True: 0}  # counts in forward and in the recomputation, for torch 2.12

    def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        name = operator.name()
        if name not in operators:
            if refuse is not None:
                refuse(operator)
            return CheckpointPolicy.PREFER_RECOMPUTE
        if "attention" in name:
            names = [argument.name for argument in operator._schema.arguments]
            draws = {**dict(zip(names, arguments, strict=False)), **keywords}.get("dropout_p", 0.0) > 0
            again = draws and refuse is None
            return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
        products[context.is_recompute] += 1
        if every_other and products[context.is_recompute] % 2 == 0:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def script_lines(keep: str) -> tuple[str, ...]:
    """Return Python lines that define a selective `context_fn`, for scripts that run without snugfit."""
    source = textwrap.dedent(inspect.getsource(selective_contexts)).rstrip()
    value = checkpoint_arguments(keep)["context_fn"]
    names = ", ".join(f'"{name}"' for name in value.args[0])
    arguments = f"({names}), every_other={value.keywords['every_other']}"
    called = f"context_fn = functools.partial(selective_contexts, {arguments})"
    return ("import functools", "from typing import Any", "", *source.splitlines(), "", called)

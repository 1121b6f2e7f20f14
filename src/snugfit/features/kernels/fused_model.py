"""Replacement of a model's code by snugfit's own kernels, for the supported model families.

`encoders.py` lists the supported classes of transformers by name, and `decoders/` finds them by their code.
Their instances in the model get another forward pass over the same parameters. So a state dict keeps its
names and shapes, other modules run unchanged, and no other model of the process is changed.

Importing this module imports the operators. Triton is imported at the first launch of a kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from snugfit.errors import RecipeError
from snugfit.features.kernels import encoders
from snugfit.features.kernels.attention import without_mask
from snugfit.features.kernels.decoders import modules as decoders
from snugfit.features.kernels.decoders.experts.modules import fuse_experts
from snugfit.features.kernels.decoders.sinks import mark_whole_batches
from snugfit.features.kernels.decoders.tiled_mlp import TOKENS
from snugfit.features.kernels.head.chunked_loss import LOSS_KERNEL
from snugfit.features.kernels.operations.adapted import FusedForward, drops_inputs
from snugfit.features.kernels.operations.cross_entropy import CrossEntropyKernel
from snugfit.features.kernels.operations.gated_mlp import RECOMPUTES


def use_fused(model: torch.nn.Module, recomputed_mlps: int = 0, mlp_tokens: int | None = None) -> None:
    """Replace forward passes of the model's modules by snugfit's kernels, and set the head's loss kernel.

    `recomputed_mlps` gated MLPs, from the first, recompute the product of gate and up in the backward pass.
    With `mlp_tokens`, gated MLPs are computed for so many tokens at a time. Raises `RecipeError` for a model
    without known modules, or without such an MLP.
    """
    # All are called, because a model may contain an encoder, a decoder and experts.
    if not [*encoders.fuse(model), *decoders.fuse(model), *fuse_experts(model)]:
        raise RecipeError(
            f"fused has no kernels for {type(model).__name__}: it knows none of its modules. Try "
            "'torch_kernels'."
        )
    if recomputed_mlps:
        _recompute_mlps(model, recomputed_mlps)
    if mlp_tokens:
        _tile_mlps(model, mlp_tokens)
    find_head: Any = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head else None
    if head is not None:
        # Some models have no head. Only the chunked loss reads this attribute.
        setattr(head, LOSS_KERNEL, CrossEntropyKernel())


def remove_fused(model: torch.nn.Module) -> None:
    """Give the model's modules their own forward passes again.

    Weights that are adjacent in memory stay so, which changes no result.
    """
    for module in model.modules():
        if isinstance(vars(module).get("forward"), FusedForward):
            del module.forward
        for name in (encoders.SITE, RECOMPUTES, TOKENS, LOSS_KERNEL):
            vars(module).pop(name, None)
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook in (without_mask, mark_whole_batches):
                del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]


def _recompute_mlps(model: torch.nn.Module, count: int) -> None:
    gated = [module for module in model.modules() if RECOMPUTES in vars(module)]
    if not gated:
        raise RecipeError(
            f"fused(recomputed_mlps={count}): {type(model).__name__} has no gated MLP that 'fused' computes. "
            "Try 'fused', or 'first_layers'."
        )
    # The first layers come first, because their backward pass is last (`first_layers`).
    for module in gated[:count]:
        setattr(module, RECOMPUTES, True)


def _tile_mlps(model: torch.nn.Module, tokens: int) -> None:
    gated = [module for module in model.modules() if TOKENS in vars(module)]
    if not gated:
        raise RecipeError(
            f"fused(mlp_tokens={tokens}): {type(model).__name__} has no gated MLP that 'fused' computes in "
            "tiles. Try 'fused'."
        )
    if any(drops_inputs(layer) for module in gated for layer in module.modules()):
        raise RecipeError(
            f"fused(mlp_tokens={tokens}): adapters of an MLP drop elements of its input, whose masks are "
            "drawn for all tokens at once. Try dropout=0.0, or 'fused'."
        )
    for module in gated:
        setattr(module, TOKENS, tokens)

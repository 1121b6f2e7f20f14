"""snugfit's own kernels in the place of a model's code, for the families that a patcher knows.

A patcher (`encoders.py`) looks through a model's modules for classes of transformers that it knows by name,
and gives those instances another forward pass over the same parameters. So a state dict keeps its names and
shapes, what is not known runs as it was written, and no other model of the process is changed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError

if TYPE_CHECKING:
    import torch

PATCHERS = ("encoders", "decoders")
"""Files beside this one. Each has `fuse(model)`, which changes what it knows in place and gives the classes
that it changed, by name, once each."""


def import_code() -> None:
    """Imports the patchers and with them the operators, before anything is timed or overridden. Triton is
    imported when the first kernel is launched."""
    for name in PATCHERS:
        _patcher(name)


def use_fused(model: torch.nn.Module, recomputed_mlps: int = 0) -> None:
    """Has our kernels run in this model's modules, and so many gated MLPs, from the first, compute the
    product of gate and up again in the backward pass. Raises `RecipeError` for a model of which nothing is
    known, or that has no such MLP. A loss in chunks, which the model may get besides, knows by a mark of its
    head that it has a kernel."""
    from snugfit.kernels.cross_entropy import CrossEntropyKernel
    from snugfit.step.head.chunked_loss import LOSS_KERNEL

    changed = [name for patcher in PATCHERS for name in _patcher(patcher)(model)]
    if not changed:
        raise RecipeError(
            f"fused has no kernels for {type(model).__name__}: it knows none of its modules. Try "
            "'torch_kernels'."
        )
    if recomputed_mlps:
        _recompute_mlps(model, recomputed_mlps)
    find_head: Any = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head else None
    if head is not None:
        setattr(head, LOSS_KERNEL, CrossEntropyKernel())


def _recompute_mlps(model: torch.nn.Module, count: int) -> None:
    from snugfit.kernels.gated_mlp import RECOMPUTES

    gated = [module for module in model.modules() if RECOMPUTES in vars(module)]
    if not gated:
        raise RecipeError(
            f"fused(recomputed_mlps={count}): {type(model).__name__} has no gated MLP that 'fused' computes. "
            "Try 'fused', or 'first_layers'."
        )
    for module in gated[:count]:
        setattr(module, RECOMPUTES, True)


def _patcher(name: str) -> Callable[[torch.nn.Module], list[str]]:
    module = importlib.import_module(f"{__package__}.{name}")
    fuse: Callable[[torch.nn.Module], list[str]] = module.fuse
    return fuse

"""Inductor with torch's activation memory budget, and with fixes for the errors that the budget causes.

torch cuts the graph of a layer, forward and backward, in two.
`torch._functorch.config.activation_memory_budget` limits the bytes that the forward program keeps for the
backward one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from snugfit.errors import RecipeError

REDRAWN_NUMBERS = (
    "With budget(0) torch would draw other random numbers for dropout in the backward pass, and gradients "
    "would be wrong (pytorch issue 190717). Try 'budget(0.1)', or 'every_layer'."
)


@dataclass(frozen=True)
class InductorWithin:
    """A backend of `torch.compile`: Inductor with this memory budget, in this mode."""

    budget: float
    mode: str = "default"

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Return the compiled program of a graph that Dynamo traced."""
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        # torch reads the budget when it partitions the graph. Other programs of the process are not affected.
        with within_budget(self.budget):
            return compile_fx(graph, inputs, config_patches=list_mode_options(self.mode))


@contextlib.contextmanager
def plain_refusals() -> Iterator[None]:
    """Context in which snugfit's errors during compilation reach the caller unwrapped; Dynamo wraps errors of
    its backends.
    """
    try:
        yield
    except Exception as error:
        if isinstance(inner := getattr(error, "inner_exception", None), RecipeError):
            raise inner from None
        raise


@contextlib.contextmanager
def within_budget(budget: float) -> Iterator[None]:
    """Context that sets `activation_memory_budget`, by which torch splits graphs into forward and
    backward.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    if budget == 1:
        yield
        return
    with (
        functorch.patch(activation_memory_budget=budget),
        # Without this pass, torch may draw again in backward, with other numbers (issues 190717 and 190758 in
        # 2.11 and 2.13).
        inductor.patch(joint_custom_post_pass=_keeper()(budget)),
    ):
        yield


@cache
def _keeper() -> Any:
    """Return the class of an FX graph pass that keeps random operators from being recomputed under a memory
    budget.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class KeepRandom(CustomGraphPass):
        """A graph pass that marks nodes which draw random numbers, so that torch does not recompute them."""

        def __init__(self, budget: float) -> None:
            self.budget = budget

        def __call__(self, graph: Any) -> None:
            """Mark the nodes of a graph that draw random numbers. Raises `RecipeError` where marks have no
            effect.
            """
            from torch.utils.checkpoint import CheckpointPolicy

            for node in graph.nodes:
                if _draws(node):
                    # With a budget of 0, torch ignores the mark.
                    if self.budget == 0:
                        raise RecipeError(REDRAWN_NUMBERS)
                    # A mark costs a few bytes: torch keeps the random seed and computes the mask from it.
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

        def uuid(self) -> Any:
            """Return the version of this graph pass, which torch includes in the keys of its
            compile caches.
            """
            # The keys of torch's disk caches contain the budget already.
            return "snugfit: random numbers are kept"

    return KeepRandom


def _draws(node: Any) -> bool:
    """Return True if this node of an FX graph draws random numbers, as dropout and attention with dropout
    do.
    """
    import torch

    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    # Attention is tagged as random, but draws random numbers only with dropout.
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0

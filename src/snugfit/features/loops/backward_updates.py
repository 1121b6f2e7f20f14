"""Detection of weights that change during a backward pass, in a run's first step.

An optimizer may update a parameter in a hook of `register_post_accumulate_grad_hook`, to store one gradient
at a time. snugfit cannot stop such a step before its update, or repeat it. A hook that changes no weight is
allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from snugfit.errors import UsageError

if TYPE_CHECKING:
    import torch


@final
class BackwardWatch:
    """Detects weights that a hook updates during a run's first backward pass, by comparing them with earlier
    values.
    """

    def __init__(self) -> None:
        self._before: list[tuple[str, torch.nn.Parameter, int, float]] | None = None

    def begin(self, model: torch.nn.Module) -> None:
        """Copy the weights with hooks before the first step; do nothing at later steps."""
        if self._before is None:
            self._before = [
                (name, weight, weight._version, _sum(weight))
                for name, weight in model.named_parameters()
                if weight.requires_grad and getattr(weight, "_post_accumulate_grad_hooks", None)
            ]

    def raise_if_updated(self) -> None:
        """Raise `UsageError` if a weight has changed before the first step's `optimizer.step()`."""
        before, self._before = self._before or [], []
        changed = [
            name
            for name, weight, version, total in before
            if weight._version != version or _sum(weight) != total
        ]
        if changed:
            more = f" and {len(changed) - 1:,} others" if len(changed) > 1 else ""
            raise UsageError(
                f"The first backward pass has changed weights ({changed[0]}{more}): a gradient hook "
                "updates them. Then no step can be stopped before its update, or repeated. Let the "
                "optimizer do the updates, or train without snugfit."
            )


def _sum(weight: torch.Tensor) -> float:
    return weight.detach().double().sum().item()

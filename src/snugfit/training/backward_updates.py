"""Weights that a backward pass changes: an optimizer in hooks, which is found out in a run's first step.

torch calls what `register_post_accumulate_grad_hook` was given when a parameter has its gradient, and some
update the parameter there, to hold one gradient at a time. Such a step cannot be stopped before its update or
be taken again, so what is promised of a run would not be true. A hook that changes no weight is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from snugfit.errors import UsageError

if TYPE_CHECKING:
    import torch


@final
class BackwardWatch:
    """Looks at the weights that have such a hook, before and after the first backward pass of a run."""

    def __init__(self) -> None:
        self._before: list[tuple[str, torch.nn.Parameter, int, float]] | None = None

    def begin(self, model: torch.nn.Module) -> None:
        """A step begins; of the first one it is noted what the weights are."""
        if self._before is None:
            self._before = [
                (name, weight, weight._version, _sum(weight))
                for name, weight in model.named_parameters()
                if weight.requires_grad and getattr(weight, "_post_accumulate_grad_hooks", None)
            ]

    def raise_if_updated(self) -> None:
        """Before the first step's update. Raises `UsageError` when there has been one already."""
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

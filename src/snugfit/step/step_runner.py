"""An object that runs the steps of a plain loop in another way, such as a replay of recorded steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class StepRunner(ABC):
    """Runs forward, backward and update in place of a training loop, for example as CUDA graphs. A handler
    creates it (`wishes/handler.py`).
    """

    has_begun = False
    """True if the backward pass of the current step has already updated a weight."""

    norm: torch.Tensor | None = None
    """Norm of the gradients of the last backward pass, as a scalar tensor on the device; None if it is
    unknown.
    """

    why_not = ""
    """Reason why steps are not replayed but run by the loop's own code; empty if they are replayed."""

    def updates_at_once(self, clips: bool) -> bool:
        """Return True if the next backward pass itself updates the weights, so that no gradients remain.
        `clips` is True for a step that needs the norm of its gradients.
        """
        return False

    @abstractmethod
    def run_passes(
        self, built: Any, pieces: Sequence[Mapping[str, Any]], weights: Sequence[float | None]
    ) -> torch.Tensor | None:
        """Run the forward and backward passes of these host micro-batches, each loss times its weight. Return
        the sum of the losses if losses are kept.
        """

    @abstractmethod
    def update(self, built: Any, norm: torch.Tensor | None = None) -> None:
        """Clip the gradients of the last backward passes, and run the optimizer's update. `norm` is the norm
        of the gradients, if it is known.
        """

    def close(self) -> None:  # noqa: B027 - most runners change nothing of the model
        """Undo this object's changes of the model after the last step."""

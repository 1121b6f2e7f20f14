"""Find trainable parameters that get no gradient from the batch.

A warning lists them, because a wrong batch has no other symptom. Examples are a vision tower with a batch of
text alone, and a pooler whose output no loss uses. Such parameters have weights, and neither gradients nor
optimizer states. With real batches that use them, a step takes more memory than predicted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snugfit.errors import some_of

if TYPE_CHECKING:
    import torch


class MissingGradients:
    """A detector of trainable parameters that have no gradient in the optimizer's first step."""

    def __init__(self) -> None:
        self._missing: set[torch.Tensor] | None = None

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Context in which the first optimizer step is inspected."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        handle = register_optimizer_step_pre_hook(self._find_missing)
        try:
            yield
        finally:
            handle.remove()

    def _find_missing(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._missing is None:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            self._missing = {one for one in parameters if one.requires_grad and one.grad is None}

    def sentence(self, model: torch.nn.Module) -> str:
        """Return a warning with the number of parameters and their modules, or "" if all have gradients."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        missing = [parameter for parameter in trained if parameter in (self._missing or ())]
        if not missing:
            return ""
        names = list(self._modules(model, ""))
        count, of = (sum(parameter.numel() for parameter in some) for some in (missing, trained))
        return (
            f"{count:,} of {of:,} trainable parameters get no gradient from this batch: {some_of(names)}. "
            "Batches that use them need more memory and time. To exclude that, freeze these parameters."
        )

    def _modules(self, module: torch.nn.Module, name: str) -> Iterator[str]:
        """Yield the names of the largest submodules without any gradient, and otherwise of single
        parameters."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        missing = [parameter for parameter in trained if parameter in (self._missing or ())]
        if missing and len(missing) == len(trained):
            yield name
            return
        # A module with some gradients is split, so that the sentence names the smallest complete parts.
        for inner, child in module.named_children() if missing else ():
            yield from self._modules(child, f"{name}.{inner}" if name else inner)
        for inner, parameter in module.named_parameters(recurse=False):
            if any(parameter is one for one in missing):
                yield f"{name}.{inner}" if name else inner

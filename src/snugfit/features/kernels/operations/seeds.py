"""The seeds of a model's dropout: one for each forward pass, drawn by torch's own generator on the device.

A draw on the device lets each replay of a captured step draw a new seed. With torch's generator, code that
saves and restores that generator covers dropout too. The seed travels with the residual stream, at nodes of
autograd's graph (`SEED_ATTRIBUTE`).
"""

from __future__ import annotations

import torch

MAX_SEED = 1 << 62
"""Exclusive upper bound of random seeds (chosen: half of int64's range)."""

SEED_ATTRIBUTE = "dropout_seed"
"""Name of an autograd node's attribute that holds the dropout seed of its forward pass."""


class Seeds:
    """Source of dropout seeds for all modules of one model: one seed for each forward pass."""

    def __init__(self) -> None:
        self._of_pass: torch.Tensor | None = None

    def begin(self) -> None:
        """Discard the last seed, so that the next draw starts a new forward pass."""
        self._of_pass = None

    def draw(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the seed (one int64, on the device) of the forward pass that this residual stream belongs
        to."""
        device, checkpoint = stream.device, checkpoint_around()
        if checkpoint is REENTRANT:
            return _draw(device)  # nothing is carried there, forward or again
        # A recomputed layer finds the seed of its own forward pass, because a checkpoint restores the input's
        # node.
        carried: torch.Tensor | None = getattr(stream.grad_fn, SEED_ATTRIBUTE, None)
        if carried is not None:
            return carried
        # A recomputed layer draws the same seed, because recomputation restores the random generator.
        if checkpoint:
            return _draw(device)
        if self._of_pass is None or self._of_pass.device != device:
            self._of_pass = _draw(device)
        return self._of_pass


def _draw(device: torch.device) -> torch.Tensor:
    return torch.randint(MAX_SEED, (1,), dtype=torch.int64, device=device)


HOOKS, REENTRANT = "hooks", "reentrant"


def checkpoint_around() -> str:
    """Return the type of `torch.utils.checkpoint` around the current code.

    One type saves tensors by hooks (`torch/utils/checkpoint.py`). The reentrant one runs without gradients
    first, and within the backward pass again. An empty string means no checkpoint. If torch does not expose
    its hooks, the result is hooks.
    """
    # The reentrant checkpoint runs its first pass without gradients.
    if not torch.is_grad_enabled():
        return REENTRANT
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    # A separate seed for each module is correct with and without checkpoints.
    if top is None:
        return HOOKS
    hooks = top(True)
    if hooks is not None and hooks[0].__qualname__.startswith(("_checkpoint_hook", "_recomputation_hook")):
        return HOOKS
    # A forward pass within a backward pass is the second run of a reentrant checkpoint.
    return REENTRANT if torch._C._current_graph_task_id() != -1 else ""

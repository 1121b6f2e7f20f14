"""An optimizer whose states are sharded over the processes: torch's `ZeroRedundancyOptimizer`.

Each process has another optimizer within it (torch calls it the local one). The local one holds the states of
some weights, whole tensors of them, and updates these. Then each weight is sent to the others by the process
that has updated it. The outer groups are of all weights, and the same in all processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"
"""Module of torch's `ZeroRedundancyOptimizer`. Only its name is compared, because the import takes time."""


def spreads_states(optimizer: Any) -> bool:
    """Return True if this optimizer's states are distributed over the processes, as in
    `ZeroRedundancyOptimizer`.
    """
    return any(kind.__module__ == _MODULE for kind in type(optimizer).__mro__)


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has this process's states: the inner optimizer if states are sharded, else
    the given one.
    """
    local: Any = optimizer
    return local.optim if spreads_states(optimizer) else local  # type: ignore[no-any-return]

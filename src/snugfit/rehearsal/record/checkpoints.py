"""Checkpoints, counted: on the host a checkpointed part costs, beside the kernels that run again, its own
beginning, and its beginning anew in the backward pass. Each time the states of random numbers are kept or put
back, the host's and the device's. (What its hooks do with each saved tensor was counted once too, and
explained nothing that was measured.)

torch tells nobody when a checkpoint begins, but each makes a pair of hooks on saved tensors then, and another
when it begins again. So for the time of a rehearsal whoever makes such a pair is told of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Hook = Callable[[Any], Any]


class Telling(NamedTuple):
    """What was replaced, so that it can be put back."""

    kind: Any
    before: Any

    def remove(self) -> None:
        """Hooks made from now on tell nobody."""
        self.kind.__init__ = self.before


def tell_of_checkpoints(tell: Callable[[], None]) -> Telling:
    """Calls `tell` each time that a pair of hooks on saved tensors is made, until `remove()`."""
    from torch.autograd.graph import saved_tensors_hooks

    kind: Any = saved_tensors_hooks
    before = kind.__init__

    def made(self: Any, pack_hook: Hook, unpack_hook: Hook) -> None:
        tell()
        before(self, pack_hook, unpack_hook)

    kind.__init__ = made
    return Telling(kind, before)

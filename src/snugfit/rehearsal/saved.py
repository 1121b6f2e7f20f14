"""Hooks on saved tensors, counted: checkpointing, and whatever else packs what autograd saves, calls Python
once for each tensor on its way in and once on its way out. On the host that is what checkpointing costs
beside the kernels that run again, and beside each checkpoint's own beginning: it makes a pair of hooks, and
another when it computes again, and keeps or puts back the states of random numbers each time.

torch tells nobody when a hook runs, so for the time of a rehearsal each pair of hooks is wrapped when it is
made.
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


def tell_of_saved_tensors(made_one: Callable[[], None], passes: Callable[[], None]) -> Telling:
    """Calls `made_one` when a pair of hooks is made from now on, and `passes` each time that a tensor goes
    through one of these, until `remove()`."""
    from torch.autograd.graph import saved_tensors_hooks

    kind: Any = saved_tensors_hooks
    before = kind.__init__

    def made(self: Any, pack_hook: Hook, unpack_hook: Hook) -> None:
        made_one()
        before(self, _told(passes, pack_hook), _told(passes, unpack_hook))

    kind.__init__ = made
    return Telling(kind, before)


def _told(tell: Callable[[], None], hook: Hook) -> Hook:
    def told(passed: Any) -> Any:
        tell()
        return hook(passed)

    return told

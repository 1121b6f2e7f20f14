"""What kernels take for themselves, remembered: the same operator on the same shapes takes the same.

A policy's rules (`scratch.py`) work on operands' metadata alone, as shapes do (`shape_cache.py`), and layers,
micro-batches and recipes repeat. What is remembered belongs to one policy.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugfit.rehearsal.device.buffers import Scratch
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.record.shape_cache import Operator

MOST = 200_000
"""Calls remembered at most."""


class Taken:
    """What kernels take under one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._known: dict[tuple[int, int], Scratch] = {}  # by operator, whose id hashes faster, and key

    def scratch(self, known: Operator, key: int | None, args: tuple[Any, ...], out: Any) -> Scratch:
        """As the policy says it of a call with this key."""
        if key is None:
            return self.policy.scratch(known.name, args, out)
        call = id(known.func), key
        found = self._known.get(call)
        if found is None:
            if len(self._known) >= MOST:
                self._known.clear()
            found = self._known[call] = self.policy.scratch(known.name, args, out)
        return found


@functools.lru_cache(maxsize=16)
def taken_under(policy: Policy) -> Taken:
    """What is remembered under this policy."""
    return Taken(policy)

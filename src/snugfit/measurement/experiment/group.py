"""The measured process's part in a group of several: how it finds the others, and how it leaves.

Ranks find each other by a file in the run's temporary folder (torch's `FileStore`), so no port is chosen that
another process might take. On GPUs they exchange by NCCL, on the CPU by gloo. As in torchtitan's and most
users' scripts the group is bound to no device when it is made: NCCL starts with the first exchange, a sum of
one number here, so that its memory and its start are no part of the first step.

No rank ends before all have: another may still read from its memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LEAVING = "snugfit-leaving"
"""Of the store: how many ranks are done."""

LONGEST = timedelta(days=1)
"""How long a rank waits for another. The parent ends all long before: when one dies, or at its deadline."""


class RankGroup:
    """The ranks of a run, as this one sees them. It is made when all have come."""

    def __init__(self, request: Mapping[str, Any], device: torch.device) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        self.rank, self._ranks, self._device = request["rank"], request["ranks"], device
        self._store = FileStore(request["store"], self._ranks)
        self._store.set_timeout(LONGEST)
        dist.init_process_group(
            _backend(request, device),
            store=self._store,
            rank=self.rank,
            world_size=self._ranks,
            timeout=LONGEST,
        )
        self.exchange()

    def exchange(self) -> None:
        """Sums one number over all ranks, and waits for it."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def leave(self) -> None:
        """Waits until all ranks are done."""
        self._store.add(LEAVING, 1)
        while self._store.add(LEAVING, 0) < self._ranks:
            time.sleep(0.01)


def _backend(request: Mapping[str, Any], device: torch.device) -> str:
    """What exchanges tensors. Gradients that are on the host, of weights that the host keeps, are clipped by
    a norm that ranks exchange there."""
    if device.type != "cuda":
        return "gloo"
    parallel = request["setup"]["parallel"] or {}
    return "cpu:gloo,cuda:nccl" if parallel.get("on_host") else "nccl"


def open_group(request: Mapping[str, Any], device: torch.device) -> RankGroup | None:
    """The group of this run's ranks, when all have come; None where one process trains."""
    return RankGroup(request, device) if request["ranks"] > 1 else None

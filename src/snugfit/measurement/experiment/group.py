"""The process group of a measured process with several ranks: its creation and its end.

Ranks find each other by a file in the run's temporary folder (torch's `FileStore`). So no port is needed that
another process might take. GPUs exchange by NCCL, CPUs by gloo. The group is created without a device, as in
torchtitan's and most users' scripts. NCCL therefore starts with the first exchange, a sum of one number here.
Its memory and its start are no part of the first step.

No rank exits before all are done, because another rank may still read from its memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LEAVING = "snugfit-leaving"
"""Key of the store that counts the finished ranks."""

LONGEST = timedelta(days=1)
"""Timeout of a rank that waits for another. The parent ends all ranks long before, when one dies or at its
deadline."""


class RankGroup:
    """The process group of a run, seen from one rank. The constructor returns once all ranks have joined."""

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
        """Sum one number over all ranks, and wait for it."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def leave(self) -> None:
        """Wait until all ranks are done."""
        self._store.add(LEAVING, 1)
        while self._store.add(LEAVING, 0) < self._ranks:
            time.sleep(0.01)


def _backend(request: Mapping[str, Any], device: torch.device) -> str:
    """Return the backend. The host needs gloo too if it holds gradients: their norm for clipping is exchanged
    there."""
    from snugfit.techniques.setup import Setup
    from snugfit.techniques.wish import processes_of

    if device.type != "cuda":
        return "gloo"
    processes = processes_of(Setup.from_json(request["setup"]))
    return "cpu:gloo,cuda:nccl" if processes is not None and processes.on_host else "nccl"


def open_group(request: Mapping[str, Any], device: torch.device) -> RankGroup | None:
    """Return the group of this run's ranks once all have joined; None where one process trains."""
    return RankGroup(request, device) if request["ranks"] > 1 else None

"""A stage of a pipeline on tensors of shapes: what torch's pipelining does there that needs other stages.

A stage tells the next one whether it knows the shapes of what it hands on, and is told what they agree upon
(`PipelineStage._warmup_forward_vote`, since torch 2.13). On shapes nobody answers, so each is taken to know.

What is sent stays until somebody has waited for it (NCCL), or as long as there is a handle of the exchange
to wait by (gloo). Neither sending nor receiving has a stream here: what a stage waits for others is no part
of its own trace (`prediction/several_gpus/stages.py`). Which tensors live meanwhile is torch's doing.
"""

from __future__ import annotations

from typing import Any

import torch

from snugfit.rehearsal.sharded import collectives
from snugfit.rehearsal.trace.trace import RECEIVE, SEND

VOTES = ("_warmup_forward_vote", "_warmup_backward_result")


class _Sending:
    """An exchange that somebody will wait for, and what it sends."""

    def __init__(self, tensor: torch.Tensor, *, until_waited: bool) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._until_waited = until_waited

    def wait(self, *timeout: Any) -> bool:
        """It is done at once."""
        if self._until_waited:
            self._tensor = None
        return True


def instead_of_others(*, until_waited: bool) -> list[tuple[Any, str, Any]]:
    """What stands in the place of functions that other stages would answer: two methods by which stages agree
    that shapes are known, and what sends a tensor, which stays `until_waited` for or longer."""
    import torch.distributed.distributed_c10d as exchanges
    from torch.distributed.pipelining import PipelineStage

    def agree(*asked: Any, **more: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32, device="cpu")

    plain = exchanges.isend

    def isend(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> _Sending:
        plain(tensor, *arguments, **keywords)
        return _Sending(tensor, until_waited=until_waited)

    known = [(PipelineStage, name, agree) for name in VOTES if hasattr(PipelineStage, name)]
    return [*known, (exchanges, "isend", isend), (torch.distributed, "isend", isend)]


def peers_of_exchange(func: Any, args: tuple[Any, ...], group: Any) -> tuple[int, int] | None:
    """Of what one rank sends to another: that two take part, and how far on the other's rank is, below 0 for
    one before. None for an exchange of a whole group."""
    if collectives.kernel_of(func) not in (SEND, RECEIVE):
        return None
    ranks = torch.distributed.get_process_group_ranks(group)
    other = next(argument for argument in args[2:] if isinstance(argument, int))
    return 2, ranks[other] - torch.distributed.get_rank()

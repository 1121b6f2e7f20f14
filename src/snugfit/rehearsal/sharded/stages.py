"""A stage of a pipeline on tensors of shapes: what torch's pipelining does there that needs other stages.

A stage tells the next one whether it knows the shapes of what it hands on, and is told what they agree upon
(`PipelineStage._warmup_forward_vote`, since torch 2.13). On shapes nobody answers, so each is taken to know.

What is sent stays as long as there is a handle to wait by: gloo's handles have it, and NCCL's of a single
exchange (`WorkNCCL::outputs_` of `pointToPoint`). Of exchanges that begin together NCCL gives one handle for
all, which has none of them (`batch_isend_irecv`, `endCoalescing`). So torch before 2.13, whose pipelining
begins all together, keeps nothing that was sent, and later ones keep what they send alone until the handle
goes: with several chunks on a GPU until the step's end. Neither sending nor receiving has a stream here:
what a stage waits for others is no part of its own trace (`prediction/several_gpus/stages.py`), and a block
that is freed while it is being sent is back at once, though NCCL has it until it is through
(`record_stream`). Which tensors live meanwhile is torch's doing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.trace.trace import RECEIVE, SEND

if TYPE_CHECKING:
    import torch

VOTES = ("_warmup_forward_vote", "_warmup_backward_result")


class _Handle:
    """What one waits by for an exchange, and the tensors that it has."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def wait(self, *timeout: Any) -> bool:
        """It is done at once."""
        return True


def instead_of_others(*, handles_for_all: bool) -> list[tuple[Any, str, Any]]:
    """What stands in the place of functions that other stages would answer: two methods by which stages agree
    that shapes are known, what sends a tensor, and where there are `handles_for_all`, what begins several
    exchanges together."""
    import torch
    import torch.distributed.distributed_c10d as exchanges
    from torch.distributed.pipelining import PipelineStage

    def agree(*asked: Any, **more: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32, device="cpu")

    plain, together = exchanges.isend, exchanges.batch_isend_irecv

    def isend(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> _Handle:
        plain(tensor, *arguments, **keywords)
        return _Handle(tensor)

    def batch_isend_irecv(operations: list[Any]) -> list[_Handle]:
        together(operations)
        return [_Handle()]

    instead: list[tuple[str, Any]] = [("isend", isend)]
    if handles_for_all:
        instead.append(("batch_isend_irecv", batch_isend_irecv))
    known = [(PipelineStage, name, agree) for name in VOTES if hasattr(PipelineStage, name)]
    return [*known, *((owner, *pair) for owner in (exchanges, torch.distributed) for pair in instead)]


def counted_weights(count: Callable[[int], None]) -> tuple[Any, str, Any]:
    """What stands in the place of the pass that computes gradients of weights apart from those of inputs
    (`zero_bubble`): it tells how many weights it computes them of, for each of which torch walks the graph in
    Python and calls autograd (`_backward.py`)."""
    from torch.distributed.pipelining import stage

    plain = vars(stage)["stage_backward_weight"]

    def stage_backward_weight(weights: Any, groups: list[dict[str, Any]], *further: Any, **more: Any) -> Any:
        count(sum(len(group["params"]) for group in groups))
        return plain(weights, groups, *further, **more)

    return stage, "stage_backward_weight", stage_backward_weight


def peers_of_exchange(func: Any, args: tuple[Any, ...], group: Any) -> tuple[int, int] | None:
    """Of what one rank sends to another: that two take part, and how far on the other's rank is, below 0 for
    one before. None for an exchange of a whole group."""
    import torch

    from snugfit.rehearsal.sharded import collectives

    if collectives.kernel_of(func) not in (SEND, RECEIVE):
        return None
    ranks = torch.distributed.get_process_group_ranks(group)
    other = next(argument for argument in args[2:] if isinstance(argument, int))
    return 2, ranks[other] - torch.distributed.get_rank()

"""Map collective operators to NCCL kernels, with the bytes that they transfer."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.utils._pytree import tree_leaves

from snugfit.rehearsal.trace.trace import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    RECEIVE,
    REDUCE_SCATTER,
    SEND,
)

KERNELS = {
    "allreduce": ALL_REDUCE,
    "all_reduce": ALL_REDUCE,
    "allgather": ALL_GATHER,
    "all_gather": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "alltoall": ALL_TO_ALL,
    "all_to_all": ALL_TO_ALL,
    "broadcast": BROADCAST,
    "send": SEND,
    "recv": RECEIVE,
}
"""Names of NCCL's kernels. The keys are parts of torch's operator names."""

WAITS = frozenset(sync_ops)
"""Operators that wait for a collective and start no communication."""

ALL_TO_ALL_SINGLE = (torch.ops._c10d_functional.all_to_all_single.default,)
"""Functional all-to-all operators.

Arguments are the tensor, the sizes of received and of sent parts, and the group.
"""


def is_collective(func: Any) -> bool:
    """Return True if ranks exchange tensors in this operator, or wait for an exchange."""
    return func in collective_ops


def gives_its_own(func: Any) -> bool:
    """Return True if this wait operator returns its input tensor itself. On tensors without data, torch would
    return another tensor.
    """
    return bool(func._schema.name.endswith("::wait_tensor"))


def is_wrapping(func: Any) -> bool:
    """Return True if an operator wraps a tensor whose collective still runs, so that the first use of the
    tensor waits. On tensors without data, torch (2.13) creates an empty tensor instead.
    """
    return bool(func._schema.name == "_c10d_functional::_wrap_tensor_autograd")


def kernel_of(func: Any, args: tuple[Any, ...] = ()) -> str:
    """Return the name of an operator's NCCL kernel. An all-to-all that sends its whole tensor to one rank
    counts as a send.
    """
    if func in ALL_TO_ALL_SINGLE and args and sum(size != 0 for size in args[2]) == 1:
        return SEND
    # Names are like `c10d::_allgather_base_`.
    name = func.name().partition("::")[2].lstrip("_")
    return next((kernel for part, kernel in KERNELS.items() if part in name), ALL_REDUCE)


def is_async(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if NCCL runs an operator in a stream of its own, and a later operator waits for it.

    Otherwise it runs in the current stream (`ProcessGroupNCCL`, since torch 2.8).
    """
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("asyncOp", "async_op"):
            if position < len(args):
                return bool(args[position])
            return bool(kwargs.get(argument.name, argument.default_value))
    return True


def group_of(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the process group in which a collective operator exchanges tensors."""
    return CollectiveOp.get_process_group(func, args)


def peers_of(group: Any, kernel: str = "") -> tuple[int, int]:
    """Return the number of ranks in a group, and the distance between neighbouring ranks. For a send to the
    next rank, the number is 2.
    """
    ranks = torch.distributed.get_process_group_ranks(group)
    return 2 if kernel == SEND else len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 0


def peers_of_exchange(func: Any, args: tuple[Any, ...], group: Any) -> tuple[int, int] | None:
    """Return (2, distance to the other rank) for a send or receive, and None for a collective of a group.

    The distance is negative for a lower rank.
    """
    if kernel_of(func) not in (SEND, RECEIVE):
        return None
    ranks = torch.distributed.get_process_group_ranks(group)
    # The first number after the tensors and the group is the peer's rank within the group.
    other = next(argument for argument in args[2:] if isinstance(argument, int))
    return 2, ranks[other] - torch.distributed.get_rank()


def carried_bytes(func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes that a collective sums, gathers, scatters or sends, those of the whole tensor."""
    if func in ALL_TO_ALL_SINGLE:
        return int(args[0].nbytes)
    return int(CollectiveOp.get_comm_tensor_size(func, out, args, kwargs))


def is_functional(func: Any) -> bool:
    """Return True for a functional collective: it returns a new tensor, for which a later operator waits."""
    return str(func.namespace).startswith("_c10d_functional")


def tensors_carried(func: Any, out: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors that exist only for the collective: its gathered, scattered or received outputs.
    Summed and sent tensors are inputs of other code.
    """
    kernel = kernel_of(func)
    if kernel == RECEIVE:
        return _tensors_in(args[:1])
    if func.namespace == "_c10d_functional":  # the operand belongs to the caller
        gives = kernel in (ALL_GATHER, REDUCE_SCATTER) and isinstance(out, torch.Tensor)
        # The tensors of a send or an all-reduce belong to the caller.
        return [out] if gives else []
    if kernel == ALL_GATHER:
        return _tensors_in((out, args[:1]))
    if kernel == REDUCE_SCATTER:
        return _tensors_in(args[:2])
    return []


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor)]

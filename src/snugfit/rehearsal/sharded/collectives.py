"""Operators in which ranks exchange tensors: which kernel of NCCL each one is, and how much it carries."""

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
"""NCCL's kernels by what an operator's name says."""

WAITS = frozenset(sync_ops)
"""Operators that exchange nothing, and wait for those that do."""

ALL_TO_ALL_SINGLE = (torch.ops._c10d_functional.all_to_all_single.default,)
"""Functional operators that turn parts of a tensor about: what is given, sizes of what comes and of what
goes, and the group."""


def is_collective(func: Any) -> bool:
    """Whether ranks exchange tensors in this operator, or wait for that."""
    return func in collective_ops


def gives_its_own(func: Any) -> bool:
    """Whether it gives the very tensor that it has waited for. On shapes alone torch makes another one."""
    return bool(func._schema.name.endswith("::wait_tensor"))


def is_wrapping(func: Any) -> bool:
    """Whether it hands on what is being exchanged, for whoever uses it first to wait for. On shapes alone
    torch (2.13) makes an empty tensor there instead."""
    return bool(func._schema.name == "_c10d_functional::_wrap_tensor_autograd")


def kernel_of(func: Any, args: tuple[Any, ...] = ()) -> str:
    """The name of the kernel that an operator runs. Where all of a tensor goes to one rank, it is sent."""
    if func in ALL_TO_ALL_SINGLE and args and sum(size != 0 for size in args[2]) == 1:
        return SEND
    name = func.name().partition("::")[2].lstrip("_")
    return next((kernel for part, kernel in KERNELS.items() if part in name), ALL_REDUCE)


def is_async(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether NCCL runs it in a stream of its own, and somebody waits for it later. Else it is in the stream
    that is current (`ProcessGroupNCCL`, since torch 2.8)."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("asyncOp", "async_op"):
            if position < len(args):
                return bool(args[position])
            return bool(kwargs.get(argument.name, argument.default_value))
    return True


def group_of(func: Any, args: tuple[Any, ...]) -> Any:
    """The process group of an operator."""
    return CollectiveOp.get_process_group(func, args)


def peers_of(group: Any, kernel: str = "") -> tuple[int, int]:
    """How many ranks a group has, and how far apart they are. Where one sends to the next one, two."""
    ranks = torch.distributed.get_process_group_ranks(group)
    return 2 if kernel == SEND else len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 0


def peers_of_exchange(func: Any, args: tuple[Any, ...], group: Any) -> tuple[int, int] | None:
    """Of what one rank sends to another: that two take part, and how far on the other's rank is, below 0 for
    one before. None for an exchange of a whole group."""
    if kernel_of(func) not in (SEND, RECEIVE):
        return None
    ranks = torch.distributed.get_process_group_ranks(group)
    other = next(argument for argument in args[2:] if isinstance(argument, int))
    return 2, ranks[other] - torch.distributed.get_rank()


def carried_bytes(func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the whole tensor that is exchanged, summed, gathered or scattered."""
    if func in ALL_TO_ALL_SINGLE:
        return int(args[0].nbytes)
    return int(CollectiveOp.get_comm_tensor_size(func, out, args, kwargs))


def is_functional(func: Any) -> bool:
    """Whether it gives a new tensor, for which somebody waits by its name."""
    return str(func.namespace).startswith("_c10d_functional")


def tensors_carried(func: Any, out: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The whole tensors that are gathered, scattered or received, which exist to be exchanged. What is summed
    or sent belongs to somebody else."""
    kernel = kernel_of(func)
    if kernel == RECEIVE:
        return [tensor for tensor in tree_leaves(args[:1]) if isinstance(tensor, torch.Tensor)]
    if func.namespace == "_c10d_functional":  # what it is given is somebody else's
        gives = kernel in (ALL_GATHER, REDUCE_SCATTER) and isinstance(out, torch.Tensor)
        return [out] if gives else []
    if kernel == ALL_GATHER:
        return [tensor for tensor in tree_leaves((out, args[:1])) if isinstance(tensor, torch.Tensor)]
    if kernel == REDUCE_SCATTER:
        return [tensor for tensor in tree_leaves(args[:2]) if isinstance(tensor, torch.Tensor)]
    return []

"""Faster copies of gathered weights in FSDP2: one buffer for adjacent weights, and 32-bit words.

Fused kernels place the weights of several linear layers side by side, so that one matrix product reads them
all. FSDP2 copies each gathered weight into a buffer of its own. Such a product would have to join the buffers
again in each pass. Here these buffers are slices of one, in the order of the weights.

FSDP2 has no setting for it. It calls three methods of each parameter (`FSDPParam`, torch 2.11 to 2.15), which
`_JointBuffer` replaces. They create the buffer, allocate it again before a pass, and make the whole weight.

A group may mix frozen weights of 16 bits, or packed ones, with adapters of 32. They are gathered as 32-bit
words.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.apply.meshes import split
from snugfit.features.distributed.apply.rank_mesh import mesh

if TYPE_CHECKING:
    import torch

ParameterName = tuple["torch.nn.Module", str]
"""A module, and the name of one of its parameters."""


def adjacent_weights(module: torch.nn.Module, ranks: int) -> list[list[ParameterName]]:
    """Return the parameters of a module that are adjacent in memory, as lists in the order of addresses.

    `ranks` processes must have equal parts of each, since padding would separate the gathered weights.
    """
    places = {
        id(weight): (weight, (owner, name))
        for owner in module.modules()
        for name, weight in owner.named_parameters(recurse=False)
        # Shards over another mesh have no storage of their own.
        if mesh(weight) is None and weight.is_contiguous() and weight.ndim and weight.size(0) % ranks == 0
    }
    stored = split((weight for weight, _ in places.values()), lambda weight: weight.untyped_storage()._cdata)
    runs: list[list[ParameterName]] = []
    for weights in stored:
        ordered = sorted(weights, key=lambda weight: weight.storage_offset())
        joins = [_is_next(*two) for two in pairwise(ordered)]
        for index, weight in enumerate(ordered):
            if index == 0 or not joins[index - 1]:
                runs.append([])
            runs[-1].append(places[id(weight)][1])
    return [run for run in runs if len(run) > 1]


def _is_next(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if the second tensor begins where the first one ends, and both fit as rows of one."""
    alike = (first.dtype, first.shape[1:]) == (second.dtype, second.shape[1:])
    return alike and first.storage_offset() + first.numel() == second.storage_offset()


def change_gathering(module: Any, runs: Sequence[Sequence[ParameterName]]) -> None:
    """Make FSDP2 gather each of these lists of a sharded module's parameters into one buffer, and weights of
    mixed dtypes as 32-bit words.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    by_name = {(one._module_info.module, one._module_info.param_name): one for one in group.fsdp_params}
    for run in runs:
        if all(owner_and_name in by_name for owner_and_name in run):
            _JointBuffer([by_name[owner_and_name] for owner_and_name in run])
    if group.mp_policy.param_dtype is None:
        _gather_words(group.fsdp_params)


def _gather_words(members: Sequence[Any]) -> None:
    """Make FSDP2 gather parameters of other dtypes as float32, if some parameters of the group have it.

    FSDP2 copies parameters of several dtypes as bytes, one at a time. On an H200 the copy of half a layer of
    Llama-3.1-8B took 0.23 ms as bytes, and 0.13 ms as 32-bit words (`copies` in
    `results/h200-2026-11-30/fsdp-on-two.json`).
    """
    import torch

    narrower = [one for one in members if one.sharded_param.dtype != torch.float32]
    is_mixed = 0 < len(narrower) < len(members)
    if is_mixed and all(one._sharded_param_data.nbytes % torch.float32.itemsize == 0 for one in narrower):
        for one in narrower:
            one.__class__ = _words_class()


@cache
def _words_class() -> type[Any]:
    """Return the class of FSDP2's parameters that are gathered as 32-bit words."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    class WordsParam(FSDPParam):
        """A parameter whose shard and whole weight FSDP2 copies as 32-bit words."""

        @property
        def all_gather_inputs(self) -> list[torch.Tensor]:
            """Return this process's shard as float32. Copies keep all bits."""
            return [shard.view(torch.float32) for shard in super().all_gather_inputs]

        def init_unsharded_param(self) -> None:
            """Set the whole weight, in its own dtype."""
            _make_whole(self)

    return WordsParam


def _make_whole(member: Any) -> None:
    """Set a parameter's whole weight at the first call. Later passes fill the same memory."""
    import torch

    if not hasattr(member, "_unsharded_param"):
        size = member._orig_size
        flat = member.all_gather_outputs[0].view(member.param_dtype or member.orig_dtype)
        # Shards of unequal size have padding at the end.
        whole = flat[: size.numel()].view(size)
        trains = member.sharded_param.requires_grad
        member._unsharded_param = torch.nn.Parameter(whole, requires_grad=trains)


class _JointBuffer:
    """The buffer of some gathered parameters of FSDP2, whose methods it replaces."""

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = members
        for member in members:
            member.init_all_gather_outputs = partial(self._create, member)
            member.alloc_all_gather_outputs = self._allocate
            member.init_unsharded_param = partial(_make_whole, member)

    def _create(
        self, member: Any, numels: Any, dtypes: Any, ranks: int, device: torch.device, **_: Any
    ) -> None:
        """Create the buffer at the first call, and give each member its slice."""
        import torch

        if member.all_gather_outputs:
            return
        own = member._sharded_param_data.numel()
        sizes = [ranks * numels[0] * one._sharded_param_data.numel() // own for one in self._members]
        self._buffer = torch.empty(sum(sizes), dtype=dtypes[0], device=device)
        for one, part in zip(self._members, self._buffer.split(sizes), strict=True):
            one.all_gather_outputs = [part]

    def _allocate(self) -> None:
        """Allocate the buffer's memory again. FSDP2 frees that of each member's slice, which is the same."""
        storage = self._buffer.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self._buffer.nbytes)

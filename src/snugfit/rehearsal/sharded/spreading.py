"""How a model is spread over ranks, in a rehearsal: what FSDP2 and accelerate ask of tensors and devices.

A model that is spread from the host comes to the device one group of weights after the other. On shapes both
are on `meta`, where FSDP2 moves nothing, as of a model that is still to be loaded; what a recorder has not
seen is the host's, and is made on the device when it would be moved there.

accelerate remembers an optimizer's parameters by the addresses of their data, which tensors of shapes do not
have: their storages' stand for them. And FSDP2 without a mesh spreads over all ranks of the kind of device
that torch was built for.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from snugfit.rehearsal.record.recorder import Recorder

_data_ptr = torch.Tensor.data_ptr


def while_spreading(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """What stands in the place of which attributes of whom, while a rank runs."""
    import torch.distributed.fsdp._fully_shard._fsdp_init as first
    import torch.distributed.fsdp._fully_shard._fully_shard as second

    moving = functools.partial(_move, recorder)
    instead = {
        "_move_states_to_device": moving,
        "_init_default_mesh": _mesh_of_all,
        "_init_default_fully_shard_mesh": _mesh_of_all,
    }
    replaced = [
        (module, name, function)
        for module in (first, second)  # which of them has it depends on torch's version
        for name, function in instead.items()
        if hasattr(module, name)
    ]
    return [*replaced, (torch.Tensor, "data_ptr", _address)]


def _move(recorder: Recorder, parameters: list[Any], buffers: list[torch.Tensor], device: Any) -> None:
    """Each tensor that the recorder has not seen is made on the device, as moving it there would."""
    for tensor in (*parameters, *buffers):
        held = getattr(tensor, "_local_tensor", tensor)  # of a matrix that is cut, this rank's part
        if not recorder.memory.has_seen(held):
            tensor.data = torch.empty_like(tensor, device=device)


def _mesh_of_all(mesh_dim_names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("meta", (dist.get_world_size(),), mesh_dim_names=mesh_dim_names)


def _address(tensor: torch.Tensor) -> int:
    if not tensor.is_meta:
        return _data_ptr(tensor)
    return int(tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size())

"""The device mesh of all processes, and the device that each of them computes on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from snugfit.features.distributed.fields import ParallelWish


def mesh(tensor: Any) -> Any:
    """Return the device mesh that a `DTensor` is sharded over; None for an ordinary tensor."""
    return getattr(tensor, "device_mesh", None)


def is_part(tensor: Any) -> bool:
    """Return True if a value is a `DTensor`, of which this process has a shard."""
    return mesh(tensor) is not None


def own_part(tensor: Any) -> Any:
    """Return this process's local shard of a `DTensor`, or any other value itself."""
    return tensor.to_local() if is_part(tensor) else tensor


def device_of(model: torch.nn.Module) -> str:
    """Return the device type on which this process trains the model, even while the model is still on the
    host.
    """
    import torch.distributed as dist

    kind = next(model.parameters()).device.type
    # With NCCL, a model on the host will move to a GPU.
    return "cuda" if kind == "cpu" and "nccl" in str(dist.get_backend_config()) else kind


def mesh_of(wish: ParallelWish, device: str) -> DeviceMesh:
    """Return the device mesh of all processes, without axes of size one. Axes over slower links come first:
    `stage`, `replicate`, `shard`, `context`, `tensor`.

    Ranks along the data axis, `replicate` and `shard`, have different samples. `shard` is the axis of one
    copy of sharded weights; with several copies it has `shards` ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shards = wish.shards or (wish.data_ranks if wish.weights == "sharded" else 1)
    counts = {
        "stage": wish.stages,
        "replicate": wish.data_ranks // shards,
        "shard": shards,
        "context": wish.context,
        "tensor": wish.tensor,
    }
    # Axes over the slowest link come first, so that neighbouring ranks share the fastest.
    axes = {axis: count for axis, count in counts.items() if count > 1}
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def with_contexts(wish: ParallelWish) -> ParallelWish:
    """Return `wish` with the size of its data axis multiplied by the number of ranks that share each
    sequence.

    Those ranks have the same weights and different gradients, so weights are sharded over them too.
    """
    return replace(wish, context=1, shards=wish.shards * wish.context)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a device mesh along which ranks have different samples of the batch."""
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis in ("replicate", "shard"))
    return mesh[axes] if len(axes) < mesh.ndim else mesh

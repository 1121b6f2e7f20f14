"""Simulate FSDP2's shards on the host: torch's own code for `CPUOffloadPolicy`, on shapes.

Gathered weights and gradients are tensors of the device, so on `meta`. Shards, their gradients and the
optimizer's states are on the host, as in a real run (`host_tensors.py`). Without patches, FSDP2 treats
tensors on `meta` as a model without loaded weights, and moves none. So two patches move them. While a layer
is sharded, its weights move to the device (`while_spreading` in `ranks.py`), and its shards move back here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from snugfit.features.distributed.simulate.host_tensors import HostTensors
from snugfit.features.distributed.simulate.patches import replace_attributes
from snugfit.step.host_link import MetaLink

if TYPE_CHECKING:
    from snugfit.rehearsal.record.recorder import Recorder


class HostShards(HostTensors):
    """Simulated host memory of one rank. A freed page-locked block is reused as a whole
    (`CachingHostAllocator`).
    """

    def keep(self, like: torch.Tensor) -> torch.Tensor:
        """Return a page-locked host tensor for a copy of this device tensor, and record the copy."""
        MetaLink.observer.stage_out(like.nbytes)
        with _disable_current_modes():
            # `take` counts a whole storage, so the copy of a view gets a storage of its own size.
            alone = torch.empty(like.shape, dtype=like.dtype, device="meta")
        tensor = self.take(alone)
        self.lend(tensor)
        return tensor

    def works_here(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if an operator reads and writes only tensors on the host."""
        if self.copies_back(func, args, kwargs):
            return False
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        return any(map(self.holds, tensors)) and not any(one.is_meta for one in tensors)


@contextlib.contextmanager
def shards_on_host(recorder: Recorder) -> Iterator[HostShards]:
    """Context in which FSDP2's offloaded shards are placed on the simulated host. Yields the
    host's memory.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    host = HostShards.beside(recorder)
    shard = FSDPParam._init_sharded_param

    def shard_and_keep(parameter: Any, *arguments: Any, **keywords: Any) -> None:
        shard(parameter, *arguments, **keywords)
        if parameter.offload_to_cpu:
            _keep_on_host(parameter, host)

    # FSDP2 pins shards that are not pinned yet.
    pinned = torch.Tensor, "is_pinned", lambda tensor, *device: host.holds(tensor)
    with replace_attributes([(FSDPParam, "_init_sharded_param", shard_and_keep), pinned]), host:
        recorder.host = host
        yield host


def _keep_on_host(parameter: Any, host: HostShards) -> None:
    """Offload a new shard as FSDP2 does, which skips shards on `meta`."""
    before = parameter.sharded_param
    shard = parameter._sharded_param_data
    parameter._sharded_param_data = host.keep(shard)
    dim = parameter.fsdp_placement.dim
    # As in FSDP2, the parameter is the padded shard without its padding.
    padded = parameter._sharded_param_data.view(parameter.padded_sharded_param_size)
    own = padded.narrow(dim, 0, before._local_tensor.size(dim))
    parameter.sharded_param = torch.nn.Parameter(
        parameter.to_sharded_dtensor(own), requires_grad=before.requires_grad
    )
    parameter._setattr_on_modules(parameter.sharded_param)

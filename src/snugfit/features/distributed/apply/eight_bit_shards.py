"""Optimizers of bitsandbytes over FSDP2's shards, with states in 8 bits.

bitsandbytes keeps states of small tensors in 32 bits, and those of others in 8, in blocks of 256 elements
that share a scale. Its kernels take plain tensors. So each step updates this process's part of a weight. The
size of the whole weight decides the number of bits. A run that resumes on other GPUs then trains the same.

Each part must consist of whole blocks on any number of GPUs. Parts end at rows. So weights whose rows are no
whole blocks keep 32 bits.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.apply.rank_mesh import is_part, own_part

if TYPE_CHECKING:
    import torch

BLOCK = 256
"""Number of elements that share a scale. Source: `Optimizer2State.init_state` of bitsandbytes 0.50."""

SCALES = ("absmax1", "absmax2")
"""Names of the blocks' scales in bitsandbytes' optimizer states."""

EIGHT_BIT = ("bitsandbytes.optim:AdamW8bit", "bitsandbytes.optim:Lion8bit")
"""Import paths of bitsandbytes' optimizers with states in 8 bits."""


def has_whole_blocks(shape: torch.Size) -> bool:
    """Return True if each row of a weight of this shape consists of whole blocks."""
    return math.prod(shape[1:]) % BLOCK == 0


def as_shard(value: torch.Tensor, weight: Any) -> torch.Tensor:
    """Return a state's local part as a `DTensor` that is sharded like `weight`. The scales of blocks get one
    row for each row of the weight.
    """
    import torch
    from torch.distributed.tensor import DTensor

    local, shape = weight.to_local(), weight.shape
    if value.shape != local.shape:
        shape = torch.Size((len(weight), math.prod(shape[1:]) // BLOCK))
        value = value.view(len(local), shape[1])
    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return DTensor.from_local(
        value, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )


def as_rows(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the scales of all blocks with one row for each row of the weight."""
    return scales.view(len(weight), -1)


def widen_states(states: dict[str, Any]) -> None:
    """Replace a weight's whole states in 8 bits by the same numbers in 32 bits."""
    if not any(name in states for name in SCALES):
        return
    from bitsandbytes.functional import dequantize_blockwise

    for number, name in enumerate(SCALES, 1):
        if name in states:
            scales, code = states.pop(name).flatten(), states.pop(f"qmap{number}")
            packed = states[f"state{number}"]
            states[f"state{number}"] = dequantize_blockwise(
                packed, absmax=scales, code=code.to(packed.device), blocksize=BLOCK
            )


@functools.cache
def on_shards(kind: Any) -> Any:
    """Return a subclass of an optimizer of bitsandbytes that steps on shards. It has the same name, because a
    checkpoint contains the name.
    """
    return type(kind.__name__, (_StepsOnShards, kind), {})


class _StepsOnShards:
    """Base class of optimizers of bitsandbytes whose parameters may be shards (`DTensor`)."""

    state: Any

    def get_config(self, gindex: int, pindex: int, group: Any) -> dict[str, Any]:
        """Return bitsandbytes' settings for a parameter, in which the whole weight decides the number of
        bits.
        """
        config: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        weight = group["params"][pindex]
        if is_part(weight):
            # bitsandbytes compares this number with the size of the part.
            is_wide = weight.numel() < config["min_8bit_size"] or not has_whole_blocks(weight.shape)
            config["min_8bit_size"] = sys.maxsize if is_wide else 0
        return config

    def init_state(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        """Create the states of a parameter, as shards if it is one."""
        if not is_part(p):
            super().init_state(group, p, gindex, pindex)  # type: ignore[misc]
            return
        local = p.to_local().detach()
        super().init_state(group, local, gindex, pindex)  # type: ignore[misc]
        states = self.state.pop(local)
        self.state[p] = {
            name: as_shard(value, p) if name.startswith(("state", "absmax")) else value
            for name, value in states.items()
        }

    def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        """Update a parameter, or this process's part of it."""
        if not is_part(p):
            super().update_step(group, p, gindex, pindex)  # type: ignore[misc]
            return
        local, states = p.to_local().detach(), self.state[p]
        if not local.numel():
            states["step"] += 1
            return
        local.grad = p.grad.to_local()
        self.state[local] = {name: _local(name, value) for name, value in states.items()}
        super().update_step(group, local, gindex, pindex)  # type: ignore[misc]
        states["step"] = self.state.pop(local)["step"]


def _local(name: str, value: Any) -> Any:
    """Return this process's part of a state, with scales in one dimension."""
    part = own_part(value)
    return part.view(-1) if name in SCALES else part

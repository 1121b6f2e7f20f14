"""AdamW with its moments in the host's memory and its update on the CPU.

The device stores weights and gradients. The update copies some of them at a time into page-locked memory
(`STAGED_BYTES` of each). It runs torch's own fused AdamW there on the CPU, and copies the new weights back.
These operations are serial: the device waits for the CPU.

On `meta` nothing is copied or stored. An observer receives the sizes of the copies, as in a simulation.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch

from snugfit.features.optimizers.updates.pieces import MOMENTS, FusedAdamW, fused_adamw, pieces
from snugfit.step.host_link import STAGED_BYTES, MetaLink
from snugfit.step.wishes.own_adamw import flat, with_strides_of


class WeightSlice(NamedTuple):
    """A range of elements of a weight, and of its gradient and moments."""

    weight: torch.Tensor
    gradient: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    step: int


class HostMemory:
    """Host memory that is allocated once and reused; it is page-locked if there is a GPU.

    It never comes from torch's allocator, which simulates the device's memory where the device is a CPU.
    """

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None

    def halves(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two host buffers of `STAGED_BYTES` each, for weights and for gradients."""
        if self._bytes is None:
            # Only page-locked memory is copied asynchronously.
            if device.type == "cuda":
                self._bytes = torch.empty(2 * STAGED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            else:
                self._bytes = _zeros_on_host(2 * STAGED_BYTES, torch.uint8)
        return self._bytes[:STAGED_BYTES], self._bytes[STAGED_BYTES:]


class AdamWOnHost(FusedAdamW):
    """torch's AdamW with states in host memory and updates on the CPU."""

    @cached_property
    def _memory(self) -> HostMemory:
        return HostMemory()

    def update_weights(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update weights of one dtype and device together."""
        parts = [part for weight in weights for part in self._parts(weight)]
        for piece in pieces(parts, _kind, lambda part: part.weight.nbytes, STAGED_BYTES):
            if piece[0].weight.is_meta:
                _report_piece(piece)
            else:
                self._update(piece, group)

    def _parts(self, weight: torch.Tensor) -> Iterator[WeightSlice]:
        """Yield slices of a weight's elements in memory order. Before that, add one to the step count in its
        state.
        """
        state = self.state[weight]
        state["step"] = step = int(state.get("step", 0)) + 1
        assert weight.grad is not None
        whole, gradient = flat(weight), flat(with_strides_of(weight, weight.grad))
        moments = _moments(state, weight)
        # A simulated weight has no moments to slice, but its slices need some tensor.
        flats = [whole[:0] if weight.is_meta else flat(moment) for moment in moments]
        most = max(1, STAGED_BYTES // weight.element_size())
        for start in range(0, whole.numel(), most):
            end = min(start + most, whole.numel())
            yield WeightSlice(
                whole[start:end], gradient[start:end], tuple(buffer[start:end] for buffer in flats), step
            )

    def _update(self, piece: list[WeightSlice], group: dict[str, Any]) -> None:
        device = piece[0].weight.device
        weights, gradients = (_staging_of(piece, half) for half in self._memory.halves(device))
        for part, weight, gradient in zip(piece, weights, gradients, strict=True):
            weight.copy_(part.weight, non_blocking=True)
            gradient.copy_(part.gradient, non_blocking=True)
        if device.type == "cuda":
            # The CPU must not read the copies before they are done.
            torch.cuda.current_stream(device).synchronize()
        moments = ([part.moments[number] for part in piece] for number in range(len(MOMENTS)))
        # torch's kernel increments the step itself.
        steps = [torch.tensor(float(part.step - 1), device="cpu") for part in piece]
        fused_adamw([weights, gradients, *moments], steps, group)
        for part, weight in zip(piece, weights, strict=True):
            # The host keeps no second copy of the weights, because a checkpoint may be loaded to the device
            # at any time.
            part.weight.copy_(weight, non_blocking=True)


def _kind(part: WeightSlice) -> tuple[torch.dtype, torch.device]:
    return part.weight.dtype, part.weight.device


def _staging_of(piece: list[WeightSlice], memory: torch.Tensor) -> list[torch.Tensor]:
    """Return a region of the host's staging buffer for each slice of a weight; the regions are adjacent."""
    buffer, start = memory.view(piece[0].weight.dtype), 0
    staged = []
    for part in piece:
        staged.append(buffer[start : start + part.weight.numel()])
        start += part.weight.numel()
    return staged


def _moments(state: dict[str, Any], weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return both moments on the host, in the layout of the weight.

    A library that loads states moves them to the weight's device, and a checkpoint stores no strides. Both
    are corrected here. A meta weight has meta moments.
    """
    for name in MOMENTS:
        moment = state.get(name)
        if weight.is_meta:
            # An expanded single number needs no memory for the moments of a simulated weight.
            state[name] = torch.zeros((), dtype=weight.dtype, device="cpu").expand(weight.shape)
        # Libraries move loaded states to the weight's device, and checkpoints store no strides.
        elif moment is None or moment.device.type != "cpu" or moment.stride() != weight.stride():
            state[name] = _zeros_on_host(weight.nbytes, weight.dtype).as_strided(
                weight.shape, weight.stride()
            )
            if moment is not None:
                state[name].copy_(moment)
    return tuple(state[name] for name in MOMENTS)


def _zeros_on_host(nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of this dtype, `nbytes` in all, in newly allocated host memory."""
    # Memory of `mmap` is zero at first, and does not belong to torch's allocator.
    return torch.frombuffer(mmap.mmap(-1, max(dtype.itemsize, nbytes)), dtype=dtype)


def _report_piece(piece: list[WeightSlice]) -> None:
    """Report to the observer that one group of weight slices is copied to the host, updated there and copied
    back.
    """
    observer = MetaLink.observer
    for part in piece:
        observer.stage_out(part.weight.nbytes)
        observer.stage_out(part.gradient.nbytes)
    # Weights are copied back after the whole slice is updated.
    observer.update_on_host(sum(part.weight.nbytes for part in piece), piece[0].weight.dtype)
    for part in piece:
        observer.stage_back(part.weight.nbytes)

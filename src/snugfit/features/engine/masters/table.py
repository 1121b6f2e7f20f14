"""Tables of memory addresses, in which the kernels look up each weight and all tensors of its update.

A table is written once, and again after an address has changed. Gradients usually keep their addresses from
step to step, because of the allocator or a CUDA graph. A weight without a gradient stays in the table, with
the address 0, so that all steps launch the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from snugfit.errors import RecipeError
from snugfit.features.engine.masters.block import SETTINGS, LaunchSettings
from snugfit.features.engine.masters.device_copy import DeviceCopy
from snugfit.features.engine.masters.halves import RESIDUAL, lower_bits
from snugfit.step.wishes.own_adamw import flat, with_strides_of

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of the first and second moment in AdamW's state."""

ALIGNMENT = 16
"""Multiple of which tensors' memory addresses are, in bytes, as torch's allocator aligns them. A view into
another tensor may have another address, and is read more slowly.
"""


class WeightTable:
    """A table of addresses for the weights of one device and dtype, in halves or in 32 bits, in the order of
    their updates.

    `places` has a record of int64 for each weight: its first block, its number of elements, and addresses.
    These are of weight, residual (0 without), states and, seventh, gradient (0 without). `owners` has the
    weight's number for each block, and `weight_indices` for each weight its row of the step's numbers.
    """

    record = 7
    group = 0
    """Number of elements of 8-bit moments that share a scale; 0 for 32-bit moments."""
    usual_settings: ClassVar[LaunchSettings] = SETTINGS
    """Default launch settings of the kernels that use the table."""

    def __init__(self, weights: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]) -> None:
        self.settings = self.usual_settings
        self.weights, self.states = list(weights), list(states)
        self.lower_bits = _lower_bits_of_all(states)
        for weight in weights:
            flat(weight)  # raises for unsupported layouts
        device, block = weights[0].device, self.settings.block
        counts = torch.tensor([weight.numel() for weight in weights], dtype=torch.int64, device="cpu")
        # Each weight starts a new block, so that a block belongs to a single weight.
        blocks = (counts + block - 1) // block
        numbers = torch.arange(len(weights), dtype=torch.int32, device="cpu")
        self.owners = numbers.repeat_interleave(blocks).to(device)
        self.blocks = int(blocks.sum())
        self.has_gradient: list[bool] = []
        """One flag per weight, True if it had a gradient at the last call of `find`."""
        self.is_aligned = True
        self._starts: list[int] = (blocks.cumsum(0) - blocks).tolist()
        self._counts: list[int] = counts.tolist()
        self._kept = [[*map(_address, self.tensors_kept(state))] for state in states]
        self._places = DeviceCopy((len(weights), self.record), torch.int64, device)
        self._which = DeviceCopy((len(weights),), torch.int32, device)
        self._copies: Sequence[torch.Tensor | None] = ()
        self._found: list[int] | None = None
        self._rows: list[int] | None = None

    @property
    def places(self) -> torch.Tensor:
        """Return the table's rows of memory addresses (N, `record`), an int64 tensor on the device."""
        return self._places.value

    @property
    def weight_indices(self) -> torch.Tensor:
        """Return the index of each weight's row of scalars, such as the learning rate (N,), int32."""
        return self._which.value

    @classmethod
    def tensors_kept(cls, state: dict[str, Any]) -> list[torch.Tensor | None]:
        """Return the tensors that an update of a weight reads and writes, in the order of a record: low half
        and both moments."""
        return [state.get(RESIDUAL), *(state[name] for name in MOMENTS)]

    def find(self) -> None:
        """Read the addresses of weights and gradients, and rewrite the records where one has changed. Raises
        `RecipeError` for a gradient that is sparse or of another dtype than its weight."""
        given = [weight.grad for weight in self.weights]
        self.has_gradient = [gradient is not None for gradient in given]
        addresses = [weight.data_ptr() for weight in self.weights]
        try:
            addresses += map(_address, given)
        # A sparse gradient has no memory address; `with_strides_of` raises the error for it below.
        except RuntimeError:
            addresses = []
        # Gradients usually keep their addresses, so that nothing is written.
        if addresses and addresses == self._found:
            return
        read = [
            None if gradient is None else with_strides_of(weight, gradient)
            for weight, gradient in zip(self.weights, given, strict=True)
        ]
        # The copy of a gradient must exist until the kernel has read it.
        self._copies = [copy for copy, slope in zip(read, given, strict=True) if copy is not slope]
        # Copies have new addresses in each step, so the addresses are not compared.
        self._found = None if self._copies else addresses
        records = [
            [start, count, weight, *of_state[:3], slope, *of_state[3:]]
            for start, count, weight, of_state, slope in zip(
                self._starts, self._counts, addresses, self._kept, map(_address, read), strict=False
            )
        ]
        # An address of 0 (a missing tensor) counts as aligned.
        self.is_aligned = not any(address % ALIGNMENT for record in records for address in record[2:])
        self._places.write(records)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the weights have. The table stores none: they are dropped when a step
        ends.
        """
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def free_copies(self) -> None:
        """Free copies of gradients, after the kernels have read them. A gradient is copied if its memory
        layout differs from its weight's.
        """
        self._copies = []

    def number_rows(self, rows: list[int]) -> None:
        """Assign each weight the row of scalars (learning rate, bias corrections) that its update reads, and
        copy it to the device.
        """
        # A weight's row of scalars changes only if it gets its first gradient or skips a step.
        if rows != self._rows:
            self._rows = list(rows)
            self._which.write(rows)


def _lower_bits_of_all(states: Sequence[dict[str, Any]]) -> int:
    """Return the number of bits in these weights' low halves. Raises `RecipeError` where they differ: one
    kernel updates all.
    """
    widths = {lower_bits(state.get(RESIDUAL)) for state in states}
    if len(widths) > 1:
        raise RecipeError(
            f"The low halves of some master weights have {min(widths)} bits and of others "
            f"{max(widths)}: states "
            "of two optimizers were mixed. Load those of one."
        )
    return widths.pop()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

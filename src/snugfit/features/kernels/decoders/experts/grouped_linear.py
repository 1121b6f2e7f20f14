"""Linear layers of all experts as grouped products, with the low-rank updates of peft's adapters.

y_e = x_e W_e^T + s (x_e A_e^T) B_e^T for the rows of each expert e; Hu et al., arXiv 2106.09685, section 4.1.
peft adds s B_e A_e to W_e instead, which takes a second tensor of all experts and a gradient as large. It
stores A (E * r, K) by expert, and B (N, r * E) with the expert as the fastest index (`ParamWrapper` of
`peft.tuners.lora.layer`). Frozen weights of 4 bits are unpacked for each product, and not saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from snugfit.features.kernels.decoders.experts.mxfp4 import Mxfp4Weight, unpack
from snugfit.features.kernels.operations.four_bits import unpack_whole
from snugfit.features.kernels.operations.operators import define, has_kernel
from snugfit.features.kernels.operations.products import results_are_kept

_ADD_LOW_RANK_EXPERTS = define(
    "add_low_rank_experts(Tensor(a!) rows, Tensor columns, Tensor matrices, Tensor ends) -> ()", "experts"
)

ALIGNMENT = 16
"""Bytes by which strides of a grouped product must be divisible (`GroupedMMUtils.h` of torch)."""


class LinearSettings(NamedTuple):
    """Attributes of an `ExpertLinear` that are no tensors."""

    is_turned: bool
    scale: float
    state: Any


class ExpertLinear(NamedTuple):
    """Parameters of one linear layer of E experts."""

    weight: torch.Tensor  # (E, N, K), (E, K, N) if `is_turned`, or packed with two numbers to a byte
    is_turned: bool
    state: Any = None  # bitsandbytes' `QuantState` of a packed weight, or its `Mxfp4Weight`
    bias: torch.Tensor | None = None  # (E, N)
    down: torch.Tensor | None = None  # (E * r, K), peft's A
    up: torch.Tensor | None = None  # (N, r * E), peft's B
    scale: float = 1.0

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """Return weight, bias, A and B, as an autograd function takes them."""
        return [self.weight, self.bias, self.down, self.up]

    @property
    def settings(self) -> LinearSettings:
        """Return the attributes that are no tensors."""
        return LinearSettings(self.is_turned, self.scale, self.state)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return both sizes of an expert's weight, and the rank of its adapters; 0 without one."""
        experts, *sizes = self.weight.shape if self.state is None else self.state.shape
        return (*sizes, 0 if self.down is None else len(self.down) // experts)


class GroupedLinear(NamedTuple):
    """One linear layer of all experts, with factors in the dtype of its product."""

    weight: torch.Tensor  # (E, N, K) or (E, K, N), or packed
    settings: LinearSettings
    bias: torch.Tensor | None
    down: torch.Tensor | None  # (E, r, K)
    up: torch.Tensor | None  # (E, r, N)
    ends: torch.Tensor  # (E,) int32

    @classmethod
    def start(
        cls,
        tensors: Sequence[torch.Tensor | None],
        settings: LinearSettings,
        ends: torch.Tensor,
        dtype: torch.dtype,
    ) -> Self:
        """Return the layer of `ExpertLinear`'s tensors and settings."""
        weight, bias, down, up = tensors
        assert weight is not None
        of_experts = None
        if down is not None and up is not None:
            count = len(ends)
            down = down.detach().view(count, -1, down.size(1)).to(dtype)
            of_experts = up.new_empty((count, down.size(1), len(up)), dtype=dtype)
            # The copy casts and puts the expert first.
            of_experts.copy_(up.detach().view(len(up), -1, count).permute(2, 1, 0))
        whole = weight.detach() if settings.state is not None else weight.detach().to(dtype)
        return cls(whole, settings, None if bias is None else bias.detach(), down, of_experts, ends)

    def matrices(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights (E, N, K) of all experts; those of 4 bits are unpacked each time."""
        is_turned, _, state = self.settings
        if state is None:
            whole = self.weight
        elif isinstance(state, Mxfp4Weight):
            whole = unpack(self.weight, state.scales, dtype)
        else:
            whole = unpack_whole(self.weight, state, dtype)
        return whole.transpose(1, 2) if is_turned else whole

    def multiply(self, rows: torch.Tensor, numbers: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product (S, N) of sorted rows (S, K).

        With the number (S,) of each row's expert, add the bias.
        """
        product = grouped_product(rows, self.matrices(rows.dtype).transpose(1, 2), self.ends)
        if results_are_kept():
            # Selective checkpointing reuses the product, so it must not change.
            product = product.clone()
        if self.up is not None:
            add_low_rank(product, self.columns(rows), self.up, self.ends)
        if self.bias is not None and numbers is not None:
            product.add_(self.bias.index_select(0, numbers))
        return product

    def columns(self, rows: torch.Tensor) -> torch.Tensor:
        """Return s x A^T (S, r) of sorted rows (S, K)."""
        assert self.down is not None
        return grouped_product(rows, self.down.transpose(1, 2), self.ends) * self.settings.scale

    def slopes(self, of_product: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient (S, r) of x A^T, s dy B, from that of the product (S, N)."""
        if self.up is None:
            return None
        return grouped_product(of_product, self.up.transpose(1, 2), self.ends) * self.settings.scale

    def input_gradient(self, of_product: torch.Tensor, slopes: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient (S, K) of the sorted rows."""
        of_rows = grouped_product(of_product, self.matrices(of_product.dtype), self.ends)
        if slopes is not None and self.down is not None:
            add_low_rank(of_rows, slopes, self.down, self.ends)
        return of_rows

    def gradients(
        self,
        of_product: torch.Tensor,
        slopes: torch.Tensor | None,
        rows: torch.Tensor | None,
        needed: Sequence[bool],
        tensors: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of weight, A and B in the shapes and dtypes of `tensors`, with None for the
        bias.

        `rows` (S, K) is the input, and may be None if nothing is needed.
        """
        gradients: list[torch.Tensor | None] = [None] * len(tensors)
        if rows is None:
            return gradients
        weight, _, down, up = tensors
        if needed[0] and weight is not None:
            pair = (rows, of_product) if self.settings.is_turned else (of_product, rows)
            gradients[0] = grouped_gradient(*pair, self.ends).to(weight.dtype)
        if needed[2] and down is not None and slopes is not None:
            gradients[2] = grouped_gradient(slopes, rows, self.ends).to(down.dtype).view(down.shape)
        if needed[3] and up is not None:
            of_up = grouped_gradient(of_product, self.columns(rows), self.ends)
            turned = torch.empty_like(up, memory_format=torch.contiguous_format)
            turned.view(len(up), -1, len(of_up)).copy_(of_up.permute(1, 2, 0))
            gradients[3] = turned
        return gradients


def add_low_rank(
    rows: torch.Tensor, columns: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor
) -> None:
    """Add columns (S, r), each times the matrix (r, N) of its group, to rows (S, N) in place."""
    if has_kernel(rows):
        _ADD_LOW_RANK_EXPERTS(rows, columns, matrices, ends)
    else:
        rows.add_(grouped_product(columns, matrices, ends))


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows (S, K), each times the matrix (K, N) of its group: (S, N). `ends` has the groups' ends."""
    if _has_operator(rows, matrices):
        return torch._grouped_mm(rows, matrices, offs=ends)
    # The loop is for CPUs, where reading the groups takes no wait.
    product = rows.new_zeros((len(rows), matrices.size(2)))
    for start, end, matrix in zip([0, *ends.tolist()], ends.tolist(), matrices, strict=False):
        torch.mm(rows[start:end], matrix, out=product[start:end])
    return product


def grouped_gradient(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return left^T right (E, N, K) over the rows of each group, for (S, N) and (S, K)."""
    if _has_operator(left.t(), right):
        return torch._grouped_mm(left.t(), right, offs=ends)
    groups = zip([0, *ends.tolist()], ends.tolist(), strict=False)
    return torch.stack([left[start:end].t() @ right[start:end] for start, end in groups])


def _has_operator(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if torch's grouped product supports these operands; only a CPU has others."""
    if first.device.type != "cpu":
        return True
    return first.dtype is not torch.float64 and all(map(_is_aligned, (first, second)))


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Return True if the strides and the address of a matrix, or of several, are aligned."""
    strides = [stride * matrix.element_size() for stride in matrix.stride() if stride != 1]
    return matrix.data_ptr() % ALIGNMENT == 0 and not any(stride % ALIGNMENT for stride in strides)

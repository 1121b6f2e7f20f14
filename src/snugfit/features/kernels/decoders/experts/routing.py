"""Tokens sorted by their experts on the device, without a read by the host.

T tokens with k experts each give T * k rows, in the order of their experts. So all sizes are known before the
routing is.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

from snugfit.features.kernels.operations.operators import define, has_kernel

_COMBINE_EXPERTS = define(
    "combine_experts(Tensor rows, Tensor places, Tensor? weights, *, Tensor(a!) out) -> ()", "experts"
)


class Routing(NamedTuple):
    """The order of rows by expert, for T tokens with k experts each."""

    order: torch.Tensor  # (T * k,) int64: place in (T, k) of each sorted row
    places: torch.Tensor  # (T * k,) int64: sorted row of each place in (T, k)
    ends: torch.Tensor  # (E,) int32: end of each expert's rows
    choices: int
    """Number of experts k of a token."""

    @classmethod
    def start(cls, index: torch.Tensor, experts: int) -> Self:
        """Return the order of rows for the experts (T, k) of each token."""
        flat = index.reshape(-1)
        ordered, order = torch.sort(flat, stable=True)
        numbers = torch.arange(len(flat), device=flat.device)
        places = torch.empty_like(order).scatter_(0, order, numbers)
        groups = torch.arange(experts, device=flat.device, dtype=flat.dtype)
        ends = torch.searchsorted(ordered, groups, right=True, out_int32=True)
        return cls(order, places, ends, index.size(1))

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the token (T, H) of each sorted row (T * k, H)."""
        tokens = torch.div(self.order, self.choices, rounding_mode="floor")
        return hidden.index_select(0, tokens)

    def sort(self, values: torch.Tensor) -> torch.Tensor:
        """Return values (T, k), such as weights of experts, in the order of the rows (T * k,)."""
        return values.reshape(-1).index_select(0, self.order)

    def unsort(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of sorted rows (T * k,) by token and choice (T, k)."""
        return values.index_select(0, self.places).view(-1, self.choices)

    def combine(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Return for each token the sum (T, H) of its rows (T * k, H), times the weights (T, k) if given."""
        if has_kernel(rows):
            out = rows.new_empty((len(rows) // self.choices, rows.size(1)))
            _COMBINE_EXPERTS(rows, self.places, None if weights is None else weights.contiguous(), out=out)
            return out
        return combine_reference(rows, self.places, weights, self.choices)


def combine_reference(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None, choices: int
) -> torch.Tensor:
    """Return the sums (T, H) of `Routing.combine`, in plain torch."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    picked = rows.index_select(0, places).view(-1, choices, rows.size(1)).to(wide)
    if weights is not None:
        picked = picked * weights.to(wide)[..., None]
    return picked.sum(1).to(rows.dtype)

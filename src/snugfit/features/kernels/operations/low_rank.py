"""Low-rank updates of linear layers: y = x W^T + s (x A^T) B^T, added to the product with the frozen weight.

A is (r, H) and B is (N, r); Hu et al., arXiv 2106.09685, section 4.1. Layers of one input share one product
with all their A. Each update is added in place to its layer's columns of the joint product. So no tensor of
the product's size exists beside it. The scale s is folded into B before B is rounded.

peft's adapters may have 32 bits where activations have 16. Without autocast peft then computes updates in 32
bits, from a copy of x. Here each 32-bit factor is the sum of two 16-bit numbers, high + low, which hold 16 of
its significant bits. With S = x A^T = Sh + Sl and B = Bh + Bl, the update is [Sh | Sl | Sh] [Bh | Bh | Bl]^T.
The missing product Sl Bl is below the rounding of the sum. Sums of all products have 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch

from snugfit.features.kernels.operations.operators import autocast_device, has_kernel
from snugfit.features.kernels.operations.products import NARROW


class Adapter(NamedTuple):
    """The factors of a linear layer's low-rank update, whose weight is scale * up @ down."""

    down: torch.Tensor  # (r, H), peft's A
    up: torch.Tensor  # (N, r), peft's B
    scale: float


class AdapterPlace(NamedTuple):
    """The columns of a joint product to which an adapter adds, and its settings."""

    start: int
    stop: int
    rank: int
    scale: float


class LowRankUpdate(NamedTuple):
    """The updates of a joint product (T, N) by its adapters, whose ranks have the sum R.

    Factors have the dtype of the product, in one part or, for 32-bit factors, in three.
    """

    columns: torch.Tensor  # (T, parts * R): S, all parts of each adapter in turn
    down: torch.Tensor  # (parts * R, H): A, each part of all adapters in turn
    ups: Sequence[torch.Tensor]  # (N, parts * r) of each adapter: s B
    places: Sequence[AdapterPlace]
    parts: int

    @classmethod
    def start(
        cls, rows: torch.Tensor, factors: Sequence[torch.Tensor], places: Sequence[AdapterPlace]
    ) -> Self:
        """Return the updates of a product of these rows (T, H). `factors` are A and B of each adapter in
        turn, and `places` are not empty.
        """
        dtype = rows.dtype
        downs, ups = [one.detach() for one in factors[::2]], [one.detach() for one in factors[1::2]]
        # Under autocast peft rounds the factors too; without it, peft widens the rows.
        autocast = torch.is_autocast_enabled(autocast_device(rows))
        is_split = dtype in NARROW and ups[0].dtype not in NARROW and not autocast
        ups = [up if place.scale == 1 else up * place.scale for up, place in zip(ups, places, strict=True)]
        down = downs[0] if len(downs) == 1 else torch.cat(downs)
        if not is_split:
            down = down.to(dtype)
            return cls(torch.mm(rows, down.t()), down, [up.to(dtype) for up in ups], places, 1)
        ranks = [place.rank for place in places]
        high, low = _halves(down, dtype)
        down = torch.cat([high, high, low])
        sums = _add_halves(_wide_product(rows, down[sum(ranks) :].t()))
        columns = _join([_split(part, dtype) for part in sums.split(ranks, 1)])
        joined = [torch.cat([high, high, low], 1) for high, low in (_halves(up, dtype) for up in ups)]
        return cls(columns, down, joined, places, 3)

    @classmethod
    def restore(cls, tensors: Sequence[torch.Tensor], places: Sequence[AdapterPlace], parts: int) -> Self:
        """Return the updates with these `tensors`, in the order of the property of this name."""
        return cls(tensors[0], tensors[1], tensors[2:], places, parts)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that a backward pass needs."""
        return [self.columns, self.down, *self.ups]

    def add_to(self, product: torch.Tensor) -> None:
        """Add the updates to the product (T, N) in place."""
        for place, up, part in self._by_adapter():
            product[:, place.start : place.stop].addmm_(part, up.t())

    def slopes(self, of_product: torch.Tensor) -> torch.Tensor:
        """Return the gradient (T, parts * R) of S, dy s B: each part of all adapters in turn."""
        found = []
        for place, up in zip(self.places, self.ups, strict=True):
            part = of_product[:, place.start : place.stop]
            if self.parts == 1:
                found.append(torch.mm(part, up))
            else:
                # The first part is in both products, and the last two are all of B.
                found.append(_add_halves(_wide_product(part, up[:, place.rank :])))
        return _join(found) if self.parts == 1 else _split(_join(found), of_product.dtype)

    def gradients(
        self,
        of_product: torch.Tensor,
        slopes: torch.Tensor,
        rows: Callable[[], torch.Tensor],
        needed: Sequence[bool],
        dtypes: Sequence[torch.dtype],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of A (r, H) and B (N, r) of each adapter in turn, in these dtypes.

        `rows` returns the rows (T, H), and is called only if an A needs a gradient. All A are slices of one
        tensor.
        """
        given: list[torch.Tensor | None] = [None] * len(needed)
        if any(needed[::2]):
            rank = sum(place.rank for place in self.places)
            of_down = _wide_product(slopes[:, : min(self.parts, 2) * rank].t(), rows())
            if self.parts > 1:
                of_down = of_down[:rank] + of_down[rank:]
            given[::2] = of_down.to(dtypes[0]).split([place.rank for place in self.places])
        for index, (place, _, part) in enumerate(self._by_adapter()):
            if needed[2 * index + 1]:
                slope = of_product[:, place.start : place.stop].t()
                of_up = _wide_product(slope, part[:, : min(self.parts, 2) * place.rank])
                of_up = of_up if self.parts == 1 else _add_halves(of_up)
                given[2 * index + 1] = of_up.mul_(place.scale).to(dtypes[2 * index + 1])
        return [one if asked else None for one, asked in zip(given, needed, strict=True)]

    def _by_adapter(self) -> list[tuple[AdapterPlace, torch.Tensor, torch.Tensor]]:
        """Return each adapter's place, its B and its columns of S."""
        columns = self.columns.split([self.parts * place.rank for place in self.places], 1)
        return list(zip(self.places, self.ups, columns, strict=True))


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tuple(parts), 1) if len(parts) > 1 else parts[0]


def _wide_product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a product whose sums of 16-bit terms have 32 bits."""
    if first.dtype not in NARROW:
        return torch.mm(first, second)
    if has_kernel(first):
        return torch.mm(first, second, out_dtype=torch.float32)
    # The CPU has no such product, and autocast would round its factors.
    with torch.autocast("cpu", enabled=False):
        return torch.mm(first.float(), second.float())


def _halves(wide: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest 16-bit tensor and the 16-bit remainder."""
    high = wide.to(dtype)
    return high, (wide - high.to(wide.dtype)).to(dtype)


def _split(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return high, low and high parts (T, 3 * R) of sums (T, R)."""
    high, low = _halves(sums, dtype)
    return torch.cat([high, low, high], 1)


def _add_halves(sums: torch.Tensor) -> torch.Tensor:
    """Return the sum (T, R) of the left and the right half of (T, 2 * R)."""
    left, right = sums.chunk(2, 1)
    return left + right

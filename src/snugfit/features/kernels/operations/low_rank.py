"""Low-rank updates of linear layers: y = x W^T + s (x A^T) B^T, added to the product with the frozen weight.

A is (r, H) and B is (N, r); Hu et al., arXiv 2106.09685, section 4.1. Layers of one input share one product
with all their A. If each of them has an adapter, the updates are computed first, and the joint product is
added to them. An update of some columns is added afterwards. Either way no tensor of the product's size
exists beside it. The scale s is folded into B before B is rounded.

peft's adapters may have 32 bits where activations have 16. Without autocast peft then computes updates in 32
bits, from a copy of x. Here each 32-bit factor is the sum of two 16-bit numbers, high + low, which hold 16 of
its significant bits. Let S = x A^T = Sh + Sl and B = Bh + Bl. Then the update is the product of
[Sh | Sl | Sh] and [Bh | Bh | Bl]^T. The missing Sl Bl^T is below the rounding of the sum. Sums of all
products have 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch

from snugfit.features.kernels.operations.dropped_rows import add_dropped_product, drop_rows
from snugfit.features.kernels.operations.operators import autocast_device, define, has_kernel
from snugfit.features.kernels.operations.products import NARROW
from snugfit.features.kernels.operations.seeds import MAX_SEED

_SPLIT_HALVES = define(
    "split_halves(Tensor wide, Tensor? added, float scale, *, Tensor(a!) high, Tensor(b!) low, Tensor(c!) "
    "again) -> ()",
    "split_halves",
)


class Adapter(NamedTuple):
    """The factors of a linear layer's low-rank update, whose weight is scale * up @ down."""

    down: torch.Tensor  # (r, H), peft's A
    up: torch.Tensor  # (N, r), peft's B
    scale: float
    drops: int = 0
    """Number of the 65,536 equally likely draws with which dropout drops an element of x. The factor of the
    kept elements is part of `scale`.
    """


class AdapterSpan(NamedTuple):
    """The columns of a joint product to which an adapter adds, and its settings."""

    start: int
    stop: int
    rank: int
    scale: float
    drops: int


class LowRankUpdate(NamedTuple):
    """The updates of a joint product (T, N) by its adapters, whose ranks have the sum R.

    Factors have the dtype of the product, in one part or, for 32-bit factors, in three.
    """

    columns: torch.Tensor  # (T, parts * R): S, parts of each adapter in turn
    down: torch.Tensor  # (parts * R, H): A, each part of all adapters
    ups: Sequence[torch.Tensor]  # (N, parts * r) of each adapter: s B
    spans: Sequence[AdapterSpan]
    parts: int
    seed: torch.Tensor | None  # one int64 if elements of x are dropped

    @classmethod
    def start(
        cls,
        rows: torch.Tensor,
        factors: Sequence[torch.Tensor],
        spans: Sequence[AdapterSpan],
        autocast: bool | None = None,
    ) -> Self:
        """Return the updates of a product of these rows (T, H). `factors` are A and B of each adapter in
        turn, and `spans` are not empty. `autocast` is that of the forward pass; None reads it now.
        """
        downs, ups = (
            [factor.detach() for factor in factors[::2]],
            [factor.detach() for factor in factors[1::2]],
        )
        # Under autocast peft also rounds the factors. Without it, peft casts the rows to a wider dtype.
        if autocast is None:
            autocast = torch.is_autocast_enabled(autocast_device(rows))
        if rows.dtype in NARROW and ups[0].dtype not in NARROW and not autocast:
            return cls._start_in_parts(rows, downs, ups, spans)
        down, seed = _join(downs, 0).to(rows.dtype), _draw(rows, spans)
        scaled = [up * span.scale for up, span in zip(ups, spans, strict=True)]
        columns = _columns(rows, spans, seed, lambda inputs: torch.mm(inputs, down.t()))
        return cls(_join(columns, 1), down, [up.to(rows.dtype) for up in scaled], spans, 1, seed)

    @classmethod
    def _start_in_parts(
        cls,
        rows: torch.Tensor,
        downs: Sequence[torch.Tensor],
        ups: Sequence[torch.Tensor],
        spans: Sequence[AdapterSpan],
    ) -> Self:
        """Return the updates with each 32-bit factor in two parts, of which the first occurs twice."""
        ranks = [span.rank for span in spans]
        rank = sum(ranks)
        down = rows.new_empty((3 * rank, rows.size(1)))
        for wide, *parts in zip(downs, *(part.split(ranks) for part in down.chunk(3)), strict=True):
            high, low_copy, low = parts
            _split(wide, None, (high, low, low_copy))
        parted = [rows.new_empty((len(up), 3 * up.size(1))) for up in ups]
        for up, span, out in zip(ups, spans, parted, strict=True):
            high, low_copy, low = out.chunk(3, 1)
            _split(up, None, (high, low, low_copy), span.scale)
        columns, seed = rows.new_empty((len(rows), 3 * rank)), _draw(rows, spans)
        outs = columns.split([3 * width for width in ranks], 1)
        # The last two of the three parts sum to A.
        sums = _columns(rows, spans, seed, lambda inputs: _wide_product(inputs, down[rank:].t()), halves=2)
        for half, other, out in zip(sums[::2], sums[1::2], outs, strict=True):
            _split(half, other, out.chunk(3, 1))
        return cls(columns, down, parted, spans, 3, seed)

    @classmethod
    def restore(cls, tensors: Sequence[torch.Tensor], spans: Sequence[AdapterSpan], parts: int) -> Self:
        """Return the updates with these `tensors`, in the order of the property `tensors`."""
        columns, down, *rest = tensors
        count = len(spans)
        seed = rest[count] if len(rest) > count else None
        return cls(columns, down, rest[:count], spans, parts, seed)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that a backward pass needs."""
        return [self.columns, self.down, *self.ups, *(() if self.seed is None else [self.seed])]

    @property
    def rank(self) -> int:
        """Return the sum of the adapters' ranks."""
        return sum(span.rank for span in self.spans)

    def covers(self, columns: int) -> bool:
        """Return True if each of the product's columns is in one adapter's span."""
        return sum(span.stop - span.start for span in self.spans) == columns

    def product(self, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the updates as rows (T, N), plus a bias (N,), for adapters that cover all N columns."""
        if len(self.spans) == 1:
            return _product(self.columns, self.ups[0], bias)
        out = self.columns.new_empty((len(self.columns), self.spans[-1].stop))
        for span, up, part in self._by_adapter():
            chosen = slice(span.start, span.stop)
            _product(part, up, None if bias is None else bias[chosen], out=out[:, chosen])
        return out

    def add_to(self, product: torch.Tensor) -> None:
        """Add the updates to the product (T, N) in place."""
        for span, up, part in self._by_adapter():
            product[:, span.start : span.stop].addmm_(part, up.t())

    def slopes(self, of_product: torch.Tensor) -> torch.Tensor:
        """Return the gradient (T, parts * R) of S, dy s B: each part of all adapters in turn."""
        parts = [of_product[:, span.start : span.stop] for span in self.spans]
        if self.parts == 1:
            return _join([torch.mm(part, up) for part, up in zip(parts, self.ups, strict=True)], 1)
        ranks = [span.rank for span in self.spans]
        slopes = of_product.new_empty((len(of_product), 3 * sum(ranks)))
        outs = zip(*(part.split(ranks, 1) for part in slopes.chunk(3, 1)), strict=True)
        for part, up, rank, out in zip(parts, self.ups, ranks, outs, strict=True):
            # The last two of the three parts sum to B.
            left, right = _wide_product(part, up[:, rank:]).chunk(2, 1)
            _split(left, right, out)
        return slopes

    def add_input_gradient(self, of_rows: torch.Tensor, slopes: torch.Tensor, seed: torch.Tensor) -> None:
        """Add the adapters' share to the gradient (T, H) of the rows in place, but for elements that were
        dropped with this seed.
        """
        ranks = [span.rank for span in self.spans]
        parted = slopes.unflatten(1, (self.parts, self.rank)).split(ranks, 2)
        downs = self.down.unflatten(0, (self.parts, self.rank)).split(ranks, 1)
        for site, (span, slope, down) in enumerate(zip(self.spans, parted, downs, strict=True)):
            left, right = slope.flatten(1), down.flatten(0, 1).t()
            add_dropped_product(of_rows, left, right, seed, site, span.drops)

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
        gradients: list[torch.Tensor | None] = [None] * len(needed)
        if any(needed[::2]):
            # The first two of the three parts sum to the gradients.
            used = slopes[:, : min(self.parts, 2) * self.rank].t()
            turned = _columns(
                rows(),
                self.spans,
                self.seed,
                lambda inputs: _wide_product(used, inputs).t(),
                halves=min(self.parts, 2),
            )
            of_downs = turned if self.parts == 1 else map(torch.add, turned[::2], turned[1::2])
            gradients[::2] = [gradient.t().to(dtypes[0]) for gradient in of_downs]
        for index, (span, _, part) in enumerate(self._by_adapter()):
            if needed[2 * index + 1]:
                slope = of_product[:, span.start : span.stop].t()
                of_up = _wide_product(slope, part[:, : min(self.parts, 2) * span.rank])
                of_up = of_up if self.parts == 1 else _add_halves(of_up)
                gradients[2 * index + 1] = of_up.mul_(span.scale).to(dtypes[2 * index + 1])
        return [
            gradient if is_needed else None for gradient, is_needed in zip(gradients, needed, strict=True)
        ]

    def _by_adapter(self) -> list[tuple[AdapterSpan, torch.Tensor, torch.Tensor]]:
        """Return for each adapter its span of columns, its B and its columns of S."""
        columns = self.columns.split([self.parts * span.rank for span in self.spans], 1)
        return list(zip(self.spans, self.ups, columns, strict=True))


def _product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return left @ right.T plus a bias, written to `out` if it is given."""
    if bias is None:
        return torch.mm(left, right.t(), out=out)
    return torch.addmm(bias, left, right.t(), out=out)


def _join(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(tuple(parts), dim) if len(parts) > 1 else parts[0]


def _draw(rows: torch.Tensor, spans: Sequence[AdapterSpan]) -> torch.Tensor | None:
    """Return a seed, drawn by torch's generator, if adapters drop elements of their input; otherwise None."""
    if not any(span.drops for span in spans):
        return None
    return torch.randint(MAX_SEED, (1,), dtype=torch.int64, device=rows.device)


def _columns(
    rows: torch.Tensor,
    spans: Sequence[AdapterSpan],
    seed: torch.Tensor | None,
    multiply: Callable[[torch.Tensor], torch.Tensor],
    *,
    halves: int = 1,
) -> list[torch.Tensor]:
    """Return the columns of each adapter in a product of the rows that `multiply` computes, in turn.

    The product has all ranks, `halves` times. With a seed each adapter has another product, of its own mask.
    """
    ranks = [span.rank for span in spans] * halves
    if seed is None:
        every = [multiply(rows).split(ranks, 1)] * len(spans)
    else:
        every = [
            multiply(drop_rows(rows, seed, site, span.drops)).split(ranks, 1)
            for site, span in enumerate(spans)
        ]
    return [
        parts[index] for target, parts in enumerate(every) for index in range(target, len(ranks), len(spans))
    ]


def _wide_product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a matrix product of 16-bit factors whose sums have 32 bits."""
    if first.dtype not in NARROW:
        return torch.mm(first, second)
    if has_kernel(first):
        return torch.mm(first, second, out_dtype=torch.float32)
    # The CPU has no such product, and autocast would round the factors.
    with torch.autocast("cpu", enabled=False):
        return torch.mm(first.float(), second.float())


def _split(
    wide: torch.Tensor, added: torch.Tensor | None, out: Sequence[torch.Tensor], scale: float = 1.0
) -> None:
    """Split scale * (wide + added), all (rows, columns), into 16-bit parts.

    `out` has tensors for the nearest numbers, for the remainders, and for the nearest numbers again.
    """
    high, low, low_copy = out
    if has_kernel(wide):
        _SPLIT_HALVES(wide, added, scale, high=high, low=low, again=low_copy)
    else:
        reference(wide, added, scale, high, low, low_copy)


def reference(
    wide: torch.Tensor,
    added: torch.Tensor | None,
    scale: float,
    high: torch.Tensor,
    low: torch.Tensor,
    low_copy: torch.Tensor,
) -> None:
    """Write the parts of scale * (wide + added), in plain torch."""
    value = (wide if added is None else wide + added) * scale
    high.copy_(value)
    low.copy_(value - high.to(value.dtype))
    low_copy.copy_(high)


def _add_halves(sums: torch.Tensor) -> torch.Tensor:
    """Return the sum (T, R) of the left and the right half of (T, 2 * R)."""
    left, right = sums.chunk(2, 1)
    return left + right

"""Seconds of one kernel on the device: the larger of its arithmetic and its traffic, at achieved rates.

**Products of matrices** are cut into tiles that the multiprocessors work off in waves. A wave that is not
full takes as long as one that is, which is why a product a little larger can take a third longer, and why
small ones reach a tenth of the peak. cuBLAS chooses tile and split of the inner dimension for the shape; what
is taken here is the fastest of a handful of tiles and splits, as a good choice would be. (The model is the
usual one of tile and wave quantisation: NVIDIA, "Matrix Multiplication Background User's Guide".)

**Attention** by its FLOPs; when there are fewer blocks of 64 queries than multiprocessors, the rest idle.

**Everything else** is bound by the bytes it moves, and a small one by the time that any kernel takes. Strided
copies, reductions and norms reach less than the bandwidth (`Rates.patterns`).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from snugfit.prediction.rates import PRECISIONS, ProductRate, Rates
from snugfit.rehearsal.tape import COPY_IN, PREPARED

if TYPE_CHECKING:
    from snugfit.rehearsal.tape import Kernel

TILES = (
    (256, 128, -1),
    (128, 256, -1),
    (128, 128, 0),
    (128, 64, 1),
    (64, 128, 1),
    (64, 64, 2),
    (64, 32, 3),
    (32, 64, 3),
)
"""Rows and columns of a tile, and the place of its efficiency in `ProductRate.efficiency` (-1: 1)."""

SPLITS = (1, 2, 4, 8, 16)
"""In how many parts the inner dimension may be cut, each with tiles of its own."""

SHORTEST_SPLIT = 256
"""Least length of such a part."""

ADDING_UP = 1e-6
"""Seconds of the kernel that adds the parts, beside its traffic."""

QUERIES = 64
"""Of one block of an attention kernel."""

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"})
_WITH_BIAS = frozenset({"aten::addmm", "aten::baddbmm"})
_CONVOLUTION_SHARE = 0.35
"""Of the product rate, for convolutions with channels first: assumed, not fitted."""


class KernelClock:
    """Tells the seconds of kernels on one GPU."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._remembered: dict[tuple[object, ...], float] = {}

    def seconds(self, kernel: Kernel) -> float:
        """Of this kernel alone, when nothing else runs."""
        key = (kernel.operator, kernel.shapes, kernel.dtype, kernel.nbytes, kernel.flops)
        found = self._remembered.get(key)
        if found is None:
            found = self._remembered[key] = self._seconds(kernel)
        return found

    def _seconds(self, kernel: Kernel) -> float:
        if kernel.operator in PRODUCTS and len(kernel.shapes) > 1:
            return self._product(kernel)
        if kernel.operator in (COPY_IN, PREPARED):
            return self.rates.start + kernel.nbytes / 2 / self.rates.link
        if "convolution" in kernel.operator:
            rate = self._rate(kernel.dtype)
            return self.rates.start + max(
                kernel.flops / (rate.flops * _CONVOLUTION_SHARE), kernel.nbytes / self.rates.bandwidth
            )
        if "attention" in kernel.operator and kernel.shapes:
            return self._attention(kernel)
        moved, start = self.rates.patterns.get(kernel.operator, (self.rates.bandwidth, self.rates.start))
        return start + kernel.nbytes / moved

    def _rate(self, dtype: str) -> ProductRate:
        precision = PRECISIONS.get(dtype, "fp32")
        return self.rates.products.get(precision) or self.rates.products["fp32"]

    def _product(self, kernel: Kernel) -> float:
        rate = self._rate(kernel.dtype)
        first, second = kernel.shapes[1:3] if kernel.operator in _WITH_BIAS else kernel.shapes[:2]
        batch = math.prod(first[:-2])
        rows, inner, columns = first[-2], first[-1], second[-1]
        if min(batch, rows, inner, columns) == 0:
            return self.rates.start
        item = 2 if "16" in kernel.dtype else 4
        aligned = (
            all(length * item % 16 == 0 for length in (inner, columns)) or kernel.dtype == "torch.float32"
        )
        share = 1.0 if aligned else rate.unaligned
        tiles = tile_seconds(
            rate, self.rates.multiprocessors, self.rates.bandwidth, (batch, rows, columns, inner), share
        )
        return rate.start + max(tiles, kernel.nbytes / self.rates.bandwidth)

    def _attention(self, kernel: Kernel) -> float:
        backward = "backward" in kernel.operator
        family = next((name for name in ("cudnn", "flash", "efficient") if name in kernel.operator), "flash")
        if family == "efficient" and "16" in kernel.dtype:
            family = "efficient half"
        flops, start = self.rates.attention[f"{family} backward" if backward else family]
        query = kernel.shapes[1] if backward else kernel.shapes[0]
        blocks = math.prod(query[:-2]) * -(-query[-2] // QUERIES)
        busy = min(1.0, blocks / self.rates.multiprocessors)
        return start + max(kernel.flops / (flops * busy), kernel.nbytes / self.rates.bandwidth)


@lru_cache(maxsize=100_000)
def tile_seconds(
    rate: ProductRate,
    multiprocessors: int,
    bandwidth: float,
    sizes: tuple[int, int, int, int],
    share: float = 1.0,
) -> float:
    """The shortest time over tiles and splits of a batch of products; `sizes` are batch, rows, columns and
    the inner length, `share` what is left of the rate."""
    batch, rows, columns, inner = sizes
    best = math.inf
    for height, width, place in TILES:
        efficiency = share * (rate.efficiency[place] if place >= 0 else 1.0)
        each = rate.flops / multiprocessors * efficiency
        tiles = batch * -(-rows // height) * -(-columns // width)
        for split in SPLITS:
            if split > 1 and (inner < SHORTEST_SPLIT * split or tiles * split > multiprocessors):
                break
            waves = -(-tiles * split // multiprocessors)
            seconds = waves * (2 * height * width * inner / split / each + rate.wave)
            if split > 1:
                seconds += ADDING_UP + (split + 1) * 4 * batch * rows * columns / bandwidth
            best = min(best, seconds)
    return best

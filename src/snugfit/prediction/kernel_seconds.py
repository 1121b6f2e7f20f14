"""Seconds of one kernel on the device: the larger of its arithmetic and its memory traffic, at achieved
rates.

**Matrix products** are cut into tiles that the multiprocessors compute in waves (`tile_seconds`).

**Attention** takes the time of its FLOPs, in waves of blocks of 64 queries.

**All other kernels** are limited by the bytes that they move, and small ones by the seconds of the smallest
kernel. Pointwise operators reach the full bandwidth if their operands have the same layout. Operators that
compute each element's address or cast on the way reach less, as do reductions and norms. `Rates.patterns` has
their rates by layout and by operator.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING

from snugfit.prediction.rates import ALIGNMENT, FP8, PRECISIONS, MatmulRate, Rates
from snugfit.rehearsal.trace.trace import (
    AWAIT_COPY,
    BY_HOST,
    COLLECTIVES,
    COPIES,
    COPY_IN,
    GENERATED,
    MATRIX_PRODUCTS,
    PREFETCH,
    PREPARED,
    STAGED,
    WITH_BIAS,
    WITH_DROPOUT,
)
from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    from snugfit.prediction.exchanges import GpuLink
    from snugfit.rehearsal.trace.trace import Kernel

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
"""Tile sizes of a matrix product, as (rows, columns, index). The index is that of the tile's efficiency in
`MatmulRate.efficiency`; -1 is an efficiency of 1.
"""

SPLITS = (1, 2, 4, 8, 16)
"""Numbers of parts into which a matrix product's inner dimension may be split (split-K), each computed in
separate tiles.
"""

SHORTEST_SPLIT = 256
"""Smallest length of a part of a matrix product's split inner dimension."""

PLAYED = 0.38
"""Share of a matrix product's start time (`MatmulRate.start`) that remains in a replayed CUDA graph.

Start times were fitted to kernels that are launched one by one, and a graph leaves no time between them.
Recorded steps of BERT-large, RoBERTa-large and Qwen2.5-0.5B took 2.9 to 3.2 us less for each product. The
sources are `profile-bert.json` and `profile-roberta.json` of `results/h200-2026-11-27`, and
`results/h100-2026-11-27/clocks.json`.
"""

SPLIT_SUM_SECONDS = 1e-6
"""Seconds of the kernel that sums the parts of a split product, in addition to its memory traffic."""

QUERIES = 64
"""Number of queries in one thread block of an attention kernel."""

SHORT_QUERIES, LONG = 2048, "long"
"""Queries of a sequence up to which attention has its plain rate, and the end of the names of other rates.

A longer sequence has longer loops in each thread block. Its rate approaches that of its kernel's name with
`long`, in proportion to the tokens beyond `SHORT_QUERIES`. An H200 ran 2,048 to 131,072 tokens
(`results/h200-2026-11-30/long-context.json`).
"""

PAGEABLE = 11e9
"""Bandwidth in bytes per second of copies to the GPU from host memory that is not page-locked.

On the host of one H200, 8 to 13e9 were measured (2026-11-21), and 52e9 to 55e9 from page-locked memory.
"""

CONVOLUTION = {"torch.float32": 0.5}
LOW_CONVOLUTION = 0.22
"""Share of a dtype's matrix-product FLOP/s that cuDNN's convolutions (channels first) reach on one H200. In
low precisions, 0.1 to 0.5 were measured, more for larger convolutions.
"""

FEW_CHANNELS = 8
FEW_CHANNELS_FLOPS = 0.4
"""Share of the fp32 matrix-product FLOP/s that convolutions of an image's three channels reach, in any
precision.

On one H200, 15 to 29e12 FLOPs per second were measured.
"""


GROUPED = {("aten::_grouped_mm", 3): 1.25, ("aten::_grouped_mm", 2): 1.8}
"""Seconds of the tiles of a grouped product as multiples of those of one product of the same rows.

The number is that of the second operand's dimensions, 2 for the gradients of matrices. The values are the
geometric means of three sizes in bf16 on an H200: 1.12 to 1.44, and 1.42 to 2.24
(results/h200-2026-11-30/seconds.json).
"""

WITHOUT_POWER = BY_HOST | COLLECTIVES | COPIES | STAGED | {COPY_IN, PREPARED, AWAIT_COPY, PREFETCH}
"""Operators whose energy on this device is left out."""

ROUGH_OPERATORS = frozenset({"aten::_scaled_mm", "aten::convolution", "aten::convolution_backward"})
"""Operators of torch whose rates are a share of another operator's."""

RATED_PREFIXES = ("aten::", GENERATED)
"""Beginnings of the names of operators with general rates that were measured: those of torch, and generated
kernels. Libraries' kernels need a rate of their own."""

WITHOUT_WORK = BY_HOST | COLLECTIVES | {AWAIT_COPY, PREFETCH}
"""Operators that take no kernel time on this device. Collectives are among them, since they occupy the link
instead.
"""


class KernelClock:
    """Predict the seconds of kernels on one GPU, and of collectives over the link `connected` between GPUs.

    Kernels of the same shapes are computed once.
    """

    def __init__(self, rates: Rates, connected: GpuLink | None = None) -> None:
        self.rates, self._connected = rates, connected
        self._cache: dict[tuple[object, ...], float] = {}

    def seconds(self, kernel: Kernel) -> float:
        """Return the seconds of this kernel while no other kernel runs."""
        key = (
            kernel.operator, kernel.shapes, kernel.dtype, kernel.nbytes, kernel.flops, kernel.layout,
            kernel.leading, kernel.tensors, kernel.peers, kernel.played,
        )  # fmt: skip
        seconds = self._cache.get(key)
        if seconds is None:
            seconds = self._cache[key] = self._seconds(kernel)
        return seconds

    def work(self, kernel: Kernel) -> tuple[float, float, float]:
        """Return the kernel's clocked seconds and joules, whose sums are the `work` of `PowerRates.clock`."""
        power = self.rates.power
        if power is None or kernel.operator in WITHOUT_POWER:
            return 0.0, 0.0, 0.0
        arithmetic, traffic = power.energy(kernel, PRECISIONS.get(kernel.dtype, "fp32"))
        return self.seconds(kernel) if kernel.flops else 0.0, arithmetic, traffic

    def _seconds(self, kernel: Kernel) -> float:
        if kernel.operator in MATRIX_PRODUCTS and len(kernel.shapes) > 1:
            return self._matmul(kernel)
        if kernel.operator in WITHOUT_WORK:
            return 0.0 if self._connected is None else self._connected.seconds(kernel)
        if kernel.operator in COPIES | STAGED or kernel.operator in (COPY_IN, PREPARED):
            # An unprepared batch is in pageable memory.
            link = self.rates.link if kernel.operator != COPY_IN else min(PAGEABLE, self.rates.link)
            # The bytes of a copy are counted as read and written, but cross the link once.
            return self.rates.start + kernel.nbytes / 2 / link
        if not kernel.operator.startswith(GENERATED):  # generated names list the fused operators
            if "convolution" in kernel.operator:
                return self._convolution(kernel)
            if "attention" in kernel.operator and kernel.shapes:
                return self._attention(kernel)
        moved, start = self._pattern(kernel)
        return start + kernel.nbytes / moved

    def is_rough(self, kernel: Kernel) -> bool:
        """Return True if a general rate replaces the missing measured rate of this kernel.

        Such kernels are convolutions, 8-bit products, and libraries' kernels without a pattern.
        """
        name = kernel.operator
        has_rate = name.startswith(RATED_PREFIXES) or name in WITHOUT_POWER or self._patterns(kernel)
        return not has_rate or name in ROUGH_OPERATORS

    def _patterns(self, kernel: Kernel) -> list[tuple[float, float]]:
        """Return the measured rates of this memory-bound kernel, the most specific first."""
        # If attention was measured with 16-bit operands, these have separate rates.
        endings = (" in 16 bits", "") if "16" in kernel.dtype else ("",)
        names = (f"{kernel.operator} {kernel.layout}", kernel.layout) if kernel.layout else (kernel.operator,)
        further = chain.from_iterable(of(kernel) for of in hooks("rate_names"))
        full = (name + ending for name, ending in product((*further, *names), endings))
        return list(filter(None, map(self.rates.patterns.get, full)))

    def _pattern(self, kernel: Kernel) -> tuple[float, float]:
        """Return the bytes per second that this memory-bound kernel reaches, and its seconds of overhead."""
        return (self._patterns(kernel) or [(self.rates.bandwidth, self.rates.start)])[0]

    def _rate(self, dtype: str) -> MatmulRate:
        products, precision = self.rates.products, PRECISIONS.get(dtype, "fp32")
        if precision == FP8 and FP8 not in products and "bf16" in products:
            # Earlier calibrations lack 8-bit products; data sheets have twice the rate of bfloat16.
            return replace(products["bf16"], flops=2 * products["bf16"].flops)
        return products.get(precision) or products["fp32"]

    def _matmul(self, kernel: Kernel) -> float:
        rate = self._rate(kernel.dtype)
        first, second = kernel.shapes[1:3] if kernel.operator in WITH_BIAS else kernel.shapes[:2]
        batch = math.prod(first[:-2])
        rows, inner, columns = first[-2], first[-1], second[-1]
        # A matrix product with an empty dimension is launched, but computes nothing.
        if min(batch, rows, inner, columns) == 0:
            return self.rates.start
        # The least aligned operand determines the speed. Its alignment is the greatest common divisor.
        share = rate.share(math.gcd(ALIGNMENT, *(length * kernel.itemsize for length in kernel.leading)))
        tiles = tile_seconds(
            rate, self.rates.multiprocessors, self.rates.bandwidth, (batch, rows, columns, inner), share
        )
        tiles *= GROUPED.get((kernel.operator, len(second)), 1.0)
        # A product that adds to its result has a separately measured rate, since it reads the result too. A
        # large one took as much longer: 0.37, 0.58 and 2.88 ms for 0.36, 0.54 and 2.74 without reading
        # (`results/h200-2026-11-30/adapter-products.json`, less the seconds of the update).
        adds = kernel.operator.endswith("_")
        moved, _ = self._pattern(kernel) if adds else (self.rates.bandwidth, 0.0)
        tiles += adds * batch * rows * columns * kernel.itemsize / self.rates.bandwidth
        start = rate.start * (PLAYED if kernel.played else 1)
        return start + max(tiles, kernel.nbytes / moved) + self._copy_first(kernel)

    def _copy_first(self, kernel: Kernel) -> float:
        """Return the seconds in which torch copies the matrix to which `addmm` adds a product.

        A bias is not copied, nor is a matrix that is added to in place.
        """
        if kernel.operator not in WITH_BIAS or kernel.operator.endswith("_") or len(kernel.shapes[0]) < 2:
            return 0.0
        return self.rates.start + 2 * math.prod(kernel.shapes[0]) * kernel.itemsize / self.rates.bandwidth

    def _convolution(self, kernel: Kernel) -> float:
        rate = self._rate(kernel.dtype).flops * CONVOLUTION.get(kernel.dtype, LOW_CONVOLUTION)
        weights = kernel.shapes[2 if "backward" in kernel.operator else 1]
        # For three colour channels, no precision was faster than this share of fp32's rate.
        if weights[1] < FEW_CHANNELS:
            rate = min(rate, self.rates.products["fp32"].flops * FEW_CHANNELS_FLOPS)
        return self.rates.start + max(kernel.flops / rate, kernel.nbytes / self.rates.bandwidth)

    def _attention(self, kernel: Kernel) -> float:
        backward = "backward" in kernel.operator
        # A kernel without one of these names (flex) counts as flash attention.
        family = next((name for name in ("cudnn", "flash", "efficient") if name in kernel.operator), "flash")
        if family == "efficient" and "16" in kernel.dtype:
            family = "efficient half"
        if backward:
            family += " backward"
        known = self.rates.attention
        with_dropout = f"{family} {WITH_DROPOUT}"
        if kernel.layout == WITH_DROPOUT and with_dropout in known:
            family = with_dropout
        flops, start = known[family]
        # Backward has the output's gradient in front of the query.
        query = kernel.shapes[1] if backward else kernel.shapes[0]
        longest, _ = known.get(f"{family} {LONG}", known[family])
        flops += (longest - flops) * (1 - min(1.0, SHORT_QUERIES / query[-2]))
        # Three dimensions contain the sequences in one row, without a batch dimension.
        if len(query) == 3:
            busy = self._busy_with_several(math.prod(query[:-1]))
        else:
            blocks = math.prod(query[:-2]) * -(-query[-2] // QUERIES)
            waves = -(-blocks // self.rates.multiprocessors)
            # The last wave of blocks leaves multiprocessors idle.
            busy = math.prod(query[:-1]) / QUERIES / (waves * self.rates.multiprocessors) if blocks else 1.0
        return start + max(kernel.flops / (flops * busy), kernel.nbytes / self.rates.bandwidth)

    def _busy_with_several(self, queries: int) -> float:
        """Return the fraction of multiprocessors that are busy during attention over several sequences of
        different lengths in one row (N, H, D). `queries` is the number of queries in all heads. Their thread
        blocks do not end together, so no last wave leaves some multiprocessors idle. With a last wave,
        RoBERTa-large's attention over 8 x 288 tokens was predicted at 3.3 ms and took 2.6
        (`results/h200-2026-11-28/profile-roberta-padding.json`).
        """
        return min(1.0, queries / QUERIES / self.rates.multiprocessors) or 1.0


@lru_cache(maxsize=100_000)
def tile_seconds(
    rate: MatmulRate,
    multiprocessors: int,
    bandwidth: float,
    sizes: tuple[int, int, int, int],
    share: float = 1.0,
) -> float:
    """Return the seconds of a batch of matrix products, with the fastest tile size and split.

    `sizes` are (batch, rows, columns, inner length). `share` is the fraction of the full rate that the
    operands' alignment allows.
    """
    batch, rows, columns, inner = sizes
    # cuBLAS chooses tile and split by the shape. The fastest of a few candidates approximates its choice.
    best = math.inf
    for height, width, index in TILES:
        efficiency = share * (rate.efficiency[index] if index >= 0 else 1.0)
        flops = rate.flops / multiprocessors * efficiency
        tiles = batch * -(-rows // height) * -(-columns // width)
        for split in SPLITS:
            # Numbers of parts ascend, so the first with too short parts ends the search.
            if split > 1 and (inner < SHORTEST_SPLIT * split or tiles * split > multiprocessors):
                break
            # A partly filled wave takes as long as a full one, so a slightly larger product may take a third
            # longer.
            waves = -(-tiles * split // multiprocessors)
            seconds = waves * (2 * height * width * inner / split / flops + rate.wave)
            if split > 1:
                # Further memory traffic: the parts in fp32, and their sum.
                seconds += SPLIT_SUM_SECONDS + (split + 1) * 4 * batch * rows * columns / bandwidth
            best = min(best, seconds)
    return best

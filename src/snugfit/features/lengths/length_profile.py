"""Memory and step time of one job under one recipe at many sequence lengths.

The step time at each length follows from its simulated trace (`prediction/seconds.py`). A few lengths are
simulated, and the kernels of all others are interpolated (`kernel_interpolation.py`). One more simulated
length measures the error. Attention masks are stored in rows of eight, and some kernels copy masks of other
lengths. If that splits the lengths into two lists of kernels, each part is interpolated separately. If that
fails too, the time is interpolated linearly between more simulated lengths, with a warning.

All sequences of a step are assumed to have one length. A batch without padding has no attention mask, so it
runs other kernels. Each length can therefore be simulated with padding and without.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from snugfit.features.lengths.kernel_interpolation import KernelInterpolator, LengthSample, NotInterpolable
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import context_of, policy_for
from snugfit.prediction.exchanges import exchanges
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.profile import Software
from snugfit.prediction.rates import Rates, rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS, Trace
from snugfit.results.step_seconds import StepSeconds

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe

SIMULATED_PADDING = 0.5
"""Share of padding in the simulated batch. Only the presence of padding changes shapes, not its share."""

MAX_SIMULATED = 4
"""Up to this number of lengths, all are simulated. Interpolation needs three lengths and a test."""

TOLERANCE = 1e-3
"""Greatest relative error of interpolated seconds at the test length. Above it, kernels are not interpolated.
"""

ROW = 8
"""Rows of a stored attention mask are padded to a multiple of this number of elements (`pad_bias`,
`native/transformers/attention.cpp`).
"""

MOST_KNOTS = 9
"""Number of simulated lengths if kernels cannot be interpolated. Seconds between them are interpolated
linearly.
"""

TIMED_PER_CLASS = 32
"""Number of lengths with one alignment whose seconds are computed. Seconds between them are interpolated
linearly.
"""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Peak memory in bytes of a step whose sequences all have one length."""

    requested_bytes: int
    """Peak of the bytes that tensors and kernels request from the allocator."""

    allocated_bytes: int
    """Peak of the allocated bytes: requested bytes after the allocator's rounding."""

    reserved_bytes: int
    """Peak of the bytes that the allocator reserves on the device."""

    context_bytes: int
    """Bytes of CUDA's context and libraries, outside of the allocator."""

    doubts: tuple[str, ...] = ()
    """Warnings about uncertain parts of these figures."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the device."""
        return self.reserved_bytes + self.context_bytes


class BatchShape(NamedTuple):
    """Properties of a batch that determine its kernels and their sizes."""

    length: int
    """Number of tokens in each sequence."""

    padded: bool
    """True if the batch contains padding."""


class LengthSeconds(NamedTuple):
    """Predicted seconds of a step for one sequence length."""

    step: float
    """Seconds of the step at the GPU's rates."""

    aligned: float
    """Seconds of the step at rates without the extra cost of unaligned rows (no multiple of 16 bytes)."""


@dataclass
class LengthProfiler:
    """Simulates one job under one recipe at the requested sequence lengths, each once."""

    job: Job
    """The training job. Its own sequence length is ignored."""

    recipe: Recipe
    """Recipe of the simulated steps."""

    gpu: Gpu
    """GPU that the predictions are for."""

    loop: str = "plain"
    """Name of the training loop."""

    tell: Callable[[str], None] = lambda message: None
    """Function that receives progress messages."""

    rates: Rates = field(init=False)
    """Kernel rates of the GPU. The constructor raises `GpuError` if they are unknown."""

    off: float = 0.0
    """Greatest relative error of interpolated seconds so far."""

    lines: bool = False
    """True if some seconds are interpolated linearly between simulated lengths, because the lengths' kernels
    differ too much.
    """

    _samples: dict[BatchShape, LengthSample] = field(default_factory=dict)
    _bytes: dict[BatchShape, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rates = rates_for(self.gpu)

    @property
    def rehearsal_count(self) -> int:
        """Number of lengths that were simulated."""
        return len(self._samples)

    @property
    def doubts(self) -> dict[str, None]:
        """Warnings about uncertain predictions at the simulated lengths, each once."""
        return dict.fromkeys(doubt for size in self._bytes.values() for doubt in size.doubts)

    def at(self, length: int, padded: bool) -> Job:
        """Return the job with this sequence length, with or without padding. Raises `JobError` if the model's
        position embeddings are too short.
        """
        return replace(self.job, sequence_length=length, padding=SIMULATED_PADDING if padded else 0.0)

    def bytes(self, length: int, padded: bool) -> Bytes:
        """Return the peak memory of a step in which every sequence has this length."""
        self.sample(length, padded)
        return self._bytes[BatchShape(length, padded)]

    def sample(self, length: int, padded: bool) -> LengthSample:
        """Return the simulated kernels of a later step (without first-step work) at this sequence length."""
        key = BatchShape(length, padded)
        if key not in self._samples:
            self.tell(f"simulating {length} tokens{'' if padded else ', unpadded'}")
            software, setup = Software(), self.recipe.setup()
            trace = rehearse(self.at(*key), setup, policy_for(self.gpu, software), loop=self.loop)
            after = replay(trace, expandable=setup.expandable_segments)
            context, about_context = context_of(
                self.gpu, software, trace, group=exchanges().group_bytes(setup, self.loop)
            )
            self._samples[key] = LengthSample(length, trace.kernels, trace.waits)
            self._bytes[key] = Bytes(
                requested_bytes=after.requested_peak,
                allocated_bytes=after.allocated_peak,
                reserved_bytes=after.reserved_peak,
                context_bytes=context,
                doubts=(*trace.doubts, *about_context),
            )
        return self._samples[key]

    def timing(self, length: int, padded: bool, *, rates: Rates | None = None) -> StepSeconds:
        """Return the predicted time of a step at this sequence length, which is simulated."""
        return self._timing(_trace(self.sample(length, padded)), rates)

    def seconds_of(self, trace: Trace) -> LengthSeconds:
        """Return the predicted seconds of a step from its simulated trace."""
        priced = self._timing(trace).step_seconds
        clocks = KernelClock(self.rates), KernelClock(without_alignment_cost(self.rates))
        products = {kernel for kernel in trace.kernels if kernel.operator in MATRIX_PRODUCTS}
        # If all matrix products are aligned, both sets of rates give the same seconds.
        if all(clocks[0].seconds(kernel) == clocks[1].seconds(kernel) for kernel in products):
            return LengthSeconds(priced, priced)
        return LengthSeconds(priced, self._timing(trace, without_alignment_cost(self.rates)).step_seconds)

    def seconds(self, lengths: Collection[int], padded: bool) -> dict[int, LengthSeconds]:
        """Return the predicted seconds of a step at each of these lengths, simulated or interpolated."""
        alone = {1} & set(lengths)  # one token attends to no others, so its kernels differ
        return self._family(sorted(set(lengths) - alone), padded) | self._family(sorted(alone), padded)

    def _timing(self, trace: Trace, rates: Rates | None = None) -> StepSeconds:
        return step_seconds(
            trace,
            self.gpu,
            batch_size=self.job.batch_size,
            rates=rates or self.rates,
            workers=self.recipe.setup().loader.workers,
        )

    def _family(self, lengths: Sequence[int], padded: bool) -> dict[int, LengthSeconds]:
        if len(lengths) <= MAX_SIMULATED:
            return {length: self._exact(length, padded) for length in lengths}
        rows = [length for length in lengths if length % ROW == 0]
        odd = [length for length in lengths if length % ROW]
        most, least = (rows, odd) if len(rows) > len(odd) else (odd, rows)
        knots = _spread(most if len(most) > MAX_SIMULATED else lengths, 3)
        left = [length for length in (*least, *most) if length not in knots]
        # If possible, the test length has the other alignment, at which an error would show.
        proof = _spread([length for length in left if length in least] or left, 1)[0]
        try:
            interpolator = KernelInterpolator([self.sample(length, padded) for length in knots])
            off = self._off(interpolator, proof, padded)
        except NotInterpolable:
            off = math.inf
        if off <= TOLERANCE:
            self.off = max(self.off, off)
            known = {length: self._exact(length, padded) for length in (*knots, proof)}
            return self._by_alignment_class(lengths, interpolator) | known
        # Kernels may depend on the alignment of the attention mask's rows (`ROW`).
        if rows and odd:
            return self._family(rows, padded) | self._family(odd, padded)
        return self._line(lengths, padded)

    def _off(self, interpolator: KernelInterpolator, proof: int, padded: bool) -> float:
        """Return the relative error of the interpolated seconds at the length `proof`, which is also
        simulated.
        """
        real = self.timing(proof, padded)
        if len(interpolator.at(proof).kernels) != len(self.sample(proof, padded).kernels):
            raise NotInterpolable
        guess = self._timing(interpolator.at(proof))
        return max(
            abs(guess.step_seconds / real.step_seconds - 1),
            abs(guess.device_seconds / real.device_seconds - 1),
        )

    def _exact(self, length: int, padded: bool) -> LengthSeconds:
        return self.seconds_of(_trace(self.sample(length, padded)))

    def _by_alignment_class(
        self, lengths: Sequence[int], interpolator: KernelInterpolator
    ) -> dict[int, LengthSeconds]:
        """Return the seconds of a step at these lengths. Lengths are grouped by alignment (multiples of 8,
        ...); in a large group, some are predicted from kernels and the rest are interpolated linearly.
        """
        by_class: dict[int, list[int]] = defaultdict(list)
        for length in lengths:
            by_class[math.gcd(length, ROW)].append(length)
        seconds: dict[int, LengthSeconds] = {}
        for group in by_class.values():
            timed = _spread(group, TIMED_PER_CLASS)
            seconds |= _between(group, {length: self.seconds_of(interpolator.at(length)) for length in timed})
        return seconds

    def _line(self, lengths: Sequence[int], padded: bool) -> dict[int, LengthSeconds]:
        self.lines = True
        return _between(
            lengths, {length: self._exact(length, padded) for length in _spread(lengths, MOST_KNOTS)}
        )


def without_alignment_cost(rates: Rates) -> Rates:
    """Return hardware rates without the extra time of matrix rows that are not a multiple of 16 bytes."""
    return replace(
        rates,
        products={name: replace(rate, unaligned=(1.0, 1.0, 1.0)) for name, rate in rates.products.items()},
    )


def _between(lengths: Sequence[int], known: dict[int, LengthSeconds]) -> dict[int, LengthSeconds]:
    """Return the seconds of a step at these lengths by linear interpolation between the known ones."""
    import numpy as np

    both = [
        np.interp(lengths, list(known), seconds).tolist() for seconds in zip(*known.values(), strict=True)
    ]
    return {length: LengthSeconds(*values) for length, *values in zip(lengths, *both, strict=True)}


def _trace(sample: LengthSample) -> Trace:
    return Trace((), (), (), sample.kernels, sample.waits, ())


def _spread(lengths: Sequence[int], count: int) -> list[int]:
    """Return `count` of these lengths, evenly spaced, with the first and the last one. For a count of one,
    return the middle one.
    """
    if len(lengths) <= count:
        return list(lengths)
    if count == 1:
        return [lengths[len(lengths) // 2]]
    low, high = lengths[0], lengths[-1]
    targets = [low + (high - low) * step / (count - 1) for step in range(count)]
    return sorted({min(lengths, key=lambda length: abs(length - target)) for target in targets})

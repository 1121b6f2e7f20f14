"""One job under one recipe at many lengths: its bytes, and the seconds of a step.

Seconds are `prediction/seconds.py`'s, of the trace of that length. A few lengths are rehearsed; the kernels
of the others follow from them (`kernel_interpolation.py`), and one more rehearsed length says how far off
that is. Masks of attention are stored in rows of eight, and some kernels copy those that are not: where the
lengths part in two lists of kernels there, each part is interpolated on its own. A model that is not like
that either gets a straight line between more rehearsed lengths, and the result says so.

Every sequence of a step is taken to have one length. A batch in which nothing is padded has no attention mask
(the plain loop's rule), so its kernels are others: each length can be asked for with padding and without.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from snugfit.planning.lengths.kernel_interpolation import KernelInterpolator, LengthSample, NotInterpolable
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import context_of, policy_for
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.profile import Software
from snugfit.prediction.rates import Rates, rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS, Trace
from snugfit.results.step_seconds import StepSeconds
from snugfit.step.wishes.engine.config import group_bytes

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe

SOME_PADDING = 0.5
"""Of a padded batch: how much of it changes no shape, only that there is any."""

FEW = 4
"""As many lengths are all rehearsed: interpolating takes three and a proof."""

TOLERANCE = 1e-3
"""Of a step's seconds: how far off the proof may be."""

ROW = 8
"""Elements in a row of a mask that is stored whole (`pad_bias`, `native/transformers/attention.cpp`)."""

MOST_KNOTS = 9
"""Rehearsed lengths of a line where kernels cannot be interpolated."""

TIMED_PER_CLASS = 32
"""Lengths of one alignment that are timed; between them the seconds are a straight line."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """What the step takes at one length."""

    requested_bytes: int
    """What tensors and kernels ask for."""

    allocated_bytes: int
    """What they are handed."""

    reserved_bytes: int
    """What the allocator takes from the device."""

    context_bytes: int
    """CUDA's context and libraries, beside it."""

    doubts: tuple[str, ...] = ()
    """What is less certain in them."""

    @property
    def needed_bytes(self) -> int:
        """What must be free on the device."""
        return self.reserved_bytes + self.context_bytes


class BatchShape(NamedTuple):
    """What decides which kernels a batch runs, and on what sizes."""

    length: int
    """Tokens of each sequence."""

    padded: bool
    """Whether something in it is padding."""


class LengthSeconds(NamedTuple):
    """Seconds of a step at one length."""

    step: float
    """At the rates as they are."""

    aligned: float
    """Were rows that are no multiple of 16 bytes to cost nothing."""


@dataclass
class LengthProfiler:
    """Rehearses one job under one recipe at the lengths that are asked for, each once."""

    job: Job
    """What must be trained; its own length does not matter here."""

    recipe: Recipe
    """How it is trained."""

    gpu: Gpu
    """The GPU that it is trained on."""

    loop: str = "plain"
    """Which loop trains it."""

    tell: Callable[[str], None] = lambda what: None
    """Hears what is being done."""

    rates: Rates = field(init=False)
    """How fast the GPU is. Raises `GpuError` when that is not known."""

    off: float = 0.0
    """The largest share by which interpolated seconds were off."""

    lines: bool = False
    """Whether some seconds lie on a line between rehearsed lengths, because the kernels cannot be
    interpolated."""

    _samples: dict[BatchShape, LengthSample] = field(default_factory=dict)
    _bytes: dict[BatchShape, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rates = rates_for(self.gpu)

    @property
    def rehearsal_count(self) -> int:
        """How many lengths were rehearsed."""
        return len(self._samples)

    @property
    def doubts(self) -> dict[str, None]:
        """What is less certain at the lengths that were rehearsed, each once."""
        return dict.fromkeys(doubt for size in self._bytes.values() for doubt in size.doubts)

    def at(self, length: int, padded: bool) -> Job:
        """The job at this length. Raises `JobError` where the model has no such positions."""
        return replace(self.job, sequence_length=length, padding=SOME_PADDING if padded else 0.0)

    def bytes(self, length: int, padded: bool) -> Bytes:
        """What the step takes when every sequence has this length."""
        self.sample(length, padded)
        return self._bytes[BatchShape(length, padded)]

    def sample(self, length: int, padded: bool) -> LengthSample:
        """The steady step at this length, rehearsed."""
        key = BatchShape(length, padded)
        if key not in self._samples:
            self.tell(f"simulating {length} tokens{'' if padded else ', unpadded'}")
            software, setup = Software(), self.recipe.setup()
            trace = rehearse(self.at(*key), setup, policy_for(self.gpu, software), loop=self.loop)
            after = replay(trace, expandable=setup.expandable_segments)
            context, about_context = context_of(
                self.gpu, software, trace, group=group_bytes(setup, self.loop)
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
        """The step at this length, rehearsed and timed."""
        return self._timing(_trace(self.sample(length, padded)), rates)

    def seconds_of(self, trace: Trace) -> LengthSeconds:
        """Seconds of the steady step of any trace."""
        priced = self._timing(trace).step_seconds
        clocks = KernelClock(self.rates), KernelClock(without_alignment_cost(self.rates))
        products = {kernel for kernel in trace.kernels if kernel.operator in MATRIX_PRODUCTS}
        if all(clocks[0].seconds(kernel) == clocks[1].seconds(kernel) for kernel in products):
            return LengthSeconds(priced, priced)
        return LengthSeconds(priced, self._timing(trace, without_alignment_cost(self.rates)).step_seconds)

    def seconds(self, lengths: Collection[int], padded: bool) -> dict[int, LengthSeconds]:
        """Seconds of the step at each of these lengths."""
        alone = {1} & set(lengths)  # one token has nothing to attend to: other kernels
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
        if len(lengths) <= FEW:
            return {length: self._exact(length, padded) for length in lengths}
        rows = [length for length in lengths if length % ROW == 0]
        odd = [length for length in lengths if length % ROW]
        most, least = (rows, odd) if len(rows) > len(odd) else (odd, rows)
        knots = _spread(most if len(most) > FEW else lengths, 3)
        left = [length for length in (*least, *most) if length not in knots]
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
        if rows and odd:
            return self._family(rows, padded) | self._family(odd, padded)
        return self._line(lengths, padded)

    def _off(self, interpolator: KernelInterpolator, proof: int, padded: bool) -> float:
        """The share by which the interpolated seconds are off at a length that is rehearsed as a proof."""
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
        """Seconds at these lengths: of many, those of one alignment lie on a line between some of them."""
        alike: dict[int, list[int]] = defaultdict(list)
        for length in lengths:
            alike[math.gcd(length, ROW)].append(length)
        seconds: dict[int, LengthSeconds] = {}
        for group in alike.values():
            timed = _spread(group, TIMED_PER_CLASS)
            seconds |= _between(group, {length: self.seconds_of(interpolator.at(length)) for length in timed})
        return seconds

    def _line(self, lengths: Sequence[int], padded: bool) -> dict[int, LengthSeconds]:
        self.lines = True
        return _between(
            lengths, {length: self._exact(length, padded) for length in _spread(lengths, MOST_KNOTS)}
        )


def without_alignment_cost(rates: Rates) -> Rates:
    """The rates, were rows that are no multiple of 16 bytes to cost nothing."""
    return replace(
        rates,
        products={name: replace(rate, unaligned=(1.0, 1.0, 1.0)) for name, rate in rates.products.items()},
    )


def _between(lengths: Sequence[int], known: dict[int, LengthSeconds]) -> dict[int, LengthSeconds]:
    """Straight lines between what is known."""
    import numpy as np

    both = [
        np.interp(lengths, list(known), seconds).tolist() for seconds in zip(*known.values(), strict=True)
    ]
    return {length: LengthSeconds(*values) for length, *values in zip(lengths, *both, strict=True)}


def _trace(sample: LengthSample) -> Trace:
    return Trace((), (), (), sample.kernels, sample.waits, ())


def _spread(lengths: Sequence[int], count: int) -> list[int]:
    """So many of these, evenly by value, the first and the last among them; one is from the middle."""
    if len(lengths) <= count:
        return list(lengths)
    if count == 1:
        return [lengths[len(lengths) // 2]]
    low, high = lengths[0], lengths[-1]
    targets = [low + (high - low) * step / (count - 1) for step in range(count)]
    return sorted({min(lengths, key=lambda length: abs(length - target)) for target in targets})

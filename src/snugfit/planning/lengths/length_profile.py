"""One job under one recipe at many lengths: its bytes, and the seconds of a step.

Seconds are `prediction/seconds.py`'s, of the trace of that length. A few lengths are rehearsed; the kernels
of the others follow from them (`kernel_interpolation.py`), and one more rehearsed length says how far off
that is. Masks of attention are stored in rows of eight, and some kernels copy those that are not: where the
lengths part in two lists of kernels there, each part is stretched on its own. A model that is not like that
either gets a straight line between more rehearsed lengths, and the result says so.

Every sequence of a step is taken to have one length. A batch in which nothing is padded has no attention mask
(the plain loop's rule), so its kernels are others: each length can be asked for with padding and without.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from snugfit.planning.lengths.kernel_interpolation import Irregular, Sight, Stretched
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import context_of, policy_for
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

SOME_PADDING = 0.5
"""Of a padded batch: how much of it changes no shape, only that there is any."""

FEW = 4
"""As many lengths are each rehearsed: stretching takes three and a proof."""

TOLERANCE = 1e-3
"""Of a step's seconds: how far off the proof may be."""

ROW = 8
"""Elements in a row of a mask that is stored whole (`pad_bias`, `native/transformers/attention.cpp`)."""

MOST_KNOTS = 9
"""Rehearsed lengths of a line where nothing stretches."""

STAIRS = 32
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


class Seconds(NamedTuple):
    """Of a step."""

    step: float
    """At the rates as they are."""

    aligned: float
    """Were rows that are no multiple of 16 bytes to cost nothing."""


@dataclass
class Pace:
    """Rehearses one job under one recipe at the lengths that are asked for, each once."""

    job: Job
    """What must be trained; its own length does not matter here."""

    recipe: Recipe
    """How."""

    gpu: Gpu
    """On what."""

    loop: str = "plain"
    """In which loop."""

    tell: Callable[[str], None] = lambda what: None
    """Hears what is being done."""

    rates: Rates = field(init=False)
    """How fast the GPU is. Raises `GpuError` when that is not known."""

    off: float = 0.0
    """The largest share by which stretched seconds were found off."""

    lines: bool = False
    """Whether some seconds lie on a line between rehearsed lengths, because the kernels do not stretch."""

    _sights: dict[tuple[int, bool], Sight] = field(default_factory=dict)
    _bytes: dict[tuple[int, bool], Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rates = rates_for(self.gpu)

    @property
    def rehearsed(self) -> int:
        """How many lengths were."""
        return len(self._sights)

    def at(self, length: int, padded: bool) -> Job:
        """The job at this length. Raises `JobError` where the model has no such positions."""
        return replace(self.job, sequence_length=length, padding=SOME_PADDING if padded else 0.0)

    def bytes(self, length: int, padded: bool) -> Bytes:
        """What the step takes when every sequence has this length."""
        self.sight(length, padded)
        return self._bytes[length, padded]

    def sight(self, length: int, padded: bool) -> Sight:
        """The steady step at this length, rehearsed."""
        key = (length, padded)
        if key not in self._sights:
            self.tell(f"simulating {length} tokens{'' if padded else ', unpadded'}")
            software, setup = Software(), self.recipe.setup()
            trace = rehearse(self.at(*key), setup, policy_for(self.gpu, software), loop=self.loop)
            after = replay(trace, expandable=setup.expandable_segments)
            context, about_context = context_of(self.gpu, software, trace)
            self._sights[key] = Sight(length, trace.kernels, trace.waits)
            self._bytes[key] = Bytes(
                requested_bytes=after.requested_peak,
                allocated_bytes=after.allocated_peak,
                reserved_bytes=after.reserved_peak,
                context_bytes=context,
                doubts=tuple(about_context),
            )
        return self._sights[key]

    def timing(self, length: int, padded: bool, *, rates: Rates | None = None) -> StepSeconds:
        """The step at this length, rehearsed and timed."""
        return self._timing(_trace(self.sight(length, padded)), rates)

    def seconds_of(self, trace: Trace) -> Seconds:
        """Seconds of the steady step of any trace."""
        priced = self._timing(trace).step_seconds
        clocks = KernelClock(self.rates), KernelClock(aligned(self.rates))
        products = {kernel for kernel in trace.kernels if kernel.operator in MATRIX_PRODUCTS}
        if all(clocks[0].seconds(kernel) == clocks[1].seconds(kernel) for kernel in products):
            return Seconds(priced, priced)
        return Seconds(priced, self._timing(trace, aligned(self.rates)).step_seconds)

    def seconds(self, lengths: Collection[int], padded: bool) -> dict[int, Seconds]:
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

    def _family(self, lengths: Sequence[int], padded: bool) -> dict[int, Seconds]:
        if len(lengths) <= FEW:
            return {length: self._rehearsed(length, padded) for length in lengths}
        rows = [length for length in lengths if length % ROW == 0]
        others = [length for length in lengths if length % ROW]
        most, least = (rows, others) if len(rows) > len(others) else (others, rows)
        knots = _spread(most if len(most) > FEW else lengths, 3)
        left = [length for length in (*least, *most) if length not in knots]
        proof = _spread([length for length in left if length in least] or left, 1)[0]
        try:
            stretched = Stretched([self.sight(length, padded) for length in knots])
            off = self._off(stretched, proof, padded)
        except Irregular:
            off = math.inf
        if off <= TOLERANCE:
            self.off = max(self.off, off)
            known = {length: self._rehearsed(length, padded) for length in (*knots, proof)}
            return self._stairs(lengths, stretched) | known
        if rows and others:
            return self._family(rows, padded) | self._family(others, padded)
        return self._line(lengths, padded)

    def _off(self, stretched: Stretched, proof: int, padded: bool) -> float:
        """By which share the stretched seconds are off at a length that is rehearsed as a proof."""
        real = self.timing(proof, padded)
        if len(stretched.at(proof).kernels) != len(self.sight(proof, padded).kernels):
            raise Irregular
        found = self._timing(stretched.at(proof))
        return max(
            abs(found.step_seconds / real.step_seconds - 1),
            abs(found.device_seconds / real.device_seconds - 1),
        )

    def _rehearsed(self, length: int, padded: bool) -> Seconds:
        return self.seconds_of(_trace(self.sight(length, padded)))

    def _stairs(self, lengths: Sequence[int], stretched: Stretched) -> dict[int, Seconds]:
        """Seconds at these lengths: of many, those of one alignment lie on a line between some of them."""
        alike: dict[int, list[int]] = defaultdict(list)
        for length in lengths:
            alike[math.gcd(length, ROW)].append(length)
        found: dict[int, Seconds] = {}
        for group in alike.values():
            timed = _spread(group, STAIRS)
            found |= _between(group, {length: self.seconds_of(stretched.at(length)) for length in timed})
        return found

    def _line(self, lengths: Sequence[int], padded: bool) -> dict[int, Seconds]:
        self.lines = True
        return _between(
            lengths, {length: self._rehearsed(length, padded) for length in _spread(lengths, MOST_KNOTS)}
        )


def aligned(rates: Rates) -> Rates:
    """The rates, were rows that are no multiple of 16 bytes to cost nothing."""
    return replace(
        rates,
        products={name: replace(rate, unaligned=(1.0, 1.0, 1.0)) for name, rate in rates.products.items()},
    )


def _between(lengths: Sequence[int], known: dict[int, Seconds]) -> dict[int, Seconds]:
    """Straight lines between what is known."""
    import numpy as np

    both = [
        np.interp(lengths, list(known), seconds).tolist() for seconds in zip(*known.values(), strict=True)
    ]
    return {length: Seconds(*each) for length, *each in zip(lengths, *both, strict=True)}


def _trace(sight: Sight) -> Trace:
    return Trace((), (), (), sight.kernels, sight.waits, ())


def _spread(lengths: Sequence[int], count: int) -> list[int]:
    """So many of these, evenly by value, the first and the last among them; one is from the middle."""
    if len(lengths) <= count:
        return list(lengths)
    if count == 1:
        return [lengths[len(lengths) // 2]]
    low, high = lengths[0], lengths[-1]
    wanted = [low + (high - low) * step / (count - 1) for step in range(count)]
    return sorted({min(lengths, key=lambda length: abs(length - want)) for want in wanted})

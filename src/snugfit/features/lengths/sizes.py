"""Sizes (such as of the batch or vocabulary) that are slow on a GPU, and faster alternatives.

Matrix products are computed in tiles, and tiles in waves (`prediction/kernel_seconds.py`; NVIDIA, "Matrix
Multiplication Background User's Guide", sections 2.2 and 3). A size just past the end of a tile or a wave
costs as much as a much larger one. Tensor cores need rows that are multiples of 16 bytes for full speed. Each
alternative is found by predicting memory and step time of the job with another size. Gains below `MIN_GAIN`
are not listed.

Only a change of the vocabulary and padding to another length are *proposed*: neither changes the learned
model. Another batch size or model width changes the training, so those are only listed.

The cost of unaligned rows (`MatmulRate.unaligned`) was measured on an H200, and is assumed on other GPUs.
Until cuBLAS 11, matrix products with such rows did not use the tensor cores. Since then they are only slower
there, by an amount that depends on the shape (the guide's section 2.2). If the cost is assumed and the gain
depends on it alone, the result reports this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from snugfit.errors import SnugfitError
from snugfit.features.lengths.kernel_interpolation import KernelInterpolator, NotInterpolable
from snugfit.features.lengths.length_profile import LengthProfiler, without_alignment_cost
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import ALIGNMENT, Rates, knows_alignment
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS

MIN_GAIN = 0.01
"""Smallest relative gain in samples per second that is listed."""

FREE = 0.005
"""Greatest relative slowdown of a step at which a larger batch still counts as equally fast."""

MULTIPLES = (8, 64)
MIN_SLOPE = 2
"""Least ratio of saved seconds to saved length, both relative, from which a shorter length ends a tile or a
wave.

Attention alone makes shorter sequences slightly faster, token by token.
"""

BATCH_DIVISOR = 4
"""Divisor of the job's batch size. Listed batch sizes differ from it by at most a fourth."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size (such as the vocabulary) that is slow on the device, and a faster one."""

    what: str
    """Name of the slow size: `vocabulary`, `sequence length`, `batch` or `width`."""

    given: int
    """The slow size, as it is in the job or the model."""

    instead: int | None
    """The faster size; None for a width of the model, which cannot be changed."""

    gain: float
    """Relative gain in samples per second, or in tokens per second if sequences get shorter."""

    more_bytes: int | None = None
    """Bytes that the faster size needs in addition on the device; negative if it needs less."""

    step_seconds: float | None = None
    """Seconds of a step with the faster size."""

    proposed: bool = False
    """True if the change has no effect on the trained model."""

    assumed: bool = False
    """True if the gain only depends on the assumed cost of unaligned rows."""

    where: str = ""
    """Name of a module that has this width; empty for other sizes."""


def sizes_of(profiler: LengthProfiler, length: int, padded: bool) -> tuple[Size, ...]:
    """Return the sizes (such as the vocabulary) whose change could speed up the step at this length.

    Return nothing if the CPU or the data loader limits the speed: faster matrix products then save no time.
    """
    if profiler.timing(length, padded).bound in ("host", "loading"):
        return ()
    at = _SimulatedSize(profiler, length, padded)
    return (*_vocabulary(at), *_length(at), *_batch(at), *_widths(at))


@dataclass(frozen=True)
class _SimulatedSize:
    """A simulated training step of one job and sequence length, which steps of other sizes are compared
    with.
    """

    profiler: LengthProfiler
    length: int
    padded: bool

    def instead(
        self, size_name: str, given: int, other: _SimulatedSize, size: int, *, tokens: bool = False
    ) -> Size:
        """Return the gain and extra memory of another size, such as a batch size, over this one."""
        needed = other.profiler.bytes(other.length, other.padded).needed_bytes
        return Size(
            what=size_name,
            given=given,
            instead=size,
            gain=self.gain(other, tokens=tokens),
            more_bytes=needed - self.profiler.bytes(self.length, self.padded).needed_bytes,
            step_seconds=other.seconds(),
            assumed=not knows_alignment(self.profiler.gpu)
            and self.gain(other, tokens=tokens, rates=without_alignment_cost(self.profiler.rates)) < MIN_GAIN,
        )

    def seconds(self, rates: Rates | None = None) -> float:
        """Return the predicted seconds of this simulated step."""
        return self.profiler.timing(self.length, self.padded, rates=rates).step_seconds

    def gain(self, other: _SimulatedSize, *, tokens: bool = False, rates: Rates | None = None) -> float:
        """Return the relative gain in samples (or tokens) per second of the other step over this one."""
        work = other.profiler.job.batch_size / self.profiler.job.batch_size
        if tokens:
            work *= other.length / self.length
        return work * self.seconds(rates) / other.seconds(rates) - 1

    def steep(self, other: _SimulatedSize, share: float) -> bool:
        """Return True if the other step saves a far larger share of seconds than `share`, the share by which
        it is shorter.
        """
        return 1 - other.seconds() / self.seconds() > MIN_SLOPE * share

    def with_changes(self, **changes: Any) -> _SimulatedSize:
        """Return the simulated step at the same length for a job with these fields changed."""
        profiler = self.profiler
        job = replace(profiler.job, **changes)
        return replace(
            self, profiler=LengthProfiler(job, profiler.recipe, profiler.gpu, profiler.loop, profiler.tell)
        )


def up(size: int, multiple: int) -> int:
    """Round a size up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


# ---- the vocabulary -------------------------------------------------------------------------------------


def _vocabulary(at: _SimulatedSize) -> Iterator[Size]:
    """Yield larger vocabulary sizes with which a step is faster, as by
    `resize_token_embeddings(pad_to_multiple_of=64)`.
    """
    rows = at.profiler.job.model.vocabulary
    best: Size | None = None
    for size in sorted({up(rows, multiple) for multiple in MULTIPLES} - {rows}) if rows else ():
        other = at.with_changes(model=at.profiler.job.model.with_vocabulary(size))
        candidate = replace(at.instead("vocabulary", rows, other, size), proposed=True)
        # A larger multiple must be clearly faster than a smaller one.
        if best is None or candidate.gain > best.gain + MIN_GAIN:
            best = candidate
    if best is not None and best.gain > MIN_GAIN:
        yield best


# ---- the length -----------------------------------------------------------------------------------------


def _length(at: _SimulatedSize) -> Iterator[Size]:
    """Yield faster sequence lengths: a longer one with fewer seconds (by padding), or a shorter one with more
    tokens per second.
    """
    length = at.length
    longer = sorted({up(length, multiple) for multiple in MULTIPLES} - {length})
    shorter = sorted({length // multiple * multiple for multiple in MULTIPLES} - {length, 0})
    candidates = []
    for size in (*longer, *shorter):
        try:
            other = replace(at, length=size, padded=at.padded or size > length)
            size_change = at.instead("sequence length", length, other, size, tokens=size < length)
        except SnugfitError:  # the length exceeds the model's last position
            continue
        if size > length or at.steep(other, 1 - size / length):
            candidates.append(replace(size_change, proposed=size > length))
    for proposed in (True, False):
        known = [
            size_change
            for size_change in candidates
            if size_change.proposed is proposed and size_change.gain > MIN_GAIN
        ]
        if known:
            yield max(known, key=lambda size_change: size_change.gain)


# ---- the batch ------------------------------------------------------------------------------------------


def _batch(at: _SimulatedSize) -> Iterator[Size]:
    """Yield faster batch sizes: a smaller one with more samples per second, and the largest one whose step is
    as fast. At both, the tiles of the matrix products fill the GPU's multiprocessors completely.
    """
    pieces = at.profiler.recipe.pieces
    samples = at.profiler.job.batch_size // pieces
    low, high = samples - samples // BATCH_DIVISOR, samples + -(-samples // BATCH_DIVISOR)
    steps = {size: at.with_changes(batch_size=size * pieces) for size in {low, high} - {samples}}
    seconds = {size: other.seconds() for size, other in (*steps.items(), (samples, at))}
    # Interpolation needs three simulated sizes, with others between them.
    if len(steps) == 2 and high - low > 2:
        seconds |= _between(at, steps, samples)
    smaller = max((size for size in seconds if size <= samples), key=lambda size: size / seconds[size])
    free = max(size for size in seconds if seconds[size] <= seconds[samples] * (1 + FREE))
    for size in sorted({smaller, free} - {samples}):
        other = steps.get(size) or at.with_changes(batch_size=size * pieces)
        size_change = at.instead("batch", at.profiler.job.batch_size, other, size * pieces)
        if size_change.gain > MIN_GAIN:
            yield size_change


def _between(at: _SimulatedSize, steps: dict[int, _SimulatedSize], samples: int) -> dict[int, float]:
    """Return the seconds of a step for every batch size between the simulated `steps`, by interpolating their
    kernels. Return an empty dict if that is impossible.
    """
    low, high = sorted(steps)
    by_size = {
        size: step.profiler.sample(at.length, at.padded)._replace(length=size)
        for size, step in (*steps.items(), (samples, at))
    }
    try:
        interpolator = KernelInterpolator([by_size[size] for size in sorted(by_size)])
    except NotInterpolable:
        return {}
    return {size: at.profiler.seconds_of(interpolator.at(size)).step for size in range(low, high + 1)}


# ---- widths ---------------------------------------------------------------------------------------------


def _widths(at: _SimulatedSize) -> Iterator[Size]:
    """Yield widths of the model whose matrix rows are not a multiple of 16 bytes, with their estimated extra
    time.
    """
    job = at.profiler.job
    samples = job.batch_size // at.profiler.recipe.pieces
    # These sizes come from the job, while this function only reports widths of the model.
    of_the_job = {at.length, job.target_length, samples, samples * at.length, samples * job.target_length}
    of_the_job |= {job.model.vocabulary, job.labels}
    slow, fast = KernelClock(at.profiler.rates), KernelClock(without_alignment_cost(at.profiler.rates))
    lost: dict[int, float] = defaultdict(float)
    width_names: dict[int, str] = {}
    for kernel in at.profiler.sample(at.length, at.padded).kernels:
        if kernel.operator not in MATRIX_PRODUCTS:
            continue
        extra = slow.seconds(kernel) - fast.seconds(kernel)
        sizes = {length for length in kernel.leading if length * kernel.itemsize % ALIGNMENT}
        if extra > 0 and sizes and not sizes & of_the_job:
            width = min(sizes)
            lost[width] += extra
            width_names.setdefault(width, kernel.module)
    whole = at.seconds()
    for width, seconds in lost.items():
        if (gain := whole / (whole - seconds) - 1) > MIN_GAIN:
            yield Size(
                what="width",
                given=width,
                instead=None,
                gain=gain,
                assumed=not knows_alignment(at.profiler.gpu),
                where=width_names[width],
            )

"""Bounds on bytes and seconds of recipes that were not simulated, from those that were, for one job on GPUs
of one model.

Without bounds, a search would simulate every parallelism layout, on every number of GPUs, with every number
of micro-batches. Three rules save most simulations. They are assumed to hold within `MARGIN`; every answer is
simulated itself.

- Bytes: larger micro-batches, several of them instead of one, and fewer GPUs take no less memory. The same
  holds for kept instead of recomputed activations, and for whole instead of sharded weights. The bytes of
  further samples do not depend on the sharing of weights.
- Seconds: with larger micro-batches on fewer GPUs a step takes no more GPU seconds. Each GPU works on more at
  a time, and exchanges are no longer.
- A sample takes no less time than in a very large micro-batch, without exchanges.

For groups of n GPUs that work on the same samples:

- Each GPU takes at least an n-th of the bytes of one that has the samples to itself. It takes no more than in
  smaller groups.
- They share the arithmetic, which does not reduce its GPU seconds. Exchanges become at most n times shorter,
  and no shorter if GPUs share sequences alone.
- Each of s stages waits at least (s - 1) / (m + s - 1) of a step with m micro-batches. The source is
  Narayanan et al., arXiv 2104.04473, section 2.2.1. Fewer micro-batches are therefore not always faster.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from snugfit.features.distributed.plan.judge import Judged
from snugfit.features.distributed.plan.shared import Shared

MARGIN = 1.03
"""Factor on memory extrapolated from models of few layers (chosen). A recipe that fits with it also fits in
full.
"""

CLEARLY = 1.05
"""Factor on the usable bytes (chosen). A recipe above it is assumed to miss in all layouts that take more
memory.
"""

WITH_SUMS = 1.5
"""Greatest ratio of a step's memory with several micro-batches to that with a single one of their size.

With several, gradients exist next to all activations. In the update without optimizer states, gradients take
at most half of the remaining bytes.
"""

PACE = 0.97
"""Factor on the seconds per sample of a very large micro-batch (chosen). The product is a lower bound for any
micro-batch size.
"""


class CutStep(NamedTuple):
    """Division of a batch over GPUs: number of GPUs, samples of a micro-batch, number of micro-batches on
    each GPU.
    """

    gpus: int
    samples: int
    """Samples of one micro-batch on one GPU."""
    pieces: int
    """Number of micro-batches of one step on one GPU."""


class _SamplePace(NamedTuple):
    """Lower bound of the seconds per sample on each GPU, from one simulated recipe. The bound is valid for
    any sharding of the weights.
    """

    shared: Shared
    samples: int
    """Samples of the micro-batch that gave the bound. The bound also holds for smaller ones."""
    seconds: float


class _Related(NamedTuple):
    """Simulated parallelism layouts whose memory use is known to be less or more than that of a given one."""

    leaner: list[Shared]
    """Parallelism layouts that take no more memory than this one."""
    fuller: list[Shared]
    """Parallelism layouts that take no less memory than this one."""
    narrower: list[Shared]
    """Parallelism layouts in which fewer GPUs work on the same samples."""


def bubble(shared: Shared, size: CutStep) -> float:
    """Return a lower bound of the ratio of a step's seconds to the seconds in which its pipeline stages
    compute. It is (m + s - 1) / m with m micro-batches and s stages, so 1 for one stage.
    """
    return (size.pieces + shared.stages - 1) / size.pieces


class Evidence:
    """Table of the recipes that a search has simulated on several GPUs. It derives bounds on bytes and
    seconds of other recipes. `bound` is the usable memory of each GPU in bytes.
    """

    def __init__(self, bound: int) -> None:
        self.bound, self._margin = bound, MARGIN
        self._judged: dict[str, dict[CutStep, Judged]] = defaultdict(dict)
        self._shared: dict[str, Shared] = {}
        self._paces: dict[str, _SamplePace] = {}
        self._all_relations: dict[str, _Related] = {}
        self._seen: dict[str, int] = defaultdict(int)
        self._relations: dict[tuple[str, str, str], bool] = {}

    def learn_limit(self, bound: int, ratio: float) -> None:
        """Set the usable bytes of each GPU. Increase the safety margin to `ratio`: simulations with few
        layers may give too few bytes, by this factor.
        """
        self.bound, self._margin = bound, max(self._margin, ratio)

    def hear(self, shared: Shared, size: CutStep, judged: Judged) -> None:
        """Store the bytes and seconds of a simulated recipe, from which bounds for other recipes follow."""
        self._shared.setdefault(shared.key, shared)
        self._judged[shared.key][size] = judged
        known = self._paces.get(shared.of_each)
        is_whole = size.pieces == 1 or shared.stages > 1
        if is_whole and (known is None or size.samples > known.samples):
            pace = PACE * judged.model_seconds / (size.samples * size.pieces)
            self._paces[shared.of_each] = _SamplePace(shared, size.samples, pace)

    def judgment(self, shared: Shared, size: CutStep) -> Judged | None:
        """Return the stored bytes and seconds of this parallelism layout and batch split; None if it was not
        simulated.
        """
        return self._judged[shared.key].get(size)

    def does_fit(self, judged: Judged) -> bool:
        """Return True if a simulated step fits into each GPU's usable memory, with a safety margin."""
        return judged.needed_bytes * self._margin <= self.bound

    def fits(self, shared: Shared, size: CutStep) -> bool | None:
        """Return True if simulations imply that this layout and batch split fits into a GPU's memory, False
        if it does not, None if unknown.
        """
        if (exactly := self.judgment(shared, size)) is not None:
            return self.does_fit(exactly)
        if self._fits_larger(shared, size):
            return True
        own = self._judged[shared.key].items()
        if any(not self.does_fit(judged) and _takes_no_less(shared, size, known) for known, judged in own):
            return False
        return self._fits_by_others(shared, size)

    def _fits_larger(self, shared: Shared, size: CutStep) -> bool:
        """Return True if this layout fits with a simulated batch split that takes at least as much memory as
        `size`.
        """
        known = self._judged[shared.key].items()
        return any(self.does_fit(judged) and _takes_no_less(shared, one, size) for one, judged in known)

    def _fits_by_others(self, shared: Shared, size: CutStep) -> bool | None:
        """Return True if simulations of other layouts imply that this one fits into memory, False if it does
        not, None if unknown.
        """
        related = self._relations_of(shared)
        if any(self._missed_clearly(other, size) for other in (shared, *related.leaner)):
            return False
        if any(self._missed_clearly(one, size, times=shared.parts / one.parts) for one in related.narrower):
            return False
        if any(self._fits_larger(other, size) for other in related.fuller):
            return True
        fewest, further = self._by_samples(shared)
        return False if further * (size.samples - fewest) > CLEARLY * self.bound else None

    def expects_to_fit(self, shared: Shared, size: CutStep, near: CutStep) -> bool:
        """Return True if a step with micro-batches of `size` should fit, by a linear estimate from a
        simulated size.

        `near` is a simulated split on as many GPUs. The bytes of each further sample may come from other
        layouts.
        """
        _, further = self._by_samples(shared)
        judged = self._judged[shared.key][near]
        expected = judged.needed_bytes + further * (size.samples - near.samples)
        return self.does_fit(judged._replace(needed_bytes=int(expected)))

    def _by_samples(self, shared: Shared) -> tuple[int, float]:
        """Return the samples of the smallest simulated micro-batch with the same work per GPU, and the bytes
        that each further sample adds.

        The bytes are the difference of two simulated sizes on as many GPUs in one layout; 0 if unknown. If
        unknown for a group of n GPUs, they are an n-th of those of a GPU without a group.
        """
        own = self._between_sizes(shared.of_each)
        if own[1] or shared.parts == 1:
            return own
        fewest, further = self._between_sizes(shared.by_itself)
        return fewest, further / shared.parts

    def _between_sizes(self, like: str) -> tuple[int, float]:
        fewest, further, most = 1, 0.0, 0
        for key, other in self._shared.items():
            if other.of_each != like:
                continue
            known = self._judged[key]
            for few, many in itertools.permutations(known, 2):
                between = many.samples - few.samples
                # The slope is most exact between numbers of samples that are far apart.
                if few.gpus == many.gpus and between > most:
                    fewest, most = few.samples, between
                    further = (known[many].needed_bytes - known[few].needed_bytes) / between
        return fewest, further

    def _missed_clearly(self, other: Shared, size: CutStep, times: float = 1.0) -> bool:
        """Return True if a layout's simulated bytes clearly exceed `times` the usable bytes of a GPU.

        The comparison includes only simulated batch splits that take no more memory than `size`. If groups
        have `times` as many GPUs, their number is divided by `times`.
        """
        size = size._replace(gpus=math.ceil(size.gpus / times))
        # With several micro-batches, gradients exist next to all activations (`WITH_SUMS`).
        summed = size._replace(pieces=max(size.pieces, 2))
        bound = CLEARLY * times * self.bound
        return any(
            (judged.needed_bytes > bound and _takes_no_less(other, size, known))
            or (judged.needed_bytes > WITH_SUMS * bound and _takes_no_less(other, summed, known))
            for known, judged in self._judged[other.key].items()
        )

    def least_seconds(self, shared: Shared, size: CutStep) -> float:
        """Return a lower bound of the seconds of a step with this layout and batch split."""
        if (exactly := self.judgment(shared, size)) is not None:
            return exactly.step_seconds
        waits = bubble(shared, size)
        least = 0.0
        for pace in self._paces.values():
            times = shared.parts / pace.shared.parts
            if size.samples <= pace.samples * times and shared.has_groups_of(pace.shared):
                least = max(least, size.samples * size.pieces * pace.seconds * waits / times)
        for known, judged in self._judged[shared.key].items():
            if known.samples >= size.samples and known.gpus <= size.gpus:
                working = judged.step_seconds / bubble(shared, known)
                least = max(least, waits * working * known.gpus / size.gpus)
        return max(least, self._as_in_smaller_groups(shared, size))

    def _as_in_smaller_groups(self, shared: Shared, size: CutStep) -> float:
        """Return a lower bound of a step's seconds from simulated layouts in which smaller groups of GPUs
        share samples.
        """
        least = 0.0
        for other in self._relations_of(shared).narrower:
            times = shared.parts / other.parts
            if shared.shares_sequences_with(other, times):
                times = 1.0  # weights sharded over all GPUs, with the same exchanges on fewer GPUs
            for known, judged in self._judged[other.key].items():
                most = 1 if shared.stages > other.stages else size.pieces
                if known.gpus == size.gpus and known.pieces <= most:
                    least = max(least, judged.step_seconds / times)
        return least

    def fastest_known(self, shared: Shared, gpus: int) -> float | None:
        """Return the seconds of this layout's fastest simulated batch split that fits on `gpus` GPUs; None if
        none does.
        """
        known = self._judged.get(shared.key, {})
        fit = [
            judged.step_seconds
            for size, judged in known.items()
            if size.gpus == gpus and self.does_fit(judged)
        ]
        return min(fit, default=None)

    def in_half_groups(self, shared: Shared) -> Iterator[Shared]:
        """Yield simulated layouts that differ from this one only in groups of half as many GPUs."""
        for other in self._relations_of(shared).narrower:
            if shared.parts == 2 * other.parts:
                yield other

    def _relations_of(self, shared: Shared) -> _Related:
        """Return the simulated layouts that take less or more memory than this one."""
        related = self._all_relations.setdefault(shared.key, _Related([], [], []))
        # Only layouts that were added since the last call are compared.
        for other in itertools.islice(self._shared.values(), self._seen[shared.key], None):
            if other.key == shared.key:
                continue
            if self.holds_no_more(other, shared):
                related.leaner.append(other)
            if self.holds_no_more(shared, other):
                related.fuller.append(other)
            if self.is_wider(shared, other):
                related.narrower.append(other)
        self._seen[shared.key] = len(self._shared)
        return related

    def holds_no_more(self, one: Shared, other: Shared) -> bool:
        """Return True if one layout takes no more memory than the other; the answer is cached
        (`Shared.holds_no_more_than`).
        """
        key = ("holds", one.key, other.key)
        if key not in self._relations:
            self._relations[key] = one.holds_no_more_than(other)
        return self._relations[key]

    def is_wider(self, one: Shared, other: Shared) -> bool:
        """Return True if one layout has larger groups of GPUs and is otherwise equal to the other; the answer
        is cached (`Shared.is_wider_than`).
        """
        key = ("wider", one.key, other.key)
        if key not in self._relations:
            self._relations[key] = one.is_wider_than(other)
        return self._relations[key]


def _takes_no_less(shared: Shared, size: CutStep, other: CutStep) -> bool:
    """Return True if a layout takes no fewer bytes with the batch split `size` than with the split
    `other`.
    """
    return (
        (size.gpus <= other.gpus or not shared.spreads_over_all)
        and size.samples >= other.samples
        # A single micro-batch has no gradients next to its activations, so it may take less.
        and (size.pieces > 1 or other.pieces == 1)
    )

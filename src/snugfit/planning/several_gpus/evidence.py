"""What recipes that were simulated tell of others, for one job on GPUs of one kind.

A search that knows nothing asks about every way to share the work, on every number of GPUs, with the batch
cut in every way. Three things spare it most of that. They are taken to hold within `MARGIN`; what is answered
is simulated itself.

- Bytes: larger micro-batches, several of them instead of one, and fewer GPUs take no less. Nor does what
  keeps activations that another computes again, or holds weights of which another holds a part. What further
  samples take does not depend on how weights are shared.
- Seconds: with larger micro-batches on fewer GPUs a step takes no more GPU seconds, for each works on more at
  a time, and exchanges are no longer.
- A sample takes no less time than each of a very large micro-batch, with exchanges left out.

Where groups of n GPUs work on the same samples:

- They take no less of each GPU's bytes than an n-th of what one that has the samples to itself takes, and no
  more than smaller groups do.
- They share the arithmetic, which takes no less GPU seconds so; exchanges become n times shorter at most,
  and where GPUs share sequences alone none becomes shorter.
- Of s stages with m micro-batches each waits at least (s - 1) / (m + s - 1) of a step (Narayanan et al.,
  arXiv 2104.04473, section 2.2.1), so fewer micro-batches are not faster by themselves.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from snugfit.planning.several_gpus.asking import MARGIN
from snugfit.planning.several_gpus.candidates import Shared
from snugfit.planning.several_gpus.judge import Judged

CLEARLY = 1.05
"""Of the bytes that may be used (chosen): what misses by so much would miss too if it shared the work in a
way that holds more."""

WITH_SUMS = 1.5
"""How many times as much several micro-batches take at most as one of their size: gradients beside all
activations, which in the update take no more than half of all that is left, where there are no states."""

PACE = 0.97
"""Of the seconds that a sample takes in a very large micro-batch (chosen): those that any sample takes."""


class CutStep(NamedTuple):
    """How a step is cut."""

    gpus: int
    samples: int
    """Of a micro-batch on one GPU."""
    pieces: int
    """Micro-batches of a step on one GPU."""


class _SamplePace(NamedTuple):
    """How long a sample takes each GPU at least, which does not depend on who else has which weights."""

    shared: Shared
    samples: int
    """Of the micro-batch that this is known of, and so of smaller ones."""
    seconds: float


class _Related(NamedTuple):
    """Other ways of sharing of which something was simulated, beside one."""

    leaner: list[Shared]
    """They hold no more than it."""
    fuller: list[Shared]
    """They hold no less."""
    narrower: list[Shared]
    """In them smaller groups work on the same samples."""


def bubble(shared: Shared, size: CutStep) -> float:
    """How many times as long a step takes at least as its stages work: 1 where there is one."""
    return (size.pieces + shared.stages - 1) / size.pieces


class Evidence:
    """What is known of a job on GPUs of one kind, of each of which `bound` bytes may be used."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._judged: dict[str, dict[CutStep, Judged]] = defaultdict(dict)
        self._shared: dict[str, Shared] = {}
        self._paces: dict[str, _SamplePace] = {}
        self._all_relations: dict[str, _Related] = {}
        self._seen: dict[str, int] = defaultdict(int)
        self._relations: dict[tuple[str, str, str], bool] = {}

    def hear(self, shared: Shared, size: CutStep, judged: Judged) -> None:
        """Remembers what was simulated."""
        self._shared.setdefault(shared.key, shared)
        self._judged[shared.key][size] = judged
        known = self._paces.get(shared.of_each)
        is_whole = size.pieces == 1 or shared.stages > 1
        if is_whole and (known is None or size.samples > known.samples):
            pace = PACE * judged.model_seconds / (size.samples * size.pieces)
            self._paces[shared.of_each] = _SamplePace(shared, size.samples, pace)

    def judgment(self, shared: Shared, size: CutStep) -> Judged | None:
        """What was simulated of just this."""
        return self._judged[shared.key].get(size)

    def does_fit(self, judged: Judged) -> bool:
        """Whether what was simulated fits."""
        return judged.needed_bytes * MARGIN <= self._bound

    def fits(self, shared: Shared, size: CutStep) -> bool | None:
        """Whether this fits; None where that is not known."""
        if (exactly := self.judgment(shared, size)) is not None:
            return self.does_fit(exactly)
        own = self._judged[shared.key].items()
        if any(self.does_fit(judged) and _takes_no_less(shared, known, size) for known, judged in own):
            return True
        if any(not self.does_fit(judged) and _takes_no_less(shared, size, known) for known, judged in own):
            return False
        return self._fits_by_others(shared, size)

    def _fits_by_others(self, shared: Shared, size: CutStep) -> bool | None:
        """The same, by what was simulated of other ways of sharing."""
        related = self._relations_of(shared)
        if any(self._missed_clearly(other, size) for other in (shared, *related.leaner)):
            return False
        if any(self._missed_clearly(one, size, times=shared.parts / one.parts) for one in related.narrower):
            return False
        for other in related.fuller:
            sizes = self._judged[other.key].items()
            if any(self.does_fit(judged) and _takes_no_less(other, known, size) for known, judged in sizes):
                return True
        fewest, further = self._by_samples(shared)
        return False if further * (size.samples - fewest) > CLEARLY * self._bound else None

    def expects_to_fit(self, shared: Shared, size: CutStep, near: CutStep) -> bool:
        """Whether this should fit, by what it takes with micro-batches of another size on as many GPUs, and
        what further samples took elsewhere."""
        _, further = self._by_samples(shared)
        judged = self._judged[shared.key][near]
        expected = judged.needed_bytes + further * (size.samples - near.samples)
        return self.does_fit(judged._replace(needed_bytes=int(expected)))

    def missed_elsewhere(self, shared: Shared, size: CutStep) -> bool:
        """Whether such a step misses clearly in another way of sharing, which may hold more."""
        like = shared.of_each
        return any(
            other.of_each == like and self._missed_clearly(other, size) for other in self._shared.values()
        )

    def _by_samples(self, shared: Shared) -> tuple[int, float]:
        """The smallest micro-batch that was simulated with what each GPU does here, and the bytes that each
        further sample took, between sizes on as many GPUs in one way of sharing; 0 where that is not known.
        Of a group of n GPUs of which that is not known an n-th of what one by itself takes."""
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
                if few.gpus == many.gpus and between > most:
                    fewest, most = few.samples, between
                    further = (known[many].needed_bytes - known[few].needed_bytes) / between
        return fewest, further

    def _missed_clearly(self, other: Shared, size: CutStep, times: float = 1.0) -> bool:
        """Whether a way of sharing takes clearly more than so many times what may be used, where the step is
        cut as `size` or smaller. Of `times` as many GPUs in a group, there are so many fewer groups."""
        size = size._replace(gpus=math.ceil(size.gpus / times))
        summed = size._replace(pieces=max(size.pieces, 2))
        bound = CLEARLY * times * self._bound
        return any(
            (judged.needed_bytes > bound and _takes_no_less(other, size, known))
            or (judged.needed_bytes > WITH_SUMS * bound and _takes_no_less(other, summed, known))
            for known, judged in self._judged[other.key].items()
        )

    def least_seconds(self, shared: Shared, size: CutStep) -> float:
        """Seconds that such a step takes at least."""
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
        """Seconds that such a step takes at least, by those of smaller groups on as many GPUs."""
        least = 0.0
        for other in self._relations_of(shared).narrower:
            times = shared.parts / other.parts
            assert shared.wish is not None
            assert other.wish is not None
            if times == shared.wish.context / other.wish.context:
                times = 1.0  # weights are spread over all GPUs, and exchanged as before
            for known, judged in self._judged[other.key].items():
                most = 1 if shared.stages > other.stages else size.pieces
                if known.gpus == size.gpus and known.pieces <= most:
                    least = max(least, judged.step_seconds / times)
        return least

    def fastest_known(self, shared: Shared, gpus: int) -> float | None:
        """Seconds of the fastest cut of this way on so many GPUs that was simulated and fits."""
        known = self._judged.get(shared.key, {})
        fit = [
            judged.step_seconds
            for size, judged in known.items()
            if size.gpus == gpus and self.does_fit(judged)
        ]
        return min(fit, default=None)

    def has_pace(self, shared: Shared) -> bool:
        """Whether it is known how long a sample takes at least, in such groups or in smaller ones that share
        the same."""
        if shared.of_each in self._paces:
            return True
        known = (pace.shared for pace in self._paces.values() if pace.shared.parts > 1 or shared.parts == 1)
        return any(shared.has_groups_of(one) for one in known)

    def knows_mesh(self, shared: Shared, size: CutStep) -> bool:
        """Whether it is known of groups of GPUs, such ones or smaller ones that share the same, how long a
        sample of so large a micro-batch takes at least."""
        return any(
            pace.shared.parts > 1
            and size.samples <= pace.samples * shared.parts / pace.shared.parts
            and shared.has_groups_of(pace.shared)
            for pace in self._paces.values()
        )

    def in_half_groups(self, shared: Shared) -> Iterator[Shared]:
        """What was simulated that shares the work alike, in groups of half as many GPUs."""
        for other in self._relations_of(shared).narrower:
            if shared.parts == 2 * other.parts:
                yield other

    def _relations_of(self, shared: Shared) -> _Related:
        """What of all that was simulated is related to this way of sharing."""
        related = self._all_relations.setdefault(shared.key, _Related([], [], []))
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
        """Whether one way of sharing takes no more memory than the other (`Shared.holds_no_more_than`)."""
        key = ("holds", one.key, other.key)
        if key not in self._relations:
            self._relations[key] = one.holds_no_more_than(other)
        return self._relations[key]

    def is_wider(self, one: Shared, other: Shared) -> bool:
        """Whether one makes larger groups of GPUs, and is else the same (`Shared.is_wider_than`)."""
        key = ("wider", one.key, other.key)
        if key not in self._relations:
            self._relations[key] = one.is_wider_than(other)
        return self._relations[key]


def _takes_no_less(shared: Shared, size: CutStep, other: CutStep) -> bool:
    """Whether one way of sharing takes no fewer bytes when the step is cut as `size` than as `other`."""
    return (
        (size.gpus <= other.gpus or not shared.spreads_over_all)
        and size.samples >= other.samples
        and (size.pieces > 1 or other.pieces == 1)
    )

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
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import NamedTuple

from snugfit.planning.several_gpus.asking import MARGIN
from snugfit.planning.several_gpus.candidates import Shared
from snugfit.planning.several_gpus.judge import Judged
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot

CLEARLY = 1.05
"""Of the bytes that may be used (chosen): what misses by so much would miss too if it shared the work in a
way that holds more."""

PACE = 0.97
"""Of the seconds that a sample takes in a very large micro-batch (chosen): those that any sample takes."""


class CutStep(NamedTuple):
    """How a step is cut."""

    gpus: int
    samples: int
    """Of a micro-batch on one GPU."""
    pieces: int
    """Micro-batches of a step on one GPU."""


class Evidence:
    """What is known of a job on GPUs of one kind, of each of which `bound` bytes may be used."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._judged: dict[Recipe, dict[CutStep, Judged]] = defaultdict(dict)
        self._shared: dict[Recipe, Shared] = {}
        self._paces: dict[Recipe, tuple[int, float]] = {}

    def hear(self, shared: Shared, size: CutStep, judged: Judged) -> None:
        """Remembers what was simulated."""
        self._shared.setdefault(shared.recipe, shared)
        self._judged[shared.recipe][size] = judged
        samples, _ = self._paces.get(key := self.on_one_gpu(shared), (0, 0.0))
        if size.pieces == 1 and size.samples > samples:
            self._paces[key] = size.samples, PACE * judged.model_seconds / size.samples

    def judgment(self, shared: Shared, size: CutStep) -> Judged | None:
        """What was simulated of just this."""
        return self._judged[shared.recipe].get(size)

    def does_fit(self, judged: Judged) -> bool:
        """Whether what was simulated fits."""
        return judged.needed_bytes * MARGIN <= self._bound

    def fits(self, shared: Shared, size: CutStep) -> bool | None:
        """Whether this fits; None where that is not known."""
        if (exactly := self.judgment(shared, size)) is not None:
            return self.does_fit(exactly)
        for known, judged in self._judged[shared.recipe].items():
            if self.does_fit(judged):
                if _takes_no_less(shared, known, size):
                    return True
            elif _takes_no_less(shared, size, known):
                return False
        for recipe, other in self._shared.items():
            if recipe == shared.recipe:
                continue
            if other.holds_no_more_than(shared) and self._missed_clearly(recipe, size):
                return False
            if shared.holds_no_more_than(other) and any(
                self.does_fit(judged) and _takes_no_less(other, known, size)
                for known, judged in self._judged[recipe].items()
            ):
                return True
        fewest, further = self._by_samples(shared)
        return False if further * (size.samples - fewest) > CLEARLY * self._bound else None

    def expects_to_fit(self, shared: Shared, size: CutStep, near: CutStep) -> bool:
        """Whether this should fit, by what it takes with micro-batches of another size on as many GPUs, and
        what further samples took elsewhere."""
        _, further = self._by_samples(shared)
        judged = self._judged[shared.recipe][near]
        expected = judged.needed_bytes + further * (size.samples - near.samples)
        return self.does_fit(judged._replace(needed_bytes=int(expected)))

    def missed_elsewhere(self, shared: Shared, size: CutStep) -> bool:
        """Whether such a step misses clearly in another way of sharing, which may hold more."""
        like = self.on_one_gpu(shared)
        return any(
            self.on_one_gpu(other) == like and self._missed_clearly(recipe, size)
            for recipe, other in self._shared.items()
        )

    def _by_samples(self, shared: Shared) -> tuple[int, float]:
        """The smallest micro-batch that was simulated with what each GPU does here, and the bytes that each
        further sample took, between sizes on as many GPUs in one way of sharing; 0 where that is not known.
        """
        like = self.on_one_gpu(shared)
        fewest, further, most = 1, 0.0, 0
        for recipe, other in self._shared.items():
            if self.on_one_gpu(other) != like:
                continue
            known = self._judged[recipe]
            for few, many in itertools.permutations(known, 2):
                between = many.samples - few.samples
                if few.gpus == many.gpus and between > most:
                    fewest, most = few.samples, between
                    further = (known[many].needed_bytes - known[few].needed_bytes) / between
        return fewest, further

    def _missed_clearly(self, recipe: Recipe, size: CutStep) -> bool:
        return any(
            judged.needed_bytes > CLEARLY * self._bound and _takes_no_less(self._shared[recipe], size, known)
            for known, judged in self._judged[recipe].items()
        )

    def least_seconds(self, shared: Shared, size: CutStep) -> float:
        """Seconds that such a step takes at least."""
        if (exactly := self.judgment(shared, size)) is not None:
            return exactly.step_seconds
        largest, pace = self._paces.get(self.on_one_gpu(shared), (0, 0.0))
        least = size.samples * size.pieces * pace if size.samples <= largest else 0.0
        for known, judged in self._judged[shared.recipe].items():
            if known.samples >= size.samples and known.gpus <= size.gpus:
                least = max(least, judged.step_seconds * known.gpus / size.gpus)
        return least

    def has_pace(self, shared: Shared) -> bool:
        """Whether it is known how long a sample takes at least."""
        return self.on_one_gpu(shared) in self._paces

    @staticmethod
    def on_one_gpu(shared: Shared) -> Recipe:
        """What each GPU does for itself, however the batch is shared: the recipe without what shares it."""
        return shared.recipe.with_(roster.plain(Slot.SHARDING))


def _takes_no_less(shared: Shared, size: CutStep, other: CutStep) -> bool:
    """Whether one way of sharing takes no fewer bytes when the step is cut as `size` than as `other`."""
    return (
        (size.gpus <= other.gpus or not shared.spreads_over_all)
        and size.samples >= other.samples
        and (size.pieces > 1 or other.pieces == 1)
    )

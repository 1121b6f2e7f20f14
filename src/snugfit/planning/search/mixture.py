"""Mixtures: recompute the first layers, and offload the activations of the following layers to the host.

Both free the activations of a layer. Recomputing repeats the layer's forward pass. A copy costs nothing if it
finishes during other computation. As many layers are offloaded as the link to the host can transfer in that
time. The rest are recomputed: the first layers, since the backward pass reaches them last
(`checkpointing/first_layers.py`). Only the input of a recomputed layer is offloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from snugfit.planning.search.simpler import AS_FAST
from snugfit.techniques import roster
from snugfit.techniques.recipe import AUTO_SLOTS
from snugfit.units import GIB

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Slot, Technique

MOST_ON_HOST = 8 * GIB
"""Largest bytes of activations that are kept in the host's page-locked memory unless the user requests more
(chosen). A machine that trains on one GPU has that much free."""


ROUNDS = 4
"""Largest number of mixtures (recomputed and offloaded layers) that are simulated for one recipe."""


class RecomputingLine(NamedTuple):
    """Linear interpolation of bytes and seconds between a recipe that keeps all activations and one that
    recomputes every layer.
    """

    needed_bytes: int
    seconds: float
    least_bytes: int
    most_seconds: float


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Settings that free the activations of some layers by recomputation and of others by copies to the
    host."""

    job: Job
    recomputing: Sequence[Technique]
    """Techniques that recompute the first layer, the first two, and so on up to all but one."""
    on_host: Sequence[Technique]
    """Techniques that keep the activations of one layer, of two, and so on up to all but one, on the host."""
    link: float
    """Bandwidth between GPU and host in bytes per second, in each direction."""

    @property
    def layers(self) -> int:
        """Number of the model's layers."""
        return len(self.on_host) + 1

    def recipe(self, base: Recipe, gone: int, sent: int) -> Recipe:
        """Return `base` with techniques that free the activations of `gone` layers: `sent` of them are
        offloaded, the rest are recomputed.
        """
        base = self.with_recomputing(base, gone - sent) if gone > sent else base
        return base.with_(self.on_host[gone - 1])

    def with_recomputing(self, base: Recipe, layers: int) -> Recipe:
        """Return the recipe with this number of layers recomputed."""
        return base.with_(self.recomputing[layers - 1])

    def free_copies(self, line: RecomputingLine, gone: int) -> int:
        """Return how many of `gone` layers can be offloaded while other layers are computed, without waiting
        for the copies.

        The forward pass of a layer takes as long as recomputing it. The copies begin after the first
        offloaded layer. The last copy must be finished after the last layer but one: `sent * copy` is at most
        `(layers - 2 - (gone - sent)) * layer`, in seconds. The backward pass has twice that time.
        """
        layer = (line.most_seconds - line.seconds) / self.layers
        nbytes = (line.needed_bytes - line.least_bytes) / self.layers
        copy = nbytes / self.link
        most = min(gone, int(MOST_ON_HOST / max(1.0, nbytes)))
        if copy > layer:
            most = min(most, int((self.layers - 2 - gone) * layer / (copy - layer)))
        return max(0, most)

    def seconds(self, line: RecomputingLine, gone: int, sent: int) -> float:
        """Return the estimated seconds of a step that frees the activations of `gone` layers, `sent` of them
        by offloading.
        """
        return line.seconds + (gone - sent) * (line.most_seconds - line.seconds) / self.layers


class MixtureTrial(NamedTuple):
    """A simulated recipe with some layers recomputed and some offloaded: its missing bytes and its
    seconds.
    """

    recipe: Recipe
    lacking: int
    """Needed bytes minus the memory limit in bytes; negative if the mixture fits."""
    seconds: float


def find_mixture(
    mixture: Mixture,
    line: RecomputingLine,
    base: Recipe,
    gone: int,
    most: float,
    look: Callable[[Recipe], MixtureTrial | None],
) -> Recipe | None:
    """Return a recipe that offloads as many layers' activations as take no additional time, and recomputes
    the other freed layers.

    Return None unless its step takes clearly less than `most` seconds. The search starts with `gone` freed
    layers, increases the number until the recipe fits, and then tries fewer. The function `look` simulates a
    recipe, and returns None if that fails.
    """
    best, fewest, sent = None, 0, mixture.free_copies(line, gone)
    a_layer = max(1.0, (line.needed_bytes - line.least_bytes) / mixture.layers)
    most *= 1 - AS_FAST
    for _ in range(ROUNDS):
        if sent < 1 or not fewest < gone < mixture.layers or mixture.seconds(line, gone, sent) >= most:
            break
        recipe = mixture.recipe(base, gone, sent)
        tried = look(recipe) if is_valid(recipe, mixture.job) else None
        if tried is None or (best and not (tried.lacking <= 0 and tried.seconds < most)):
            break
        if tried.lacking > 0:
            fewest = gone
            gone += max(1, int(tried.lacking / a_layer))
        elif tried.seconds < most:
            best, most = tried.recipe, tried.seconds
            gone -= 1
            sent = mixture.free_copies(line, gone)
        else:
            # The copies lengthen the step after all, so the activations of fewer layers are sent to the host.
            sent //= 2
    return best


def mixture_of(job: Job, link: float | None) -> Mixture | None:
    """Return the settings for recomputing and offloading each number of layers of this job; None if it has
    none.
    """
    recomputing, on_host = (grades_of(slot, job) for slot in AUTO_SLOTS)
    if not recomputing or not on_host:
        return None
    return Mixture(job=job, recomputing=recomputing, on_host=on_host, link=link) if link else None


def guess_between(low: int, high: int, low_bytes: float, high_bytes: float, limit: float) -> int:
    """Return the number of layers to recompute that should just fit `limit` bytes, on the line through two
    simulated numbers. With `low` the recipe is too large, and with `high` it fits. The result is strictly
    between both, or a search would not end.
    """
    share = (low_bytes - limit) / max(1, low_bytes - high_bytes)
    return min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)


def grades_of(slot: Slot, job: Job) -> Sequence[Technique]:
    """Return the settings of a slot's technique for 1, 2, ... layers, such as recomputing the first one.
    Empty if no technique has such settings. Techniques for compiled layers are not included.
    """
    kinds = (kind for kind in roster.techniques() if kind.slot is slot and not kind.lowered)
    of_slot = (kind.grades(job) for kind in kinds)
    return next(filter(None, of_slot), ())


def is_valid(recipe: Recipe, job: Job) -> bool:
    """Return True if the recipe's techniques support the job and each other."""
    return not any(True for technique in recipe for _ in technique.objections(job, recipe))

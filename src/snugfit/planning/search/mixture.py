"""Layers that are recomputed, and after them some whose activations wait on the host.

Both free what a layer keeps. Recomputing costs the layer's forward pass again; a copy costs nothing as long
as it is done beside what is computed anyway. So of the layers that have to go, as many wait on the host as
the link can carry in that time, and the others are recomputed: the first ones, since the backward pass comes
to them last (`checkpointing/first_layers.py`). Of a recomputed layer only the input waits there.
"""

from __future__ import annotations

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
"""Of activations in the host's page-locked memory, where nobody asked for that (chosen): what a machine that
trains on one GPU has beside all else."""


ROUNDS = 4
"""Mixtures that are looked at for one recipe."""


class RecomputingLine(NamedTuple):
    """From a step that keeps all activations to one that recomputes each layer."""

    needed_bytes: int
    seconds: float
    least_bytes: int
    most_seconds: float


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What may be done with the layers of a model."""

    job: Job
    recomputing: Sequence[Technique]
    """The first layer, the first two, and so on up to all but one."""
    on_host: Sequence[Technique]
    """The same layers, whose activations wait there."""
    link: float
    """Bytes a second to the host, and as many back."""

    @property
    def layers(self) -> int:
        """How many the model has."""
        return len(self.on_host) + 1

    def recipe(self, base: Recipe, gone: int, sent: int) -> Recipe:
        """With so many layers that have to go, of which so many are sent and the others recomputed."""
        base = self.with_recomputing(base, gone - sent) if gone > sent else base
        return base.with_(self.on_host[gone - 1])

    def with_recomputing(self, base: Recipe, layers: int) -> Recipe:
        """With so many layers recomputed."""
        return base.with_(self.recomputing[layers - 1])

    def free_copies(self, line: RecomputingLine, gone: int) -> int:
        """Of so many layers that have to go, how many can be sent while others are computed.

        A layer takes as long as recomputing it does. The copies begin when the first layer that is sent is
        done, and the last of them is awaited when the last layer but one is: `sent * copy` is at most
        `(layers - 2 - (gone - sent)) * layer`, in seconds. The backward pass has twice as long for them.
        """
        layer = (line.most_seconds - line.seconds) / self.layers
        nbytes = (line.needed_bytes - line.least_bytes) / self.layers
        copy = nbytes / self.link
        most = min(gone, int(MOST_ON_HOST / max(1.0, nbytes)))
        if copy > layer:
            most = min(most, int((self.layers - 2 - gone) * layer / (copy - layer)))
        return max(0, most)

    def seconds(self, line: RecomputingLine, gone: int, sent: int) -> float:
        """What such a step takes on the line."""
        return line.seconds + (gone - sent) * (line.most_seconds - line.seconds) / self.layers


class Tried(NamedTuple):
    """A recipe that was looked at."""

    recipe: Recipe
    lacking: int
    """Bytes that it needs beyond those that it may; below 0 where it fits."""
    seconds: float


def find_mixture(
    mixture: Mixture,
    line: RecomputingLine,
    base: Recipe,
    gone: int,
    most: float,
    look: Callable[[Recipe], Tried | None],
) -> Recipe | None:
    """The recipe with as many layers on the host as cost nothing and the others of those that have to go
    recomputed, where that takes less than `most` seconds by more than would be called as fast; None where
    none was found. From so many `gone` layers on it is looked for those that fit, and for fewer; `look` gives
    None for what cannot be."""
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
            sent //= 2
    return best


def mixture_of(job: Job, link: float | None) -> Mixture | None:
    """What may be done with the layers of this job's model; None where they are not known, or the link is
    not."""
    recomputing, on_host = (grades_of(slot, job) for slot in AUTO_SLOTS)
    if not recomputing or not on_host:
        return None
    return Mixture(job=job, recomputing=recomputing, on_host=on_host, link=link) if link else None


def grades_of(slot: Slot, job: Job) -> Sequence[Technique]:
    """Return the grades of the slot's technique that has some, else nothing."""
    of_slot = (kind.grades(job) for kind in roster.techniques() if kind.slot is slot)
    return next(filter(None, of_slot), ())


def is_valid(recipe: Recipe, job: Job) -> bool:
    """Whether nothing in a recipe objects to the job or to the rest of it."""
    return not any(True for technique in recipe for _ in technique.objections(job, recipe))

"""Comparison of two ways to distribute a model over GPUs, by memory and by speed.

Sharing the batch alone is always tried. Along the other axes of a mesh, groups of GPUs work on the same
samples. They share matrices, and with these the experts if there are some, or sequences, or they form stages.
The techniques propose the sizes of such groups, at most the GPUs of a host.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace

from snugfit.features.distributed.fields import PARALLEL, ParallelWish
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.several_gpus.candidates import Shared, Sharing, Spreading, of_slot
from snugfit.prediction.exchanges import GPUS_PER_HOST
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot, Technique
from snugfit.techniques.wish import processes_of

MOST_AXES = 2
"""Greatest number of axes of a mesh in addition to the batch's: no three of the existing ones combine."""


def sharings(job: Job, gpus: int, fixed: Kept, axes: int = 0) -> Iterator[tuple[Technique, ...]]:
    """Yield combinations of techniques, one for each slot of several GPUs, that divide the job's batch over
    `gpus`.

    They have `axes` axes in addition to the batch's, without fixed ones. If there are several hosts, groups
    over which copies of the weights are sharded are whole hosts.
    """
    along = axis_settings(job)
    free = [slot for slot, settings in along.items() if settings and slot not in fixed.slots]
    for chosen in itertools.combinations(free, axes):
        choices = [
            along[slot] if slot in chosen else _choices(job, slot, fixed, along, mesh=bool(axes))
            for slot in roster.slots_of_several_gpus()
        ]
        for sharing in itertools.product(*choices):
            if _shares_evenly(job, gpus, fixed, sharing):
                yield sharing


def axis_settings(job: Job) -> dict[Slot, list[Technique]]:
    """Return the techniques by slot that make groups of GPUs work on the same samples.

    A technique's planning objections are ignored, since they concern plans without its axis.
    """
    slots: dict[Slot, list[Technique]] = {}
    for kind in roster.techniques():
        if not kind.needs_several_gpus or kind.missing_package():
            continue
        for one in kind.settings(job):
            if (processes := processes_of(one.install(Setup()))) is not None and processes.axes:
                slots.setdefault(kind.slot, []).append(one)
    return slots


def _choices(
    job: Job, slot: Slot, fixed: Kept, along: dict[Slot, list[Technique]], *, mesh: bool
) -> Sequence[Technique]:
    # On an axis that was not chosen, each group is one GPU.
    if slot in along and slot not in fixed.slots:
        return [roster.plain(slot)]
    usual = list(of_slot(job, slot, fixed))
    is_mesh = mesh or any(one in fixed.slots for one in along)
    if slot in fixed.slots or not is_mesh:
        return usual
    return [*usual, *(one for one in stopgaps(usual) if one not in usual)]


def stopgaps(usual: Sequence[Technique]) -> list[Technique]:
    """Return the same techniques with default settings, for meshes that refuse the settings which plans
    choose."""
    kinds = dict.fromkeys(map(type, usual))
    return [kind() for kind in kinds if all(one.default is not MISSING for one in fields(kind))]


def _shares_evenly(job: Job, gpus: int, fixed: Kept, sharing: Sequence[Technique]) -> bool:
    """Return True if `gpus` GPUs form whole groups that divide the batch evenly.

    If experts are spread, all GPUs of a group must share them.
    """
    setup = Setup()
    for technique in sharing:
        setup = technique.install(setup)
    processes = processes_of(setup)
    if processes is None:
        return gpus == 1
    # A user's own groups need not fill hosts.
    whole_hosts = None if Slot.SHARDING in fixed.slots else GPUS_PER_HOST
    return gpus > 1 and processes.shares_evenly(gpus, job.batch_size, whole_hosts)


KEPT = "none"
"""Value of `ParallelWish.reshard` under which gathered weights are kept until the backward pass."""

AXES = ("tensor", "context", "stages")
"""Fields of `ParallelWish` that count the GPUs working on the same samples."""


class MeshSpreading(Spreading):
    """Ways to distribute a job over several GPUs, by this feature's techniques."""

    most_axes = MOST_AXES

    def sharings(self, job: Job, gpus: int, fixed: Kept, axes: int) -> Iterator[Sharing]:
        """Yield combinations of techniques that distribute the job, one technique for each slot of several
        GPUs."""
        usual = list(of_slot(job, Slot.SHARDING, fixed))
        # Meshes may refuse the settings that plans choose, and take the plain kinds instead.
        rest = [one for one in stopgaps(usual) if one not in usual]
        for techniques in sharings(job, gpus, fixed, axes):
            kinds = tuple(type(one) if one.slot is Slot.SHARDING else one for one in techniques)
            yield Sharing(techniques, kinds, is_stopgap=any(one in rest for one in techniques))

    def way(self, gpus: int, recipe: Recipe) -> Shared:
        """Return the way in which a recipe divides the work among this many GPUs."""
        return SharedByMesh(gpus, recipe)


@dataclass(frozen=True)
class SharedByMesh(Shared):
    """A way to divide the work among GPUs that form a mesh, or one GPU alone."""

    @functools.cached_property
    def wish(self) -> ParallelWish | None:
        """Value of the field `parallel`, regardless of the number of processes; None on one GPU."""
        wish = PARALLEL.of(self.setup)
        # The number of GPUs is compared apart.
        return wish and replace(wish, ranks=0)

    @property
    def _axes(self) -> ParallelWish:
        return self.wish or ParallelWish()

    @property
    def parts(self) -> int:  # type: ignore[override]
        """Number of GPUs that work on the same part of the batch."""
        return self._axes.ranks_of_one_part

    @property
    def stages(self) -> int:  # type: ignore[override]
        """Number of stages into which the layers are cut."""
        return self._axes.stages

    @functools.cached_property
    def mesh(self) -> str:  # type: ignore[override]
        """Text of the techniques that make groups of GPUs work on the same samples; empty without groups."""
        slots = [slot for slot in roster.slots_of_several_gpus() if slot is not Slot.SHARDING]
        return " + ".join(str(self.recipe[slot]) for slot in slots if not self.recipe[slot].plain)

    @property
    def spreads_over_all(self) -> bool:  # type: ignore[override]
        """True if each GPU needs less memory when there are more of them."""
        wish = self.wish
        if wish is None:
            return False
        return wish.states == "sharded" or (wish.weights == "sharded" and not wish.shards)

    def gathers_what_is_kept(self, other: Shared) -> bool:
        """Return True if the other way equals this one, except that it keeps weights which this one gathers
        again."""
        own, rival = self.wish, _wish_of(other)
        if own is None or rival is None:
            return False
        return replace(own, reshard=rival.reshard) == rival and rival.reshard == KEPT

    def spreads_no_less_than(self, other: Shared) -> bool:
        """Return True if a GPU holds no more weights, states and samples than in the other way."""
        return _spreads_no_less(self.wish, _wish_of(other))

    def cuts_as(self, other: Shared) -> bool:
        """Return True if each group of GPUs consists of one or several of the other way's groups."""
        return _cuts_as(self._axes, _wish_of(other) or ParallelWish())

    def is_wider_than(self, other: Shared) -> bool:
        """Return True if larger groups of GPUs work on the same samples, and all else is equal."""
        own, rival = self.wish, _wish_of(other)
        if own is None or rival is None or own.weights != rival.weights or self.parts <= other.parts:
            return False
        if not _cuts_as(own, rival):
            return False
        alike = replace(
            _in_groups_of(own, rival),
            schedule=rival.schedule,
            shards=rival.shards,
            bucket_views=rival.bucket_views,
        )
        return alike == rival and bool(own.shards) is bool(rival.shards) and self.differs_only_in(other)

    def shares_sequences_with(self, other: Shared, times: float) -> bool:
        """Return True if `times` as many GPUs share each sequence as in the other way."""
        return times == self._axes.context / (_wish_of(other) or ParallelWish()).context

    def groups(self) -> Iterator[str]:
        """Yield a sentence for each kind of group: the work that its GPUs share."""
        wish = self._axes
        if wish.tensor > 1:
            experts = f", each GPU with 1/{wish.experts} of its experts" if wish.experts > 1 else ""
            yield f"groups of {wish.tensor} GPUs compute each layer together{experts}"
        if wish.context > 1:
            yield f"groups of {wish.context} GPUs take each sequence together"
        if wish.stages > 1:
            yield f"the layers are put in {wish.stages} stages, one after the other"


def _wish_of(shared: Shared) -> ParallelWish | None:
    return shared.wish if isinstance(shared, SharedByMesh) else None


def _cuts_as(own: ParallelWish, rival: ParallelWish) -> bool:
    """Return True if each group of GPUs consists of one or several of the rival's groups, with the same cuts.

    If both share matrices, experts must be spread in both or in neither.
    """
    if own.tensor > 1 < rival.tensor and (own.experts > 1) is not (rival.experts > 1):
        return False
    return not any(getattr(own, axis) % getattr(rival, axis) for axis in AXES)


def _in_groups_of(own: ParallelWish, rival: ParallelWish) -> ParallelWish:
    """Return `own` with groups as large as those of `rival`."""
    return replace(own, experts=rival.experts, **{axis: getattr(rival, axis) for axis in AXES})


def _spreads_no_less(own: ParallelWish | None, rival: ParallelWish | None) -> bool:
    """Return True if a GPU holds no more weights, states and samples than in the rival's way."""
    if own is None or rival is None or own == rival:
        return own == rival
    if not _cuts_as(own, rival):
        return False
    if own.stages > rival.stages == 1 and own.weights == "sharded":
        return False  # a stage keeps all gathered weights while its micro-batches run
    own = replace(_in_groups_of(own, rival), schedule=rival.schedule)
    if own == rival:
        return True
    # Only weights sharded over all GPUs are known to take no more than in any other way.
    if own.weights != "sharded" or own.shards or own.reshard == KEPT or own.on_host < rival.on_host:
        return False
    alike = replace(
        rival,
        weights=own.weights,
        states=own.states,
        shards=own.shards,
        reshard=own.reshard,
        on_host=own.on_host,
        dtype=own.dtype,
        bucket_views=own.bucket_views,
    )
    return alike == own

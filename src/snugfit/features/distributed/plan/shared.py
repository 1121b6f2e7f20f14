"""A parallelism layout of a step over GPUs, and comparisons of two layouts by memory and speed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from snugfit.features.distributed.fields import PARALLEL, ParallelWish
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish, Setup
from snugfit.techniques.several_gpus import on_gpus
from snugfit.techniques.technique import Slot, Technique
from snugfit.techniques.wish import used_wishes

KEPT = "none"
"""Value of `ParallelWish.reshard` that keeps all gathered weights after the forward pass."""

AXES = ("tensor", "context", "stages")
"""Fields of `ParallelWish` with numbers of GPUs that work on the same samples."""


@dataclass(frozen=True)
class Shared:
    """A parallelism layout: a recipe's parallelism and recomputation on a number of GPUs, before the batch is
    split. The GPUs form a device mesh; a single GPU has none.
    """

    gpus: int
    recipe: Recipe

    @functools.cached_property
    def key(self) -> str:
        """Text of the recipe, the same on any number of GPUs."""
        return str(self.recipe)

    @functools.cached_property
    def setup(self) -> Setup:
        """Training settings of the recipe on this number of GPUs."""
        return on_gpus(self.recipe.setup(), self.gpus)

    @functools.cached_property
    def wish(self) -> ParallelWish | None:
        """Settings for several processes (field `parallel`), regardless of their number; None on one GPU."""
        wish = PARALLEL.of(self.setup)
        # Numbers of GPUs are compared separately.
        return wish and replace(wish, ranks=0)

    @property
    def _axes(self) -> ParallelWish:
        return self.wish or ParallelWish()

    @property
    def parts(self) -> int:
        """Number of GPUs that work on the same part of the batch, such as those of a tensor-parallel
        group.
        """
        return self._axes.ranks_of_one_part

    @property
    def stages(self) -> int:
        """Number of pipeline stages into which the layers are divided; 1 without them."""
        return self._axes.stages

    @functools.cached_property
    def mesh(self) -> str:
        """Text of the techniques that make groups of GPUs work on the same samples; empty without groups."""
        slots = [slot for slot in roster.slots_of_several_gpus() if slot is not Slot.SHARDING]
        return " + ".join(str(self.recipe[slot]) for slot in slots if not self.recipe[slot].plain)

    @property
    def spreads_over_all(self) -> bool:
        """True if each GPU needs fewer bytes when there are more GPUs, because weights or optimizer states
        are sharded over all.
        """
        wish = self.wish
        if wish is None:
            return False
        return wish.states == "sharded" or (wish.weights == "sharded" and not wish.shards)

    @functools.cached_property
    def of_each(self) -> str:
        """Recipe as text without its data-parallel technique. Layouts with equal texts do the same work per
        GPU and sample.
        """
        return str(self.recipe.with_(roster.plain(Slot.SHARDING)))

    @functools.cached_property
    def by_itself(self) -> str:
        """Recipe as text without any parallelism: the work of a GPU that has its samples to itself."""
        recipe = self.recipe
        for slot in roster.slots_of_several_gpus():
            recipe = recipe.with_(roster.plain(slot))
        return str(recipe)

    @property
    def recomputing(self) -> Technique:
        """The technique that selects the recomputed layers."""
        return self.recipe[Slot.CHECKPOINTING]

    def is_slower_than(self, other: Shared) -> bool:
        """Return True if no step of this layout is faster than the other's, which takes more memory. Both
        have the same parallelism, and this one recomputes more, or gathers weights that the other keeps.
        """
        if all(self.recipe[slot] == other.recipe[slot] for slot in roster.slots_of_several_gpus()):
            return True
        own, rival = self.wish, other.wish
        if own is None or rival is None or self.recomputing != other.recomputing:
            return False
        return replace(own, reshard=rival.reshard) == rival and rival.reshard == KEPT

    def holds_no_more_than(self, other: Shared) -> bool:
        """Return True if this layout takes no more memory than the other for every equal split of the batch.

        The layouts may differ in three properties only. This one recomputes activations that the other keeps.
        It shards weights that the other holds whole, at least temporarily. Or more of its GPUs work on the
        same samples.
        """
        return (
            _keeps_no_more(self.setup.checkpoint, other.setup.checkpoint)
            and _spreads_no_less(self.wish, other.wish)
            and self.differs_only_in(other, Slot.CHECKPOINTING)
            and not self._gathers_frozen(other)
        )

    def _gathers_frozen(self, other: Shared) -> bool:
        """Return True if this layout gathers frozen weights that the other has whole on each GPU. They have
        no optimizer states, so gathered layers may take more memory than sharding saves.
        """
        is_same = self.wish is None or other.wish is None or self.wish.weights == other.wish.weights
        return not is_same and any(one.freezes for one in used_wishes(self.setup))

    def has_groups_of(self, other: Shared) -> bool:
        """Return True if this layout's groups of GPUs are as large as the other's, or a multiple of them.
        Apart from that, only the data-parallel technique may differ.
        """
        return self.by_itself == other.by_itself and _cuts_as(self._axes, other._axes)

    def differs_only_in(self, other: Shared, *more: Slot) -> bool:
        """Return True if two layouts differ only in parallelism techniques, and only in the given slots
        (kinds of technique such as `sharding`).
        """
        slots = {*roster.slots_of_several_gpus(), *more}
        return all(self.recipe[slot] == other.recipe[slot] for slot in Slot if slot not in slots)

    def cut(self, pieces: Technique) -> Recipe:
        """Return the recipe with this technique for micro-batches, which splits the global batch."""
        return self.recipe.with_(pieces)

    def is_wider_than(self, other: Shared) -> bool:
        """Return True if larger groups of GPUs work on the same samples, with otherwise equal parallelism."""
        own, rival = self.wish, other.wish
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
        """Return True if `times` as many GPUs share each sequence (context parallelism) as in the other
        layout.
        """
        return times == self._axes.context / other._axes.context

    def groups(self) -> Iterator[str]:
        """Yield sentences on the groups of GPUs: the part of each layer, sequence or model that a GPU has."""
        wish = self._axes
        if wish.tensor > 1:
            experts = f", each GPU with 1/{wish.experts} of its experts" if wish.experts > 1 else ""
            yield f"groups of {wish.tensor} GPUs compute each layer together{experts}"
        if wish.context > 1:
            yield f"groups of {wish.context} GPUs split each sequence"
        if wish.stages > 1:
            yield f"the layers are divided into {wish.stages} stages, one after the other"


def _keeps_no_more(own: CheckpointWish | None, rival: CheckpointWish | None) -> bool:
    """Return True if this layout recomputes no less than the other: for example whole layers where the other
    recomputes parts of them.
    """
    if own is None or rival is None:
        return rival is None
    return own == rival or (not own.keep and own == replace(rival, keep=own.keep))


def _cuts_as(own: ParallelWish, rival: ParallelWish) -> bool:
    """Return True if each group of GPUs consists of whole groups of the other layout, with the same kinds of
    parallelism. If both shard matrices, experts must be distributed in both or in neither.
    """
    if own.tensor > 1 < rival.tensor and (own.experts > 1) is not (rival.experts > 1):
        return False
    return not any(getattr(own, axis) % getattr(rival, axis) for axis in AXES)


def _in_groups_of(own: ParallelWish, rival: ParallelWish) -> ParallelWish:
    """Return the same parallelism settings with groups as large as those of the other layout."""
    return replace(own, experts=rival.experts, **{axis: getattr(rival, axis) for axis in AXES})


def _spreads_no_less(own: ParallelWish | None, rival: ParallelWish | None) -> bool:
    """Return True if a GPU has no more weights, optimizer states and samples than in the other layout."""
    if own is None or rival is None or own == rival:
        return own == rival
    if not _cuts_as(own, rival):
        return False
    if own.stages > rival.stages == 1 and own.weights == "sharded":
        return False  # a stage keeps all gathered weights while its micro-batches run
    own = replace(_in_groups_of(own, rival), schedule=rival.schedule)
    if own == rival:
        return True
    # Only weights that are sharded over all GPUs need no more memory than in any other layout.
    if own.weights != "sharded" or own.shards or own.reshard == KEPT or own.on_host < rival.on_host:
        return False
    return own.chunks == rival.chunks

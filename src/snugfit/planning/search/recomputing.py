"""Postpone recipes that save memory and no time, such as recomputation: most searches need not simulate them.

Recomputing adds kernels to a step and removes none. It does not change the memory of an update: weights,
gradients, states. The recipe without recomputing therefore gives lower bounds: its seconds, and the bytes of
its update. If a simulated recipe is as fast and as small as these bounds, no recomputing variant needs a
simulation. With adapters in the search, this excludes all full fine-tuning. A *kind* is a group of recipes
with the same forward and backward passes. The kinds that may be fastest are simulated first, before any
slower recipe. They make most other kinds unnecessary.

One of two kinds that differ in attention, kernels or precision is skipped if it has no fewer bytes and
seconds (`twins.py`). Recomputing a part of each layer takes no less memory than recomputing each layer. Spans
of layers recompute as much as each layer by itself (`least_of_spans`). Recomputing each layer is therefore
simulated first, and may show that the rest are too large or too slow.

Recipes with logits in chunks are postponed too. Chunks do not change the memory while a layer runs. If the
peak with whole logits is in a layer or in the update, chunks save nothing and need no simulation.

Layers are compiled separately for each micro-batch size, so recipes with compiled layers are postponed too
(`cost/lowered.py`). They are compiled one size at a time, after all possibly faster recipes were simulated.
The uncompiled recipe is simulated before. It takes a tenth of the time and may show that compilation is
unnecessary. Only micro-batch sizes that may be among the results are simulated.

These bounds are not exact. Keys and values of a cache that only checkpointing disables cost a little, hence
`CACHE_SHARE`. The moment of the peak changes, hence `PEAK_SHARE`. Chunks save passes over the logits of a
frozen head. Each simulated kind is therefore compared with its bounds. If one takes less than its bound, the
bounds of similar recipes are lowered by the same share.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from snugfit.planning.cost.figures import Bound
from snugfit.planning.cost.lowered import CACHE_SHARE, lowered_kinds
from snugfit.planning.search.other_sizes import OtherSizes
from snugfit.planning.search.screening import Screening, screen
from snugfit.planning.search.state import MEMORY_RESOLUTION
from snugfit.planning.search.twins import PEAK_SHARE, ROUNDING, SimilarRecipes, is_below
from snugfit.planning.step_key import launches_otherwise
from snugfit.techniques import roster
from snugfit.techniques.registry import hooks
from snugfit.techniques.setup import EVERY_LAYER, CheckpointWish, Setup
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.search.progress import Tell
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool

SAVING = (Slot.HEAD, Slot.CHECKPOINTING)
"""Slots (choices of a recipe) whose techniques save memory in forward and backward but no time."""

NOTHING = Bound(0, 0.0)

DEVICE_SHARE = 0.03
"""Largest share by which the GPU's seconds may fall if groups of layers (spans) are recomputed instead of
each layer.

A span omits some kernels at its end. It was 1.4 % for GPT-2 and Whisper. It was 2.6 % with a batch so small
that the GPU waits for launches.
"""

LAYERS_SHARE = 0.03
"""Largest share by which bytes other than layers' activations may fall if spans are recomputed. It was 1.4 %
for GPT-2.

The plans of GPT-2, ViT, BERT, T5, Llama, Qwen2.5 and Gemma 3 determined both `DEVICE_SHARE` and this share,
with adapters and without.
"""


def least_of_spans(full: Bound) -> Bound:
    """Return lower bounds of bytes and seconds of recomputing groups of layers (spans), from those of
    recomputing each layer alone.

    Bytes other than the layers' activations are needed with spans too.
    """
    return Bound(int(full.unkept_bytes * (1 - LAYERS_SHARE)), full.device_seconds * (1 - DEVICE_SHARE))


class _Savings(NamedTuple):
    """Ways in which a recipe saves memory. They determine how its estimates follow from other recipes."""

    chunks_logits: bool
    recomputes: bool
    is_compiled: bool


class _Shares(NamedTuple):
    """Factors by which the estimates of a recipe's bytes and seconds are multiplied."""

    bytes: float
    seconds: float

    def of(self, bound: Bound) -> Bound:
        """Return a bound with its bytes and seconds multiplied by these factors."""
        return Bound(int(bound.needed_bytes * self.bytes), bound.seconds * self.seconds)

    def lowered_to(self, taken: Bound, least: Bound) -> _Shares:
        """Return smaller factors, with which the estimate `least` does not exceed the bound `taken`."""
        return _Shares(
            min(self.bytes, taken.needed_bytes / max(1, least.needed_bytes)),
            min(self.seconds, taken.seconds / (least.seconds or taken.seconds or 1.0)),
        )


class RecomputingKinds:
    """The postponed recipes of a search: those with recomputation, logits in chunks or compiled layers.
    Recipes with the same forward and backward passes form a group (a kind).
    """

    def __init__(self, state: SearchState, pool: WorkerPool, tell: Tell) -> None:
        self.state, self.space, self.pool, self.tell = state, state.space, pool, tell
        self.waiting: dict[int, list[int]] = defaultdict(list)
        """Numbers of postponed recipes by kind (group with the same forward and backward passes)."""
        offered = self.space.offers(Slot.CHECKPOINTING)
        # None if the space does not offer this setting, for example because another technique is fixed.
        self._each_layer = next((o for o in offered if o.value == EVERY_LAYER), None)
        plain = [roster.plain(slot) for slot in SAVING]
        self._without: dict[int, int | None] = {}
        self._whole: dict[int, int | None] = {}
        """Number of the same recipe with all logits computed together, for each recipe that computes them in
        chunks.
        """
        self._full: dict[int, int] = {}
        """Number of the recipe that recomputes each layer, for each recipe that recomputes some layers,
        groups or parts of them."""
        self._looked_at = set[int]()
        """Groups of recipes (with equal forward and backward passes) whose lower bounds were computed."""
        self._least_known: dict[int, Bound] = {}
        """Cached estimates (lower bounds) of postponed recipes, given the current results."""
        self._bounded_by: dict[int, set[int | None]] = {}
        """Cached numbers of the recipes from which the estimate of each postponed recipe is derived."""
        self._by = defaultdict[int | None, set[int]](set)
        """Numbers of the postponed recipes whose cached estimates are derived from a recipe, by that recipe's
        number.
        """
        self._dominated = set[int]()
        """Numbers of recipes that can no longer be on the Pareto front of bytes and seconds."""
        self._known = 0
        """Number of recipes that had lower bounds when recipes were last added."""
        self._none: dict[int, int | None] = {}
        """Cached number of the same recipe without recomputation, by recipe number; None if there is none."""
        self._on_the_way: dict[int, Bound] = {}
        """Previous estimates of the recipes whose lower bounds a worker process is computing, by number."""
        self._taken = defaultdict[_Savings, _Shares](lambda: _Shares(1.0, 1.0))
        """Factors that lower further estimates, by the recipe's ways to save memory. They are 1 while no
        estimate exceeded the computed lower bound.
        """
        for number, candidate in enumerate(self.space.candidates):
            setup = candidate.setup
            if setup.saves_memory:
                self.waiting[candidate.passes].append(number)
                self._without[number] = self.space.variant(number, *plain)
            if candidate.setup.logits is not None:
                self._whole[number] = self.space.variant(number, plain[0])
            if (full := self._with_each(number)) is not None:
                self._full[number] = full
        self._lowered = lowered_kinds()(self.space, state, self._without)
        for number in self._lowered.waiting:
            self.waiting[self.space.candidates[number].passes].append(number)
            # No recipe without savings corresponds to these; `_least_of_lowered` returns their lower bounds.
            self._without[number] = None
        self._sizes = OtherSizes(self.space, state.bounds)
        self._twins = SimilarRecipes(
            self.space, self._base_of, state.bounds.get, self._may_be_rehearsed, self._is_refused
        )
        state.screen_these = self.screen_these

    def screen(
        self,
        is_needed: Callable[[int, Bound], bool],
        *,
        twins: bool = True,
        among: Collection[int] | None = None,
    ) -> list[int]:
        """Compute lower bounds for the postponed recipes that `is_needed` selects, and return those recipes.
        Without `twins`, groups that are no better than a similar one (a twin) are skipped. If `among` is
        given, only these recipes are considered.
        """

        def may_be_needed(number: int) -> bool:
            return (among is None or number in among) and is_needed(number, self._least(number))

        needed = {
            kind: numbers
            for kind in self.waiting
            if (numbers := self._needed_of(kind, may_be_needed, twins=twins))
        }
        # Whole logits give lower bounds for chunked logits within layers, so they come first.
        kinds = [kind for kind in needed if needed[kind][0] not in self._whole] or list(needed)
        # Compilation takes the longest. Compiled layers without savings give lower bounds for those with
        # savings.
        kinds = [kind for kind in kinds if not self.is_lowered_saving(needed[kind][0])] or kinds
        # The fastest group comes first, since its exact values exclude most of the slower ones.
        kinds.sort(key=lambda kind: self.least_seconds_of(needed[kind]))
        chosen = [number for kind in kinds for number in needed[kind]]
        firsts = (self._firsts_of(needed[kind]) for kind in kinds)
        to_screen = self._take(chosen if twins else itertools.chain.from_iterable(firsts))
        if not twins:  # needed in spite of the results for recomputing each layer
            left = (n for n in chosen if n not in to_screen and n not in self._lowered)
            to_screen |= self._take(n for n in left if is_needed(n, self._least(n)))
        if to_screen:
            self._twins.drop_if_misleading()
        further = self.screen(is_needed, twins=twins, among=among) if self._lower_estimates(to_screen) else ()
        return [*to_screen, *further]

    def is_lowered_saving(self, number: int) -> bool:
        """Return True if this recipe has compiled layers and a memory-saving technique such as
        recomputation."""
        return number in self._lowered and self.space.candidates[number].setup.saves_memory

    def _firsts_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the recipes whose lower bounds must be computed before those of `numbers`. All `numbers`
        have the same passes.

        Compiling layers for a micro-batch size takes long, so recipes of only one size are returned. Without
        memory savings, it is the fastest size that probably fits, which bounds the seconds of smaller ones.
        Otherwise it is the smallest, which bounds the bytes of larger ones.
        """
        firsts = [*map(self._first_of, numbers)]
        if uncompiled := [number for number in firsts if number not in self._lowered]:
            return uncompiled
        pieces = {number: self._sizes.pieces(number) for number in firsts}
        saves = self.space.candidates[firsts[0]].setup.saves_memory
        fitting = [] if saves else [number for number in firsts if self._probably_fits(number)]
        size = pieces[min(fitting, key=self._least_seconds)] if fitting else max(pieces.values())
        return [number for number in firsts if pieces[number] == size]

    def _probably_fits(self, number: int) -> bool:
        """Return True if this compiled recipe probably fits: by the mean of its lower bound and the bytes
        without compilation.
        """
        uncompiled = self._bound_of(self._lowered.same_uncompiled(number))
        least = self._least(number).needed_bytes
        most = least if uncompiled is None else uncompiled.needed_bytes
        return self.state.fits((least + most) // 2)

    def _lower_estimates(self, bounds: Mapping[int, Bound]) -> bool:
        """Lower the estimates of similar recipes if the new lower bound of a recipe is less than its earlier
        estimate in `bounds`. Return True if one was.
        """
        is_lower = False
        for number, least in bounds.items():
            savings = self._savings(number)
            taken = _with_device(self.state.bounds.get(number, least))
            if is_below(taken, self._taken[savings].of(least), ROUNDING):
                self._taken[savings] = self._taken[savings].lowered_to(taken, least)
                is_lower = True
        if is_lower:
            self._least_known.clear()
            self._dominated.clear()
        return is_lower

    def _savings(self, number: int) -> _Savings:
        setup = self.space.candidates[number].setup
        return _Savings(number in self._whole, setup.recomputes, number in self._lowered)

    def _needed_of(self, kind: int, may_be_needed: Callable[[int], bool], *, twins: bool) -> list[int]:
        """Return the recipes of a postponed group whose lower bounds the search still needs."""
        needed = [
            number
            for number in self.waiting[kind]
            if may_be_needed(number) and (twins or not self._saves_nothing(number))
        ]
        return needed if twins or not needed or not self._twins.of(kind, needed) else []

    def _take(self, chosen: Iterable[int]) -> dict[int, Bound]:
        """Compute lower bounds for these postponed recipes, and for all with the same forward and backward
        passes. Return their earlier estimates by number.
        """
        if taken := self._take_out(chosen):
            self.add(taken)
        return taken

    def _take_out(self, chosen: Iterable[int]) -> dict[int, Bound]:
        """Remove these recipes from the postponed ones, with all that have the same forward and backward
        passes and micro-batch size. Return their estimates without the correction by `_taken`.
        """
        candidates = self.space.candidates
        sizes = {candidates[number].sized: candidates[number].passes for number in chosen}
        taken: dict[int, Bound] = {}
        for kind in dict.fromkeys(sizes.values()):
            numbers = self.waiting.pop(kind, [])
            # The previous lower bounds are returned for the comparison with the results (`_lower_estimates`).
            taken |= {n: self._least_of(n) for n in numbers if candidates[n].sized in sizes}
            if left := [number for number in numbers if number not in taken]:
                self.waiting[kind] = left
        return taken

    def _first_of(self, number: int) -> int:
        """Return the recipe whose lower bound must be computed before that of this one. A recipe that
        recomputes some layers needs the one that recomputes each. A compiled one needs a compiled recipe with
        each or none of the layers recomputed, and the uncompiled one.
        """
        bases = [self._full.get(number)]
        if number in self._lowered:
            lowered = [*bases, self._without_checkpoints(number)]
            lowered = [
                candidate for candidate in lowered if candidate is not None and self.state.is_begun(candidate)
            ]
            bases = [*lowered, self._lowered.same_uncompiled(number), *bases]
        for before in bases:
            if before not in (None, number) and self._waits(before):
                return self._first_of(before)
        return number

    def _waits(self, number: int) -> bool:
        return number in self.waiting.get(self.space.candidates[number].passes, ())

    def add(self, numbers: Collection[int]) -> None:
        """Compute the lower bounds of these recipes by simulations of few layers."""
        self._note(numbers, screen(self.state, self.pool, self.tell, numbers))

    def _note(self, numbers: Collection[int], screening: Screening) -> set[int]:
        """Store a worker's lower bounds of these recipes. Return the postponed recipes whose estimates depend
        on them."""
        if len(self.state.bounds) != self._known:  # some recipes could not be simulated after all
            self._least_known.clear()
        kinds = {self.space.candidates[number].passes for number in numbers} - self._looked_at
        self._looked_at |= kinds
        self.state.bounds |= screening.bounds
        self.state.excluded += screening.excluded
        self.state.kinds += len(kinds)
        self._known = len(self.state.bounds)
        return self._forget_by(screening.bounds)

    def _forget_by(self, learned: Iterable[int]) -> set[int]:
        """Remove all cached estimates that depend on these recipes' results. Return the recipes that had such
        estimates.
        """
        waiting = [*learned]
        forgotten = set[int]()
        while waiting:
            depend = self._by.pop(waiting.pop(), set())
            for number in depend:
                self._least_known.pop(number, None)
            waiting += depend
            forgotten |= depend
        return forgotten

    @property
    def others(self) -> list[int]:
        """The recipes that save no memory and have no lower bounds yet."""
        done = self.waiting.keys() | self._looked_at
        return [n for n, candidate in enumerate(self.space.candidates) if candidate.passes not in done]

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Exclude the groups of these recipes from the search. Their lower bounds are not computed."""
        self._looked_at.update(self.space.candidates[number].passes for number in numbers)

    def add_others(self) -> None:
        """Compute the lower bounds of all recipes that recompute nothing."""
        self.add(self.others)

    # ---- one kind at a time ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a further search of the same recipes. Clear the cached exclusions from its Pareto front."""
        self._dominated.clear()

    def needed_of(self, kind: int) -> list[int]:
        """Return the recipes of a postponed group that may be on the Pareto front, given the results so
        far."""
        if kind not in self.waiting:
            return []
        return self._needed_of(kind, self._may_be_on_front, twins=False)

    def _may_be_on_front(self, number: int) -> bool:
        # Further results never make a dominated candidate useful again, so the result is cached until
        # `start`.
        if number not in self._dominated and self.state.is_dominated(number, self._least(number)):
            self._dominated.add(number)
        return number not in self._dominated

    def least_seconds_of(self, numbers: Iterable[int]) -> float:
        """Return the least estimated seconds of these postponed recipes."""
        return min(map(self._least_seconds, numbers))

    def rank(self, kind: int) -> int:
        """Return a sort key for the order in which the lower bounds of groups are computed. Groups whose
        results bound others come first: those with whole logits, or without memory savings.
        """
        first = self.waiting[kind][0]
        return 2 * (first in self._whole) + self.is_lowered_saving(first)

    def next_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the recipes of one group whose lower bounds one simulation computes next. Return nothing if
        pending results will change their estimates.
        """
        firsts = self._firsts_of(numbers)
        candidates, first = self.space.candidates, min(firsts, key=self._least_seconds)
        kind, program = candidates[first].passes, candidates[first].program
        # Programs are compiled separately for each batch size, so compiled layers are simulated for one only.
        compiled = candidates[first].setup.lowering is not None
        similar = [
            number
            for number in firsts
            if candidates[number].passes == kind and (not compiled or candidates[number].program == program)
        ]
        on_the_way = {candidates[number].passes for number in self._on_the_way}
        awaited = on_the_way and {candidates[base].passes for n in similar for base in self._bases(n)}
        return [] if on_the_way.intersection(awaited) else similar

    def _bases(self, number: int) -> Iterator[int]:
        """Yield the recipes whose results give the estimates for this one, including itself for its other
        micro-batch sizes.
        """
        plainer = self._without.get(number), self._whole.get(number), self._without_checkpoints(number)
        for base in (number, self._lowered.same_uncompiled(number), *plainer, self._full.get(number)):
            if base is not None:
                yield base

    def send(self, numbers: Sequence[int]) -> list[int]:
        """Remove these recipes, and all that share their simulation, from the postponed ones, and return
        them. The caller lets a worker simulate them; `store` stores the result.
        """
        taken = self._take_out(numbers)
        self._on_the_way |= taken
        return [*taken]

    def learn(self, numbers: Sequence[int], screening: Screening) -> set[int]:
        """Store a worker's lower bounds for the recipes that `send` returned. Return the groups whose
        estimates change.
        """
        known = {number: self._on_the_way.pop(number) for number in numbers if number in self._on_the_way}
        learned = self._note(numbers, screening)
        twins = self._twins.stand
        self._twins.drop_if_misleading()
        # If twins no longer count or lower bounds fell, every postponed group may be needed.
        if self._lower_estimates(known) or twins != self._twins.stand:
            return {*self.waiting}
        return {self.space.candidates[number].passes for number in learned}

    def kinds_by(self, numbers: Iterable[int]) -> set[int]:
        """Return the groups (recipes with the same forward and backward passes) whose estimates depend on
        these recipes."""
        depend = itertools.chain.from_iterable(self._by.get(number, ()) for number in numbers)
        return {self.space.candidates[number].passes for number in depend}

    # ---- the least that is known -------------------------------------------------------------------------

    def screen_these(self, numbers: Iterable[int], is_needed: Callable[[Bound], bool]) -> None:
        """Compute the lower bounds of these recipes' groups, unless their estimates or a similar, better
        recipe show that they are not needed.
        """
        among = set(numbers)
        for kind, waiting in self.waiting.items():
            needed = [number for number in waiting if number in among and is_needed(self._least(number))]
            twins = self._twins.of(kind, needed) if needed else []
            if twins and not any(is_needed(self._least_or_known(twin)) for twin in twins):
                among.difference_update(needed)
        self.screen(lambda number, least: is_needed(least), among=among)

    def _least_or_known(self, number: int) -> Bound:
        """Return the exact bytes and seconds of a simulated recipe as a bound, or else its lower bound."""
        if (figures := self.state.evaluated.get(number)) is not None:
            return Bound(figures.needed_bytes, figures.seconds)
        return self._bound_of(number) or self._least(number)

    def _least(self, number: int) -> Bound:
        """Return the cached estimate (a lower bound) of a postponed recipe's bytes and seconds."""
        least = self._least_known.get(number)
        if least is None:
            if number not in self._bounded_by:
                bases = self._without[number], self._whole.get(number), self._full.get(number)
                sizes, lowered = self._sizes.smaller(number), self._lowered.bounded_by(number)
                bounding = {*bases, *sizes, *lowered, self._without_checkpoints(number)}
                self._bounded_by[number] = bounding - {None}
            for other in self._bounded_by[number]:
                self._by[other].add(number)
            shares = self._taken[self._savings(number)]
            least = self._least_known[number] = shares.of(self._least_of(number))
        return least

    def _without_checkpoints(self, number: int) -> int | None:
        """Return the index of the same recipe without recomputation of layers; logits in chunks are kept."""
        if number not in self._none:
            self._none[number] = self.space.variant(number, roster.plain(Slot.CHECKPOINTING))
        return self._none[number]

    def _least_of(self, number: int) -> Bound:
        without, least = self._without[number], NOTHING
        if without is not None and (known := self.state.bounds.get(without)):
            seconds = known.seconds * (1 - CACHE_SHARE)
            needed = self._least_saving(number, without, known)
            least = Bound(needed, seconds + self._lowered.again_seconds(number))
        whole = self._bound_of_whole(number)
        # Chunked logits do not change the memory within layers, so whole logits give a lower bound of it.
        of_whole = Bound(int(whole.layers_bytes * (1 - ROUNDING)), whole.seconds * (1 - ROUNDING))
        further = self._least_of_lowered(number), self._least_by_each(number), self._sizes.least(number)
        return functools.reduce(Bound.at_least, (of_whole, *further), least)

    def _least_of_lowered(self, number: int) -> Bound:
        """Return the lower bound of a recipe with compiled layers; zero for any other recipe. It follows from
        the uncompiled recipe, or from the compiled recipe without memory savings.
        """
        if (least := self._lowered.least(number)) is None:
            return NOTHING
        without = self._without[number]
        if without is None or not self._waits(without):
            return least
        seconds = self._least(without).seconds * (1 - CACHE_SHARE)
        return least.at_least(Bound(0, seconds + self._lowered.again_seconds(number)))

    def _least_saving(self, number: int, without: int, bound: Bound) -> int:
        """Return a lower bound of the bytes of a memory-saving recipe, from `bound`, that of the recipe
        without savings."""
        setup, plain = self.space.candidates[number].setup, self.space.candidates[without].setup
        # Chunks change the bytes outside layers, and copies those within. Only the update's bytes are
        # certain.
        if setup.logits != plain.logits or _has_timed_bytes(setup):
            return bound.resting_bytes
        # Recomputation changes only bytes within layers, but the moment of the peak may move a little.
        return max(bound.resting_bytes, int(bound.outside_bytes * (1 - PEAK_SHARE)))

    def _with_each(self, number: int) -> int | None:
        """Return the index of the recipe that differs only by recomputing each layer; None for one that
        recomputes none, or each.
        """
        setup = self.space.candidates[number].setup
        if not setup.recomputes or setup.checkpoint == EVERY_LAYER:
            return None
        return None if self._each_layer is None else self.space.variant(number, self._each_layer)

    def _least_by_each(self, number: int) -> Bound:
        """Return the lower bound of a recipe that recomputes some layers, from the one that recomputes each;
        zero if that is unknown.
        """
        full = self._bound_of(self._full.get(number))
        setup = self.space.candidates[number].setup
        wish = setup.checkpoint
        if full is None or _has_timed_bytes(setup):
            return NOTHING
        # Longer spans with further settings have no bound; only plain spans do.
        if wish is not None and wish.layers_per_span != 1:
            of_spans = wish == CheckpointWish(layers_per_span=0, spans=wish.spans)
            return least_of_spans(full) if of_spans else NOTHING
        return Bound(int(full.needed_bytes * (1 - PEAK_SHARE)), 0.0)

    def _bound_of_whole(self, number: int) -> Bound:
        """Return the lower bound of a recipe with logits in chunks, from the same one with whole logits; zero
        for whole logits.
        """
        whole = self._whole.get(number)
        if (known := self._bound_of(whole)) is not None:
            return known
        # Its counterpart is still postponed. Only the seconds of such a lower bound hold for chunked logits
        # too.
        if whole in self._without:
            return Bound(0, self._least(whole).seconds)
        return NOTHING

    def _saves_nothing(self, number: int) -> bool:
        """Return True if logits in chunks save no bytes, since the peak is in a layer or in the update."""
        whole = self._bound_of_whole(number)
        # A recipe that saves fewer bytes than the resolution would not be listed anyway.
        is_in_layer = 0 < whole.needed_bytes * (1 - MEMORY_RESOLUTION) <= whole.layers_bytes
        return number in self._whole and is_in_layer

    def _least_seconds(self, number: int) -> float:
        return self._least(number).seconds

    def _is_known(self, number: int) -> bool:
        return number in self.state.bounds

    def _bound_of(self, number: int | None) -> Bound | None:
        return None if number is None else self.state.bounds.get(number)

    # ---- twins -------------------------------------------------------------------------------------------

    def _base_of(self, number: int) -> int | None:
        """Return the recipe that represents this one in comparisons of similar recipes: without
        recomputation, logits in chunks and compilation.
        """
        return self._lowered.bare(number) if number in self._lowered else self._without.get(number)

    def _may_be_rehearsed(self, number: int) -> bool:
        return self._is_known(number) or self._waits(number)

    def _is_refused(self, number: int) -> bool:
        """Return True if a simulation showed that this recipe's step cannot be recorded as CUDA graphs."""
        candidate = self.space.candidates[number]
        was_rehearsed = candidate.passes in self._looked_at and not self._waits(number)
        return was_rehearsed and launches_otherwise(candidate.setup) and not self._is_known(number)


def _has_timed_bytes(setup: Setup) -> bool:
    """Return True if the memory of a recipe depends on the time of copies to the host, as with offloaded
    activations.
    """
    return any(has_timed_bytes(setup) for has_timed_bytes in hooks("has_timed_bytes"))


def _with_device(bound: Bound) -> Bound:
    """Return the lower bound with at least the GPU's own seconds. The host may limit a step with few layers
    but not one with many.
    """
    return bound._replace(seconds=max(bound.seconds, bound.device_seconds))

"""Postponement of recipes that save memory and no time (recomputing): most searches need not simulate them.

Recomputing adds kernels to a step and removes none. It does not change the memory of an update: weights,
gradients, states. The recipe without recomputing is therefore a lower bound: equal seconds, and the bytes of
its update. If an evaluated recipe is as fast and as small as that bound, no kind of recomputing needs a
rehearsal. With adapters in the space, this excludes all of full fine-tuning. The kinds that may be fastest
are rehearsed first, before any slower recipe is evaluated. They make most other kinds unnecessary.

One of two kinds that differ in attention, kernels or precision may be no better in any figure. It is left out
in favour of its twin (`twins.py`).

Recomputing each n-th layer takes no less memory than recomputing each. Its bytes and seconds are roughly
between none and each. Spans of layers have bounds as well (`some_layers.py`). Recomputing each layer is
therefore rehearsed first, and may show that the rest are too large or too slow.

Logits in chunks are such a kind too. They do not change the memory while a layer runs. A step with whole
logits may have its peak in a layer or in its update. Chunks then save nothing and need no rehearsal.

Compiled layers are lowered separately for each size of a micro-batch. They wait too (`cost/lowered.py`). They
are lowered one size at a time, after all possibly faster recipes were evaluated. The uncompiled recipe is
rehearsed before. It takes a tenth of the time and may show that they are unnecessary.

Only the sizes of micro-batches that may matter are rehearsed.

These bounds are not exact. Keys and values of a cache that only checkpointing disables cost a little, hence
`CACHE_SHARE`. The moment of the peak changes, hence `PEAK_SHARE`. Each rehearsed kind is therefore compared
with its bounds. If one takes less than its bound, all kinds are rehearsed.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from snugfit.planning.cost.figures import Bound
from snugfit.planning.cost.lowered import lowered_kinds
from snugfit.planning.search.other_sizes import OtherSizes
from snugfit.planning.search.screening import Screening, screen
from snugfit.planning.search.some_layers import least_of_some, least_of_spans
from snugfit.planning.search.state import MEMORY_RESOLUTION
from snugfit.planning.search.twins import PEAK_SHARE, ROUNDING, OnGpus, Twins, is_below
from snugfit.planning.step_key import launches_otherwise
from snugfit.techniques import roster
from snugfit.techniques.registry import hooks
from snugfit.techniques.setup import EVERY_LAYER, CheckpointWish, Setup
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.plan import Exclusion
    from snugfit.planning.search.progress import Tell
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool

SAVING = (Slot.HEAD, Slot.CHECKPOINTING)
"""Slots whose techniques save memory in the passes but no time."""

NOTHING = Bound(0, 0.0)


class RecomputingKinds:
    """The candidates of a search that recompute or compute logits in chunks, grouped by kind of passes. They
    wait until their lower bounds show a need.

    The search has a state for each GPU.
    """

    def __init__(
        self, states: Sequence[SearchState], pool: WorkerPool, tell: Tell, *, budgets: bool = False
    ) -> None:
        self.states, self.space, self.pool, self.tell = states, states[0].space, pool, tell
        self.waiting: dict[int, list[int]] = defaultdict(list)
        """Waiting candidates by kind of passes."""
        offered = self.space.offers(Slot.CHECKPOINTING)
        # None if the space does not offer it, as next to another fixed technique.
        self._each_layer = next((o for o in offered if o.install(Setup()).checkpoint == EVERY_LAYER), None)
        plain = [roster.plain(slot) for slot in SAVING]
        self._without: dict[int, int | None] = {}
        self._whole: dict[int, int | None] = {}
        """For each candidate with logits in chunks, the same candidate with whole logits."""
        self._full: dict[int, int] = {}
        """For each candidate that recomputes some layers, spans or parts, the candidate that recomputes each
        layer."""
        self._looked_at = set[int]()
        """Kinds of passes that were simulated."""
        self._least_known: dict[int, OnGpus] = {}
        """Cached lower bounds of waiting candidates by the current results."""
        self._bounded_by: dict[int, set[int | None]] = {}
        """Cached candidates on which the bounds of each waiting candidate depend."""
        self._by = defaultdict[int | None, set[int]](set)
        """Candidates with cached bounds that depend on a candidate, by that candidate."""
        self._dominated = set[int]()
        """Candidates that can no longer be on the front of this search."""
        self._known = 0
        """Number of known bounds after the last addition."""
        self._none: dict[int, int | None] = {}
        """For each candidate, the cached candidate without recomputing."""
        self._on_the_way: dict[int, OnGpus] = {}
        """Candidates that a worker screens now, with their previous lower bounds."""
        self._bounds_hold = True
        """False once a candidate took less than its lower bound.

        All kinds with whole logits are then screened, except for compiled layers that save memory.
        """
        for number, candidate in enumerate(self.space.candidates):
            setup = candidate.setup
            if _saves(setup):
                self.waiting[candidate.passes].append(number)
                self._without[number] = self.space.variant(number, *plain)
            if candidate.setup.logits is not None:
                self._whole[number] = self.space.variant(number, plain[0])
            if (full := self._with_each(number)) is not None:
                self._full[number] = full
        self._lowered = lowered_kinds()(
            self.space, states, self._without, self._least_of_waiting, everywhere=budgets
        )
        for number in self._lowered.waiting:
            self.waiting[self.space.candidates[number].passes].append(number)
            # They have no counterpart without savings here; `_least_of_lowered` bounds them.
            self._without[number] = None
        self._sizes = OtherSizes(self.space, states[0].bounds)
        self._twins = Twins(
            self.space, self._base_of, self._known_bounds, self._may_be_rehearsed, self._is_refused
        )
        for state in states:
            state.screen_these = self.screen_these

    def screen(
        self,
        is_needed: Callable[[int, OnGpus], bool],
        *,
        twins: bool = True,
        among: Collection[int] | None = None,
    ) -> list[int]:
        """Screen the kinds of passes of which a candidate `is_needed` by its lower bounds on each GPU. Return
        the screened candidates.

        Without `twins`, kinds that are no better than another are skipped. Only candidates `among` these are
        needed, if given.
        """

        def may_be_needed(number: int) -> bool:
            return (among is None or number in among) and is_needed(number, self._least(number))

        needed = {
            kind: numbers
            for kind in self.waiting
            if (numbers := self._needed_of(kind, may_be_needed, twins=twins))
        }
        # Whole logits bound the memory of chunks within layers, so they come first.
        kinds = [kind for kind in needed if needed[kind][0] not in self._whole] or list(needed)
        # Lowering takes longest, and compiled layers without savings bound those with them.
        kinds = [kind for kind in kinds if not self._is_lowered_saving(needed[kind][0])] or kinds
        # The fastest kind comes first: its figures exclude most of the slower ones.
        kinds.sort(key=lambda kind: min(map(self._total_seconds, needed[kind])))
        chosen = [number for kind in kinds for number in needed[kind]]
        firsts = (self._firsts_of(needed[kind]) for kind in kinds)
        asked = self._take(chosen if twins else itertools.chain.from_iterable(firsts))
        if not twins:  # needed in spite of the results for recomputing each layer
            left = (n for n in chosen if n not in asked and n not in self._lowered)
            asked |= self._take(n for n in left if is_needed(n, self._least(n)))
        # If one bound was wrong, the same reasoning may be wrong elsewhere, so everything is rehearsed.
        if self._is_any_below(asked):
            return [*asked, *self.screen(lambda number, least: True)]
        if asked:
            self._twins.drop_if_misleading()
        return list(asked)

    def _is_lowered_saving(self, number: int) -> bool:
        """Return whether this candidate has compiled layers and saves memory. The candidate without savings
        then gives its bounds."""
        return number in self._lowered and _saves(self.space.candidates[number].setup)

    def _firsts_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the candidates to screen first for these of one kind: others that bound them, or themselves.

        Each size of compiled layers takes long, so only one size is returned. The fastest size without
        savings bounds the seconds of smaller micro-batches. With savings, the smallest micro-batches bound
        the bytes of larger ones.
        """
        firsts = [*map(self._first_of, numbers)]
        if uncompiled := [number for number in firsts if number not in self._lowered]:
            return uncompiled
        pieces = {number: self._sizes.pieces(number) for number in firsts}
        saves = _saves(self.space.candidates[firsts[0]].setup)
        size = max(pieces.values()) if saves else pieces[min(firsts, key=self._total_seconds)]
        return [number for number in firsts if pieces[number] == size]

    def _is_any_below(self, asked: Mapping[int, OnGpus]) -> bool:
        """Return whether one of these candidates took less than its earlier lower bound in `asked`."""
        return any(
            is_below([*map(_with_device, self._bounds(number))], least, ROUNDING)
            for number, least in asked.items()
            if self._is_known(number)
        )

    def _needed_of(self, kind: int, may_be_needed: Callable[[int], bool], *, twins: bool) -> list[int]:
        """Return the candidates of a waiting kind that are needed."""
        needed = [
            number
            for number in self.waiting[kind]
            if may_be_needed(number)
            and (twins or not self._saves_nothing(number))
            and not self._lowered.is_idle(number)
        ]
        return needed if twins or not needed or not self._twins.stand_for(kind, needed) else []

    def _take(self, chosen: Iterable[int]) -> dict[int, OnGpus]:
        """Screen these waiting candidates, and all that share their passes. Return their earlier bounds."""
        if taken := self._take_out(chosen):
            self.add(taken)
        return taken

    def _take_out(self, chosen: Iterable[int]) -> dict[int, OnGpus]:
        """Remove these candidates from the waiting ones, with all that share their passes and size. Return
        their known bounds."""
        candidates = self.space.candidates
        sizes = {candidates[number].sized: candidates[number].passes for number in chosen}
        taken: dict[int, OnGpus] = {}
        for kind in dict.fromkeys(sizes.values()):
            numbers = self.waiting.pop(kind, [])
            # The previous bounds are returned for the comparison with the results (`_is_any_below`).
            taken |= {number: self._least(number) for number in numbers if candidates[number].sized in sizes}
            if left := [number for number in numbers if number not in taken]:
                self.waiting[kind] = left
        return taken

    def _first_of(self, number: int) -> int:
        """Return the candidate to screen before this one.

        A candidate that recomputes some layers needs the one that recomputes each. Compiled layers need a
        lowered candidate with each or none of them recomputed, and the uncompiled one.
        """
        bases = [self._full.get(number)]
        if number in self._lowered:
            lowered = [*bases, self._without_checkpoints(number)]
            lowered = [one for one in lowered if one is not None and self.states[0].is_begun(one)]
            bases = [*lowered, self._lowered.alike(number), *bases]
        for before in bases:
            if before not in (None, number) and self._waits(before):
                return self._first_of(before)
        return number

    def _waits(self, number: int) -> bool:
        return number in self.waiting.get(self.space.candidates[number].passes, ())

    def _least_of_waiting(self, number: int) -> OnGpus | None:
        return self._least(number) if self._waits(number) else None

    def add(self, numbers: Collection[int]) -> None:
        """Compute the lower bounds of these candidates."""
        self._note(numbers, screen(self.space, self.pool, self.tell, numbers, self.states[0]))

    def _note(self, numbers: Collection[int], screening: Screening) -> set[int]:
        """Store the bounds of these candidates. Return the candidates whose bounds depend on them."""
        if len(self.states[0].bounds) != self._known:  # some could not be rehearsed after all
            self._least_known.clear()
        kinds = {self.space.candidates[number].passes for number in numbers} - self._looked_at
        self._looked_at |= kinds
        for index, state in enumerate(self.states):
            state.bounds |= {number: bounds[index] for number, bounds in screening.bounds.items()}
            state.excluded += screening.excluded
            state.kinds += len(kinds)
        self._known = len(self.states[0].bounds)
        return self._forget_by(screening.bounds)

    def _forget_by(self, learned: Iterable[int]) -> set[int]:
        """Remove all cached bounds that depend on these results. Return the candidates that had them."""
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
        """The candidates of kinds that never waited and were not screened yet."""
        done = self.waiting.keys() | self._looked_at
        return [n for n, one in enumerate(self.space.candidates) if one.passes not in done]

    def add_others(self) -> None:
        """Screen the candidates that recompute nothing."""
        self.add(self.others)

    # ---- one kind at a time ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a further search, in which candidates that cannot be on the front stay excluded."""
        self._dominated.clear()

    def needed_of(self, kind: int) -> list[int]:
        """Return the candidates of a waiting kind that may be on the front by the current results."""
        if kind not in self.waiting:
            return []
        # After a bound failed, kinds of rank 0 are needed without regard to any bound.
        if not self._bounds_hold and not self.rank(kind):
            return self._needed_of(kind, lambda number: True, twins=True)
        return self._needed_of(kind, self._may_be_on_front, twins=False)

    def _may_be_on_front(self, number: int) -> bool:
        # More results never make a dominated candidate useful again, so the answer is stored until `start`.
        if number not in self._dominated and self.states[0].is_dominated(number, self._least(number)[0]):
            self._dominated.add(number)
        return number not in self._dominated

    def least_seconds_of(self, numbers: Iterable[int]) -> float:
        """Return the lower bound of the fastest of these waiting candidates, in seconds."""
        return min(map(self._total_seconds, numbers))

    def rank(self, kind: int) -> int:
        """Return a rank that is lower for a kind to screen earlier: whole logits, or no savings, bound the
        rest."""
        first = self.waiting[kind][0]
        return 2 * (first in self._whole) + self._is_lowered_saving(first)

    def next_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the candidates to screen next for these of one kind, in one rehearsal.

        Return nothing if pending results will change their bounds.
        """
        firsts = self._firsts_of(numbers)
        candidates, first = self.space.candidates, min(firsts, key=self._total_seconds)
        kind, program = candidates[first].passes, candidates[first].program
        # Programs are lowered separately for each size, so a rehearsal of compiled layers has a single one.
        compiled = candidates[first].setup.lowering is not None
        alike = [
            number
            for number in firsts
            if candidates[number].passes == kind and (not compiled or candidates[number].program == program)
        ]
        on_the_way = {candidates[number].passes for number in self._on_the_way}
        awaited = on_the_way and {candidates[base].passes for n in alike for base in self._bases(n)}
        return [] if on_the_way.intersection(awaited) else alike

    def _bases(self, number: int) -> Iterator[int]:
        """Yield the candidates whose kinds give the bounds of this one, including itself for its other
        sizes."""
        plainer = self._without.get(number), self._whole.get(number), self._without_checkpoints(number)
        for base in (number, self._lowered.alike(number), *plainer, self._full.get(number)):
            if base is not None:
                yield base

    def send(self, numbers: Sequence[int]) -> list[int]:
        """Remove these and all that share their simulation from the waiting candidates. `learn` gets the
        result."""
        taken = self._take_out(numbers)
        self._on_the_way |= taken
        return [*taken]

    def learn(self, numbers: Sequence[int], screening: Screening) -> set[int]:
        """Store the bounds of candidates that `send` returned. Return the kinds whose bounds change by
        them."""
        known = {number: self._on_the_way.pop(number) for number in numbers if number in self._on_the_way}
        learned = self._note(numbers, screening)
        twins = self._twins.stand
        self._twins.drop_if_misleading()
        if self._is_any_below(known):
            self._bounds_hold = False
        # If the twins or the bounds no longer count, every waiting kind may be needed.
        if not self._bounds_hold or twins != self._twins.stand:
            return {*self.waiting}
        return {self.space.candidates[number].passes for number in learned}

    def kinds_by(self, numbers: Iterable[int]) -> set[int]:
        """Return the kinds whose bounds depend on these candidates."""
        depend = itertools.chain.from_iterable(self._by.get(number, ()) for number in numbers)
        return {self.space.candidates[number].passes for number in depend}

    # ---- the least that is known -------------------------------------------------------------------------

    def screen_these(self, numbers: Iterable[int], is_needed: Callable[[Bound], bool]) -> None:
        """Screen the kinds of these candidates if they are needed by their known lower bounds."""
        self.screen(lambda number, least: is_needed(least[0]), among=set(numbers))

    def _least(self, number: int) -> OnGpus:
        """Return the known lower bounds of a waiting candidate, cached, since each round reads them several
        times."""
        least = self._least_known.get(number)
        if least is None:
            if number not in self._bounded_by:
                bases = self._without[number], self._whole.get(number), self._full.get(number)
                sizes, lowered = self._sizes.smaller(number), self._lowered.bounded_by(number)
                bounding = {*bases, *sizes, *lowered, self._without_checkpoints(number)}
                self._bounded_by[number] = bounding - {None}
            for other in self._bounded_by[number]:
                self._by[other].add(number)
            least = self._least_known[number] = self._least_of(number)
        return least

    def _without_checkpoints(self, number: int) -> int | None:
        """Return the same candidate without recomputing; logits in chunks stay so."""
        if number not in self._none:
            self._none[number] = self.space.variant(number, roster.plain(Slot.CHECKPOINTING))
        return self._none[number]

    def _least_of(self, number: int) -> OnGpus:
        without, least = self._without[number], [NOTHING] * len(self.states)
        if without is not None and self._is_known(without):
            share, again = self._lowered.saved_share(number), self._lowered.again_seconds(number)
            least = [
                Bound(self._least_saving(number, without, bound), bound.seconds * (1 - share) + again)
                for bound in self._bounds(without)
            ]
        return [
            Bound(
                # Chunks of logits do not change the memory within layers, so that of whole logits bounds it.
                max(known.needed_bytes, int(bound.layers_bytes * (1 - ROUNDING)), other.needed_bytes),
                max(known.seconds, bound.seconds * (1 - ROUNDING), other.seconds),
            )
            for known, bound, other in zip(
                map(Bound.at_least, least, self._least_of_lowered(number)),
                self._bounds_of_whole(number),
                map(Bound.at_least, self._least_by_each(number), self._least_by_sizes(number)),
                strict=True,
            )
        ]

    def _least_by_sizes(self, number: int) -> OnGpus:
        return [self._sizes.least(number)]

    def _least_of_lowered(self, number: int) -> OnGpus:
        """Return the lower bounds of compiled layers; zero for any other candidate.

        They follow from the uncompiled candidate, from fewer pieces, or from compiled layers that save
        less.
        """
        if (least := self._lowered.least(number)) is None:
            return [NOTHING] * len(self.states)
        without = self._without[number]
        if without is None or not self._waits(without):
            return [least]
        share, again = self._lowered.saved_share(number), self._lowered.again_seconds(number)
        return [least.at_least(Bound(0, one.seconds * (1 - share) + again)) for one in self._least(without)]

    def _least_saving(self, number: int, without: int, bound: Bound) -> int:
        """Return the least bytes of a candidate that saves memory, from the same one without savings."""
        setup, plain = self.space.candidates[number].setup, self.space.candidates[without].setup
        # Chunks change the bytes outside layers, and copies those within: only the update's bytes are sure.
        if setup.logits != plain.logits or _has_timed_bytes(setup):
            return bound.resting_bytes
        # Recomputing changes bytes within layers alone, but the moment of the peak may move a little.
        return max(bound.resting_bytes, int(bound.outside_bytes * (1 - PEAK_SHARE)))

    def _with_each(self, number: int) -> int | None:
        """Return the candidate that differs only by recomputing each layer; None for one that recomputes
        none, or each."""
        setup = self.space.candidates[number].setup
        if (setup.checkpoint is None and not setup.has_budget) or setup.checkpoint == EVERY_LAYER:
            return None
        return None if self._each_layer is None else self.space.variant(number, self._each_layer)

    def _least_by_each(self, number: int) -> OnGpus:
        """Return the lower bounds of a candidate that recomputes some layers, from the one that recomputes
        each; zero if that is unknown."""
        full = self._full.get(number)
        setup = self.space.candidates[number].setup
        wish = setup.checkpoint
        if full is None or not self._is_known(full):
            return [NOTHING] * len(self.states)
        if _has_timed_bytes(setup):
            return [NOTHING] * len(self.states)
        # Longer spans with further settings have no bound; only plain spans do.
        if wish is not None and wish.layers_per_span != 1:
            of_spans = wish == CheckpointWish(layers_per_span=0, spans=wish.spans)
            return [least_of_spans(one) if of_spans else NOTHING for one in self._bounds(full)]
        least = [Bound(int(bound.needed_bytes * (1 - PEAK_SHARE)), 0.0) for bound in self._bounds(full)]
        none = self._without_checkpoints(number)
        if none is None or wish is None or wish.keep:
            return least
        keeping_all = self._bounds(none) if self._is_known(none) else self._least_of_waiting(none)
        if keeping_all is None:
            return least
        return [
            most.at_least(least_of_some(one, other, wish))
            for most, one, other in zip(least, keeping_all, self._bounds(full), strict=True)
        ]

    def _bounds_of_whole(self, number: int) -> OnGpus:
        """Return the lower bounds of the candidate with whole logits instead of chunks; zero if its logits
        are whole."""
        whole = self._whole.get(number)
        if whole is not None and self._is_known(whole):
            return self._bounds(whole)
        # Its counterpart still waits; of such bounds only the seconds hold for chunks as well.
        if whole in self._without:
            return [Bound(0, least.seconds) for least in self._least(whole)]
        return [NOTHING] * len(self.states)

    def _saves_nothing(self, number: int) -> bool:
        """Return whether chunks of logits save no bytes, since the peak is in a layer or in the update."""
        # A saving below the resolution would not be listed anyway.
        return number in self._whole and all(
            0 < bound.needed_bytes * (1 - MEMORY_RESOLUTION) <= bound.layers_bytes
            for bound in self._bounds_of_whole(number)
        )

    def _total_seconds(self, number: int) -> float:
        return sum(least.seconds for least in self._least(number))

    def _is_known(self, number: int) -> bool:
        return number in self.states[0].bounds

    def _bounds(self, number: int) -> OnGpus:
        return [state.bounds[number] for state in self.states]

    def left_out(self) -> Iterator[Exclusion]:
        """Return exclusions, with the reason, for candidates that were never screened."""
        yield from self._lowered.left_out(itertools.chain.from_iterable(self.waiting.values()))

    # ---- twins -------------------------------------------------------------------------------------------

    def _base_of(self, number: int) -> int | None:
        """Return the candidate that represents this one in comparisons with twins: without recomputing,
        chunks of logits and compiler."""
        return self._lowered.bare(number) if number in self._lowered else self._without.get(number)

    def _known_bounds(self, number: int) -> OnGpus | None:
        return self._bounds(number) if self._is_known(number) else None

    def _may_be_rehearsed(self, number: int) -> bool:
        return self._is_known(number) or self._waits(number)

    def _is_refused(self, number: int) -> bool:
        """Return whether a simulation showed that this candidate's step cannot be launched as its Setup
        requires."""
        candidate = self.space.candidates[number]
        was_rehearsed = candidate.passes in self._looked_at and not self._waits(number)
        return was_rehearsed and launches_otherwise(candidate.setup) and not self._is_known(number)


def _saves(setup: Setup) -> bool:
    """Return whether this Setup's passes save memory and no time."""
    return setup.checkpoint is not None or setup.logits is not None or setup.has_budget


def _has_timed_bytes(setup: Setup) -> bool:
    """Return whether the bytes that layers save depend on the time of copies to the host."""
    return any(has_timed_bytes(setup) for has_timed_bytes in hooks("has_timed_bytes"))


def _with_device(bound: Bound) -> Bound:
    """Return the bound with at least the device's seconds, since the host may limit few layers but not
    many."""
    return bound._replace(seconds=max(bound.seconds, bound.device_seconds))

"""Parts of steps, rehearsed once and remembered: what a search asks of the rehearsal.

Two questions are asked of a Setup. What is the *least* it can take (`screen`)? Its passes are rehearsed on
models of few layers, all sizes of micro-batch in one rehearsal, and so is its update; live bytes and seconds
of two depths tell those of the whole depth, by the straight line through them. Every moment of a step grows
evenly with the layers, and the worst moment is the largest of them: a convex figure, of which that line is
never more than the truth. Models whose layers do not come round are rehearsed whole.

And what does it *really* take (`judge`)? Passes and update are rehearsed whole and spliced (law 5), and the
trace goes through the clock and the allocator. Whatever a plan states comes from there.

Rehearsing is what costs, and GPUs that decide alike share it: of each Setup there is one answer for each GPU,
with a context and seconds of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from snugfit.planning.cost.figures import Bound, Figures
from snugfit.planning.cost.lower_bounds import Least
from snugfit.planning.cost.periodic import FEW, MANY, settled, works_of
from snugfit.planning.cost.run import ENDLESS, Opening, Run
from snugfit.planning.cost.same_trace import under
from snugfit.planning.cost.shallow import Shallows
from snugfit.planning.cost.short_passes import MICRO_BATCHES, second_step_is_redundant, short_passes
from snugfit.planning.cost.timer import Clock, seconds_of
from snugfit.planning.step_key import as_rehearsed, passes_key, step_key, timing_key, update_key
from snugfit.prediction.allocator import Replay, replay
from snugfit.prediction.device import context_of, policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.splice import Part, rehearse_passes, rehearse_update, splice
from snugfit.rehearsal.trace.trace import Mark, Trace
from snugfit.techniques.setup import CheckpointWish

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import CudaPolicy
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup

_Kept = TypeVar("_Kept")

EVERY_LAYER = CheckpointWish()
"""Stands for all ways to recompute, where it does not matter which layers are."""

REMEMBERED_PARTS = 48
"""Whole parts that are kept, at some ten megabytes each: more than there are kinds of passes in most spaces,
for recipes that share them are judged far apart."""


class Parts:
    """Rehearses parts of one job's steps for GPUs that decide as the first of them does."""

    def __init__(
        self,
        job: Job,
        gpus: Sequence[Gpu | None],
        clock: Clock,
        *,
        shallow: bool = True,
        run: Run = ENDLESS,
    ) -> None:
        self.job, self.gpus, self.clock = job, gpus, clock
        self.opening = Opening(job, run)
        self.policy: CudaPolicy = policy_for(gpus[0], Software())
        self.shallows = Shallows(job, few=shallow)
        self.least = Least(self.shallows, self.policy, clock, self.opening)
        self._redundant: dict[Hashable, bool] = {}
        self._whole: OrderedDict[Hashable, Any] = OrderedDict()

    # ---- the least ---------------------------------------------------------------------------------------

    def screen(self, setups: Sequence[Setup]) -> list[tuple[Bound, ...]]:
        """The least that each of these takes on each GPU; they differ in micro-batches, optimizer, matrix
        products, loading and allocator only. Raises `SnugfitError` where one of them cannot be rehearsed."""
        if not self.job.trains:
            return [self._exact_bound(setup) for setup in setups]
        found = self.least.of(setups)
        self.opening.forget()
        trace = Trace((), (), (Mark(0, 0, "backward"),), (), (), found.attention)
        return [self._bounds(live, trace, seconds) for live, seconds in found.needs]

    def _bounds(self, live: int, trace: Trace, seconds: Sequence[float]) -> tuple[Bound, ...]:
        """One for each GPU; of the trace, what its context depends on."""
        contexts = self._contexts(trace)
        return tuple(Bound(live + context, each) for context, each in zip(contexts, seconds, strict=True))

    def _contexts(self, trace: Trace) -> list[int]:
        return [context_of(gpu, Software(), trace)[0] for gpu in self.gpus]

    def _exact_bound(self, setup: Setup) -> tuple[Bound, ...]:
        trace = self._whole_trace(setup)
        asked = under(setup, trace)
        share = self.opening.of(setup, asked)[1]
        return self._bounds(trace.peak()[0], trace, [each + share for each in self.clock(asked)])

    # ---- the whole ---------------------------------------------------------------------------------------

    def judge(self, setups: Sequence[Setup]) -> list[tuple[Figures, ...]]:
        """What each of these takes on each GPU; they have one trace, and differ in the allocator and in how
        products of matrices are computed only."""
        trace, whole, replays = self._replayed(setups[0], {setup.expandable_segments for setup in setups})
        contexts = self._contexts(trace)
        told = {timing_key(setup): setup for setup in setups}
        asked = {key: under(setup, trace) for key, setup in told.items()}
        seconds = {key: self._seconds(setup, asked[key]) for key, setup in told.items()}
        openings = {key: self.opening.of(told[key], trace) for key, trace in asked.items()}
        return [
            tuple(
                Figures(
                    after.requested_peak, after.allocated_peak, after.reserved_peak, context,
                    each + openings[key][1], whole, *openings[key],
                )
                for context, each in zip(contexts, seconds[key], strict=True)
            )
            for setup in setups
            for after, key in ((replays[setup.expandable_segments], timing_key(setup)),)
        ]  # fmt: skip

    def _replayed(self, setup: Setup, kinds: Collection[bool]) -> tuple[Trace, bool, dict[bool, Replay]]:
        """The trace of this step, of as few micro-batches as tell what it takes; whether it was rehearsed
        whole; and what each kind of segments makes of it."""
        pieces = setup.micro_batches
        for few in FEW if pieces >= MANY and self.job.trains else ():
            trace, whole = self.trace(setup, most=few)
            if whole:
                break
            found = {expandable: settled(trace, pieces, expandable=expandable) for expandable in kinds}
            known = {expandable: after for expandable, after in found.items() if after}
            if len(known) == len(kinds):
                return trace, whole, known
        trace, whole = self.trace(setup)
        return trace, whole, {expandable: replay(trace, expandable=expandable) for expandable in kinds}

    def _seconds(self, setup: Setup, trace: Trace) -> Sequence[float]:
        """Of the step on each GPU; its trace may have fewer micro-batches."""
        if setup.micro_batches >= MANY and self.job.trains:
            return seconds_of(self.clock, works_of(trace, setup.micro_batches))
        return self.clock(trace)

    def whole(self, setup: Setup, places: Sequence[int]) -> list[Figures]:
        """What this Setup takes on each of these of the GPUs, whose policy is one, rehearsed whole by that:
        GPUs that run the same kernels may yet differ in the workspaces and the scratch of those."""
        gpus = [self.gpus[place] for place in places]
        trace = under(setup, self._whole_trace(setup, policy_for(gpus[0], Software())))
        after = replay(trace, expandable=setup.expandable_segments)
        seconds, (once, share) = self.clock(trace), self.opening.of(setup, trace)
        return [
            Figures(
                after.requested_peak, after.allocated_peak, after.reserved_peak,
                context_of(gpu, Software(), trace)[0], seconds[place] + share, True, once, share,
            )
            for gpu, place in zip(gpus, places, strict=True)
        ]  # fmt: skip

    def verify(self, recipe: Recipe, figures: Figures, gpu: int = 0) -> tuple[bool, tuple[str, ...]]:
        """Whether the whole rehearsal of this recipe on this one of the GPUs gives these figures, and the
        doubts it has."""
        found = predict(self.job, recipe, gpu=self.gpus[gpu])
        footprint = found.footprint
        same = (
            footprint.requested_bytes,
            footprint.allocated_bytes,
            footprint.reserved_bytes,
            footprint.context_bytes,
        ) == figures[:4]
        return same, found.doubts

    def trace(self, setup: Setup, *, most: int | None = None) -> tuple[Trace, bool]:
        """The trace of the step under this Setup, with so many micro-batches at most, and whether it had to
        be rehearsed whole, with all of them."""
        if not self.job.trains:
            return self._whole_trace(setup), True
        setup = as_rehearsed(setup)
        passes = self._whole_passes(setup)
        key = ("update", update_key(setup), passes.gradients)
        update = self._kept(key, lambda: rehearse_update(self.job, setup, self.policy, passes.gradients))
        pieces = min(setup.micro_batches, most or setup.micro_batches)
        trace = splice(passes, update, micro_batches=pieces)
        return (self._whole_trace(setup), True) if trace is None else (trace, False)

    def _whole_passes(self, setup: Setup) -> Part:
        def rehearse_them() -> Part:
            rehearse = short_passes if self._second_step_is_redundant(setup) else rehearse_passes
            return rehearse(self.job, setup, self.policy)

        samples = self.job.batch_size // setup.micro_batches
        return self._kept(("passes", passes_key(setup), samples, setup.micro_batches > 1), rehearse_them)

    def _second_step_is_redundant(self, setup: Setup) -> bool:
        """Whether such passes may be rehearsed briefly, tried on few layers and one sample each. What a step
        leaves behind does not depend on which of its layers are recomputed, once some are."""
        pieces = min(setup.micro_batches, MICRO_BATCHES)
        kind = replace(setup, checkpoint=setup.checkpoint and EVERY_LAYER)
        key = (passes_key(kind), pieces)
        if key not in self._redundant:
            job = self.shallows.tried(setup, samples=pieces)
            if job is None:
                return False
            self._redundant[key] = second_step_is_redundant(
                job, replace(kind, micro_batches=pieces), self.policy
            )
        return self._redundant[key]

    def _whole_trace(self, setup: Setup, policy: CudaPolicy | None = None) -> Trace:
        """Rehearsed by this policy, or by the one of all that is judged."""
        asked, policy = as_rehearsed(setup), policy or self.policy
        return self._kept(("whole", step_key(asked), policy), lambda: rehearse(self.job, asked, policy))

    def _kept(self, key: Hashable, make: Callable[[], _Kept]) -> _Kept:
        """What was made for this key; the longest unused goes when there are many."""
        if key not in self._whole:
            self._whole[key] = make()
        self._whole.move_to_end(key)
        if len(self._whole) > REMEMBERED_PARTS:
            self._whole.popitem(last=False)
        kept: _Kept = self._whole[key]
        return kept

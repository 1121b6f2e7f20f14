"""Parts of steps, rehearsed once and remembered: what a search asks of the rehearsal.

Two questions are asked of a Setup. What is the *least* it can take (`screen`)? Its passes are rehearsed on
models of few layers, all sizes of micro-batch in one rehearsal, and so is its update; live bytes and seconds
of two depths tell those of the whole depth, by the straight line through them. Every moment of a step grows
evenly with the layers, and the worst moment is the largest of them: a convex figure, of which that line is
never more than the truth. Models whose layers do not come round are rehearsed whole.

And what does it *really* take (`judge`)? Passes and update are rehearsed whole and spliced (law 5), and the
tape goes through the clock and the allocator. Whatever a plan states comes from there.

Rehearsing is what costs, and GPUs that decide alike share it: of each Setup there is one answer for each GPU,
with a context and seconds of its own.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from snugfit.planning.clock import Clock, seconds_of
from snugfit.planning.figures import Bound, Figures
from snugfit.planning.lines import Lines, Shallow, along, few
from snugfit.planning.products import kernels_under, seen_by_clock, under
from snugfit.planning.run import ENDLESS, Opening, Run
from snugfit.planning.space import passes_key, tape_key, update_key
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import context_of, policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.rehearsal.brief import PIECES, brief_passes, is_brief
from snugfit.rehearsal.depth import Depth, depth_of, span_period
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.sizes import Round, Update, Work, rehearse_sizes, update_of
from snugfit.rehearsal.splice import Part, rehearse_passes, rehearse_update, spliced
from snugfit.rehearsal.tape import Mark, Tape
from snugfit.techniques.setup import LoaderWish

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.rehearsal.policy import CudaPolicy
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup

_Kept = TypeVar("_Kept")

FEWEST = 2
"""Layers of the shallowest model that is rehearsed."""

TRIED_LAYERS = 2
"""Periods of layers in the model on which brief passes are tried."""

REMEMBERED_PARTS = 24
"""Whole parts that are kept, at some ten megabytes each."""


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
        self.job, self.gpus, self.clock, self.shallow = job, gpus, clock, shallow
        self.opening = Opening(job, run)
        self.policy: CudaPolicy = policy_for(gpus[0], Software())
        self._depths: dict[Hashable, Depth | None] = {}
        self._updates: dict[Hashable, Update] = {}
        self._seconds: dict[Hashable, Sequence[float]] = {}
        self._works: dict[Hashable, tuple[Work, Work]] = {}
        self._brief: dict[Hashable, bool] = {}
        self._whole: OrderedDict[Hashable, Any] = OrderedDict()

    # ---- the least ---------------------------------------------------------------------------------------

    def screen(self, setups: Sequence[Setup]) -> list[tuple[Bound, ...]]:
        """The least that each of these takes on each GPU; they differ in micro-batches, optimizer, matrix
        products and allocator only. Raises `SnugfitError` where one of them cannot be rehearsed."""
        if not self.job.trains:
            return [self._exact_bound(setup) for setup in setups]
        sizes = {self.job.batch_size // setup.micro_batches for setup in setups if setup.micro_batches > 1}
        whole = any(setup.micro_batches == 1 for setup in setups)
        depths = list(self._shallows(replace(setups[0], matmul="ieee")))
        passes = [rehearse_sizes(each.job, each.setup, self.policy, sizes, whole=whole) for each in depths]
        seen = Lines(depths, passes, self._layers(setups[0]))
        bounds = [self._least(setup, seen) for setup in setups]
        self._seconds.clear()
        self._works.clear()
        self.opening.forget()
        return bounds

    def _least(self, setup: Setup, seen: Lines) -> tuple[Bound, ...]:
        samples = self.job.batch_size // setup.micro_batches
        updates = [
            self._update(setup, shallow, passes.gradients)
            for shallow, passes in zip(seen.depths, seen.passes, strict=True)
        ]
        rounds = seen.rounds(samples, cut=setup.micro_batches > 1)
        after = seen.along([once.left for once in rounds]) + seen.along([update.rise for update in updates])
        live = (
            seen.along([passes.standing for passes in seen.passes])
            + seen.along([update.states for update in updates])
            + max(seen.rise(samples, cut=setup.micro_batches > 1), after)
        )
        pieces = few(setup.micro_batches)
        seconds = []
        for shallow, once, update in zip(seen.depths, rounds, updates, strict=True):
            clocked = [self._clocked(setup, once, (samples, shallow.layers, n), update) for n in pieces]
            seconds.append([along(pieces, each, setup.micro_batches) for each in zip(*clocked, strict=True)])
        tape = Tape((), (), (Mark(0, 0, "backward"),), (), (), seen.passes[0].attention)
        share = self.opening.least_share(
            setup, [self._under(setup, work) for work in (*rounds[0][-2:], updates[0].work)]
        )
        lines = [seen.along(each) + share for each in zip(*seconds, strict=True)]
        return self._bounds(int(live), tape, lines)

    def _bounds(self, live: int, tape: Tape, seconds: Sequence[float]) -> tuple[Bound, ...]:
        """One for each GPU; of the tape, what its context depends on."""
        contexts = self._contexts(tape)
        return tuple(Bound(live + context, each) for context, each in zip(contexts, seconds, strict=True))

    def _contexts(self, tape: Tape) -> list[int]:
        return [context_of(gpu, Software(), tape)[0] for gpu in self.gpus]

    def _clocked(
        self, setup: Setup, once: Round, what: tuple[int, int, int], update: Update
    ) -> Sequence[float]:
        """Seconds of so many micro-batches of a size, and an update."""
        key = (what, update_key(setup), seen_by_clock(setup))
        if key not in self._seconds:
            first, further, last = (self._under(setup, work) for work in (*once[-2:], update.work))
            self._seconds[key] = seconds_of(self.clock, [first, *[further] * (what[-1] - 1), last])
        return self._seconds[key]

    def _under(self, setup: Setup, work: Work) -> Work:
        key = seen_by_clock(setup), id(work)
        if key not in self._works:
            changed = kernels_under(setup, work.kernels)
            asked = work if changed is work.kernels else work._replace(kernels=changed)
            self._works[key] = work, asked  # by id, with the work that it is the id of
        return self._works[key][1]

    def _update(self, setup: Setup, shallow: Shallow, gradients: tuple[int, ...]) -> Update:
        key = (update_key(setup), shallow.layers, gradients)
        if key not in self._updates:
            asked = replace(shallow.setup, optimizer=setup.optimizer)
            self._updates[key] = update_of(rehearse_update(shallow.job, asked, self.policy, gradients))
        return self._updates[key]

    def _exact_bound(self, setup: Setup) -> tuple[Bound, ...]:
        tape = self._whole_tape(setup)
        asked = under(setup, tape)
        share = self.opening.of(setup, asked)[1]
        return self._bounds(tape.peak()[0], tape, [each + share for each in self.clock(asked)])

    # ---- few layers --------------------------------------------------------------------------------------

    def _shallows(self, setup: Setup) -> Iterator[Shallow]:
        """Two models of few layers that are less work than the whole one; else the whole one."""
        depth = self._depth(setup)
        if depth is not None and self.shallow:
            checkpoint, spans = span_period(setup.checkpoint, depth.layers)
            period = math.lcm(depth.period, spans)
            periods = FEWEST if period == 1 else 1  # a first and a last layer, at least
            least = periods * period + (depth.layers - periods * period) % period
            if 2 * least + period < depth.layers:
                asked = replace(setup, checkpoint=checkpoint)
                for layers in (least, least + period):
                    yield Shallow(depth.shallower(self.job, layers), asked, layers)
                return
        yield Shallow(self.job, setup, self._layers(setup))

    def _depth(self, setup: Setup) -> Depth | None:
        if setup.attention not in self._depths:
            self._depths[setup.attention] = depth_of(self.job, setup)
        return self._depths[setup.attention]

    def _layers(self, setup: Setup) -> int:
        depth = self._depth(setup)
        return depth.layers if depth else 1

    # ---- the whole ---------------------------------------------------------------------------------------

    def judge(self, setups: Sequence[Setup]) -> list[tuple[Figures, ...]]:
        """What each of these takes on each GPU; they have one tape, and differ in the allocator and in how
        products of matrices are computed only."""
        tape, whole = self.tape(setups[0])
        contexts = self._contexts(tape)
        replays = {
            expandable: replay(tape, expandable=expandable)
            for expandable in {setup.expandable_segments for setup in setups}
        }
        told = {seen_by_clock(setup): setup for setup in setups}
        asked = {key: under(setup, tape) for key, setup in told.items()}
        seconds = {key: self.clock(tape) for key, tape in asked.items()}
        openings = {key: self.opening.of(told[key], tape) for key, tape in asked.items()}
        return [
            tuple(
                Figures(
                    after.requested_peak, after.allocated_peak, after.reserved_peak, context,
                    each + openings[key][1], whole, *openings[key],
                )
                for context, each in zip(contexts, seconds[key], strict=True)
            )
            for setup in setups
            for after, key in ((replays[setup.expandable_segments], seen_by_clock(setup)),)
        ]  # fmt: skip

    def own(self, setup: Setup, gpu: int) -> Figures:
        """What this Setup takes on this one of the GPUs by its own policy: GPUs that run the same kernels
        may yet differ in the workspaces and the scratch of those."""
        parts = Parts(self.job, [self.gpus[gpu]], lambda tape: self.clock(tape)[gpu : gpu + 1])
        parts._depths, parts._brief = self._depths, self._brief
        return parts.judge([setup])[0][0]

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

    def tape(self, setup: Setup) -> tuple[Tape, bool]:
        """The tape of the step under this Setup, and whether it had to be rehearsed whole."""
        if not self.job.trains:
            return self._whole_tape(setup), True
        setup = replace(setup, matmul="ieee")  # what is remembered serves every precision of products
        passes = self._whole_passes(setup)
        key = ("update", update_key(setup), passes.gradients)
        update = self._kept(key, lambda: rehearse_update(self.job, setup, self.policy, passes.gradients))
        tape = spliced(passes, update, micro_batches=setup.micro_batches)
        return (self._whole_tape(setup), True) if tape is None else (tape, False)

    def _whole_passes(self, setup: Setup) -> Part:
        def rehearsed() -> Part:
            brief = brief_passes(self.job, setup, self.policy) if self._is_brief(setup) else None
            return brief or rehearse_passes(self.job, setup, self.policy)

        samples = self.job.batch_size // setup.micro_batches
        return self._kept(("passes", passes_key(setup), samples, setup.micro_batches > 1), rehearsed)

    def _is_brief(self, setup: Setup) -> bool:
        """Whether such passes may be rehearsed briefly, tried on few layers and one sample each."""
        pieces = min(setup.micro_batches, PIECES)
        key = (passes_key(setup), pieces)
        if key not in self._brief:
            depth = self._depth(setup)
            layers = TRIED_LAYERS * depth.period if depth else 0
            if depth is None or layers >= depth.layers:
                return False
            job = replace(depth.shallower(self.job, layers), batch_size=pieces)
            self._brief[key] = is_brief(job, replace(setup, micro_batches=pieces), self.policy)
        return self._brief[key]

    def _whole_tape(self, setup: Setup) -> Tape:
        plain = replace(setup, matmul="ieee", expandable_segments=False, loader=LoaderWish())
        key = ("whole", *tape_key(plain))
        return self._kept(key, lambda: rehearse(self.job, plain, self.policy))

    def _kept(self, key: Hashable, make: Callable[[], _Kept]) -> _Kept:
        """What was made for this key; the longest unused goes when there are many."""
        if key not in self._whole:
            self._whole[key] = make()
        self._whole.move_to_end(key)
        if len(self._whole) > REMEMBERED_PARTS:
            self._whole.popitem(last=False)
        kept: _Kept = self._whole[key]
        return kept

"""Parts of steps, rehearsed once and remembered: what a search asks of the rehearsal.

Two questions are asked of a Setup. What is the *least* it can take (`screen`)? Its passes are rehearsed on
models of few layers, all sizes of micro-batch in one rehearsal, and so is its update; `lower_bounds.py` gives
what the whole depth takes at least. Models whose layers do not repeat are rehearsed in full.

And what does it *really* take (`judge`)? Passes and update are rehearsed at the whole depth and spliced, and
the trace goes through the timer and the allocator. Whatever a plan states comes from there.

Rehearsing is what costs, and GPUs that decide alike share it: of each Setup there is one answer for each GPU,
with a context and seconds of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from snugfit.planning.cost.figures import Bound, Figures
from snugfit.planning.cost.lower_bounds import LowerBounds, StepBounds
from snugfit.planning.cost.periodic import (
    MANY,
    AllocatorPeaks,
    Requests,
    micro_batch_works,
    replay_periodic,
)
from snugfit.planning.cost.same_trace import kernels_launched, trace_under, with_sizes
from snugfit.planning.cost.shallow import ShallowJobs
from snugfit.planning.cost.short_passes import (
    MICRO_BATCHES,
    second_step_is_redundant,
    short_passes,
    write_out,
)
from snugfit.planning.cost.startup_share import ENDLESS, PlannedRun, StartupShare, StartupShares
from snugfit.planning.cost.timer import Timer, seconds_of
from snugfit.planning.step_key import as_rehearsed, as_written, passes_key, step_key, timing_key, update_key
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import ContextNeeds, common_policy, context_for, policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.prediction.seconds import model_peak_seconds
from snugfit.rehearsal.captured_parts import (
    CannotBeRecorded,
    refuse_waits,
    rehearse_any_update,
    splice_captured,
)
from snugfit.rehearsal.device.policy import ComparedPolicy
from snugfit.rehearsal.few_layers import passes_from_few_layers
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.splice import Part, rehearse_passes, splice
from snugfit.rehearsal.trace.trace import Mark, Trace
from snugfit.techniques.setup import EVERY_LAYER

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import CudaPolicy
    from snugfit.rehearsal.trace.repeat import PeriodicRun
    from snugfit.results.step_seconds import StepSeconds
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup

_Result = TypeVar("_Result")

REMEMBERED_PARTS = 48
"""Whole parts that are kept, at some ten megabytes each: more than there are kinds of passes in most spaces,
for recipes that share them are judged far apart."""


class _Replays(NamedTuple):
    trace: Trace
    """Of the steady step, perhaps with fewer micro-batches."""
    by_segments: dict[bool, AllocatorPeaks]
    """What the allocator shows, with expandable segments and without."""


class _OwnTrace(NamedTuple):
    policy: CudaPolicy
    """By which it was rehearsed."""
    sizes: Mapping[CudaPolicy, Mapping[tuple[str, int], int] | None]
    """What other GPUs have in the place of its buffers (`ComparedPolicy`)."""
    trace: Trace


class FullCheck(NamedTuple):
    """What simulating a recipe in full said."""

    is_same: bool
    """Whether it gave the same figures."""
    doubts: tuple[str, ...]
    timing: StepSeconds | None
    """Its seconds, where the GPU's rates are known."""


class Parts:
    """Rehearses parts of one job's steps for GPUs that decide as the first of them does."""

    def __init__(
        self,
        job: Job,
        gpus: Sequence[Gpu | None],
        timer: Timer,
        *,
        shallow: bool = True,
        run: PlannedRun = ENDLESS,
    ) -> None:
        self.job, self.gpus, self.timer = job, gpus, timer
        self.startup = StartupShares(job, run)
        self.policy: CudaPolicy = common_policy(gpus, Software())
        self.shallow_jobs = ShallowJobs(job, few=shallow)
        self.lower_bounds = LowerBounds(self.shallow_jobs, self.policy, timer, self.startup)
        self._redundant: dict[Hashable, bool] = {}
        self._whole: OrderedDict[Hashable, Any] = OrderedDict()
        self._steady: set[Hashable] = set()
        """The traces whose third step was seen to be the second again."""

    # ---- lower bounds ------------------------------------------------------------------------------------

    def screen(self, setups: Sequence[Setup]) -> list[tuple[Bound, ...] | CannotBeRecorded]:
        """The least that each of these takes on each GPU, or why it cannot be recorded; they differ in
        micro-batches, optimizer, matrix products, loading, allocator and recording only. Raises
        `SnugfitError` where one of them cannot be rehearsed."""
        if not self.job.trains:
            return [self._exact_bound(setup) for setup in setups]
        bounds = self.lower_bounds.of(setups)
        self.startup.forget()
        trace = Trace((), (), (Mark(0, 0, "backward"),), (), (), bounds.attention)
        contexts, least = self._contexts(trace), self._contexts(replace(trace, attention=()))
        return [
            step if isinstance(step, CannotBeRecorded) else _bounds_on_gpus(step, contexts, least)
            for step in bounds.per_setup
        ]

    def _contexts(self, trace: Trace) -> list[int]:
        software, needs = Software(), ContextNeeds.of(trace)
        return [context_for(gpu, software, needs)[0] for gpu in self.gpus]

    def _exact_bound(self, setup: Setup) -> tuple[Bound, ...]:
        trace = self._whole_trace(setup)
        timed = trace_under(setup, trace)
        share = self.startup.of(setup, timed).share
        nbytes = trace.peak().nbytes
        seconds = [seconds + share for seconds in self.timer(timed)]
        return tuple(
            Bound(nbytes + context, one) for context, one in zip(self._contexts(trace), seconds, strict=True)
        )

    # ---- what it really takes ----------------------------------------------------------------------------

    def judge(self, setups: Sequence[Setup]) -> list[tuple[Figures, ...]]:
        """What each of these takes on each GPU; they have one trace, and differ in the allocator and in how
        products of matrices are computed only."""
        replays = self._replays(setups[0], {setup.expandable_segments for setup in setups})
        launched = kernels_launched(setups[0], replays.trace.kernels)
        contexts = self._contexts(replace(replays.trace, kernels=launched))
        by_timing = {timing_key(setup): setup for setup in setups}
        traces = {key: trace_under(setup, replays.trace) for key, setup in by_timing.items()}
        by_kernels = {id(trace.kernels): trace for trace in traces.values()}  # most share them
        of_kernels = {kernels: self._seconds(setups[0], trace) for kernels, trace in by_kernels.items()}
        seconds = {key: of_kernels[id(trace.kernels)] for key, trace in traces.items()}
        startups = {key: self.startup.of(setup, traces[key]) for key, setup in by_timing.items()}
        return [
            tuple(
                _figures(replays, setup, context, steady, startups[key])
                for context, steady in zip(contexts, seconds[key], strict=True)
            )
            for setup in setups
            for key in (timing_key(setup),)
        ]

    def _replays(self, setup: Setup, kinds: Collection[bool]) -> _Replays:
        """The step through the allocator."""
        run = self.run(setup) if self.job.trains else None
        if run is not None:
            requests = Requests(run)
            peaks = {kind: replay_periodic(requests, expandable=kind) for kind in kinds}
            few = 1 if setup.micro_batches >= MANY else setup.micro_batches
            return _Replays(run.steady_step(few), peaks)
        trace = self._whole_trace(setup)
        return _Replays(trace, {kind: _peaks_of(trace, expandable=kind) for kind in kinds})

    def _seconds(self, setup: Setup, trace: Trace) -> Sequence[float]:
        """Of the step on each GPU; its trace may have fewer micro-batches."""
        if setup.micro_batches >= MANY and self.job.trains:
            return seconds_of(self.timer, micro_batch_works(trace, setup.micro_batches))
        return self.timer(trace)

    def whole(self, asked: Sequence[tuple[Setup, Sequence[int]]]) -> list[list[Figures]]:
        """What each of these Setups, which have one trace, takes on each of these of the GPUs, simulated in
        full by the GPU's own policy: GPUs that run the same kernels may yet differ in the workspaces and the
        scratch of those. One rehearsal serves all whose buffers are as many."""
        policies = {gpu: policy_for(self.gpus[gpu], Software()) for _, gpus in asked for gpu in gpus}
        first, *further = dict.fromkeys(policies.values())
        traces = self._own_traces(asked[0][0], [first, *further])
        peaks: dict[tuple[int, bool], AllocatorPeaks] = {}
        contexts = self._contexts(traces[first])
        answers = []
        for setup, gpus in asked:
            trace, expandable = trace_under(setup, traces[first]), setup.expandable_segments
            startup, seconds = self.startup.of(setup, trace), self.timer(trace)
            figures = []
            for gpu in gpus:
                own = traces[policies[gpu]]
                if (id(own), expandable) not in peaks:
                    peaks[id(own), expandable] = _peaks_of(own, expandable=expandable)
                replays = _Replays(own, {expandable: peaks[id(own), expandable]})
                one = _figures(replays, setup, contexts[gpu], seconds[gpu], startup)
                figures.append(one._replace(peak_seconds=self._peak_seconds(gpu, trace)))
            answers.append(figures)
        return answers

    def _own_traces(self, setup: Setup, policies: Sequence[CudaPolicy]) -> dict[CudaPolicy, Trace]:
        """The whole trace by each of these policies, the same object where the buffers are the same."""
        plain = as_rehearsed(setup)
        steady = step_key(plain) in self._steady
        known = self._remember(
            ("own", step_key(plain)), lambda: self._own_trace(plain, policies[0], steady=steady)
        )
        traces: dict[CudaPolicy, Trace] = {}
        by_sizes: dict[Hashable, Trace] = {}
        for policy in policies:
            sizes = {} if policy == known.policy else known.sizes.get(policy)
            if sizes is None:
                traces[policy] = rehearse(self.job, plain, policy, steady=steady)
                continue
            key = tuple(sizes.items())
            if key not in by_sizes:
                by_sizes[key] = with_sizes(known.trace, sizes)
            traces[policy] = by_sizes[key]
        return traces

    def _own_trace(self, setup: Setup, policy: CudaPolicy, *, steady: bool) -> _OwnTrace:
        """The whole trace by this policy, compared with those of all GPUs, which may be asked about later."""
        policies = dict.fromkeys(policy_for(gpu, Software()) for gpu in self.gpus)
        module = self.job.model.module is not None  # whose code may ask for the GPU's capability
        further = [] if module else [other for other in policies if other != policy]
        compared = ComparedPolicy.of(policy, further)
        return _OwnTrace(policy, compared.sizes, rehearse(self.job, setup, compared, steady=steady))

    def _peak_seconds(self, gpu: int, trace: Trace) -> float:
        device = self.gpus[gpu]
        return model_peak_seconds(trace.kernels, device) if device else 0.0

    def verify(self, recipe: Recipe, figures: Figures, gpu: int = 0) -> FullCheck:
        """Whether simulating this recipe in full on this one of the GPUs gives these figures, and the doubts
        it has."""
        prediction = predict(self.job, recipe, gpu=self.gpus[gpu])
        footprint = prediction.footprint
        same = (
            footprint.requested_bytes,
            footprint.allocated_bytes,
            footprint.reserved_bytes,
            footprint.context_bytes,
        ) == figures[:4]
        return FullCheck(same, prediction.doubts, prediction.timing)

    def run(self, setup: Setup) -> PeriodicRun | None:
        """The training run under this Setup; None where its parts cannot be spliced. Raises
        `CannotBeRecorded` where it is to be recorded and waits for the device."""
        if setup.release:  # passes and update are one
            return None
        setup = as_rehearsed(setup)
        passes = self._whole_passes(as_written(setup, padded=bool(self.job.padding)))
        if setup.capture is not None:
            refuse_waits(passes.waits)
        gradients = passes.gradients, passes.shared
        key = ("update", update_key(setup), *gradients, tuple(passes.split.build))
        update = self._remember(key, lambda: rehearse_any_update(self.job, setup, self.policy, *gradients))
        join = splice if setup.capture is None else splice_captured
        run = join(passes, update, micro_batches=setup.micro_batches)
        if run is not None:
            self._steady.add(step_key(setup))
        return run

    def _whole_passes(self, setup: Setup) -> Part:
        def make() -> Part:
            # the first step of compiled layers times their kernels, which no second one does
            is_short = setup.compile is None and self._second_step_is_redundant(setup)
            record = short_passes if is_short else rehearse_passes
            asked = self.job, setup, self.policy
            few = passes_from_few_layers(*asked, record) if self.shallow_jobs.few else None
            part = record(*asked) if few is None else few
            return write_out(part) if is_short else part

        samples = self.job.batch_size // setup.micro_batches
        return self._remember(("passes", passes_key(setup), samples, setup.micro_batches > 1), make)

    def _second_step_is_redundant(self, setup: Setup) -> bool:
        """Whether such passes may be rehearsed briefly, tested on few layers and one sample each. What a step
        leaves behind does not depend on which of its layers are recomputed, once some are."""
        count = min(setup.micro_batches, MICRO_BATCHES)
        kind = replace(setup, checkpoint=setup.checkpoint and EVERY_LAYER)
        key = (passes_key(kind), count)
        if key not in self._redundant:
            job = self.shallow_jobs.smoke_test_job(setup, samples=count)
            if job is None:
                return False
            self._redundant[key] = second_step_is_redundant(
                job, replace(kind, micro_batches=count), self.policy
            )
        return self._redundant[key]

    def _whole_trace(self, setup: Setup) -> Trace:
        setup = as_rehearsed(setup)
        return self._remember(("whole", step_key(setup)), lambda: rehearse(self.job, setup, self.policy))

    def _remember(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """What `make` gave for this key; the longest unused goes when there are many."""
        if key not in self._whole:
            self._whole[key] = make()
        self._whole.move_to_end(key)
        if len(self._whole) > REMEMBERED_PARTS:
            self._whole.popitem(last=False)
        result: _Result = self._whole[key]
        return result


def _bounds_on_gpus(step: StepBounds, contexts: Sequence[int], least: Sequence[int]) -> tuple[Bound, ...]:
    """Those of a step on each GPU, with its context; `least` are the contexts of recomputing, which may
    choose another attention, without cuDNN's libraries."""
    unknown = [0.0] * len(contexts)
    return tuple(
        Bound(
            step.live_bytes + context,
            seconds,
            step.resting_bytes + without,
            step.layers_bytes + without,
            step.unkept_bytes + without,
            on_device,
            step.gradient_bytes,
            step.depth,
            step.outside_bytes + without,
            step.compiled_bytes + without,
            in_programs,
        )
        for context, without, seconds, on_device, in_programs in zip(
            contexts,
            least,
            step.seconds,
            step.device_seconds or unknown,
            step.compiled_seconds or unknown,
            strict=True,
        )
    )


def _peaks_of(trace: Trace, *, expandable: bool) -> AllocatorPeaks:
    after = replay(trace, expandable=expandable)
    return AllocatorPeaks(after.requested_peak, after.allocated_peak, after.reserved_peak)


def _figures(
    replays: _Replays, setup: Setup, context_bytes: int, steady_seconds: float, startup: StartupShare
) -> Figures:
    after = replays.by_segments[setup.expandable_segments]
    return Figures(
        **after._asdict(),
        context_bytes=context_bytes,
        seconds=steady_seconds + startup.share,
        once=startup.once,
        share=startup.share,
        doubts=replays.trace.doubts,
    )

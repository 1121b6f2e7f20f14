"""Compute lower bounds, and exact bytes and seconds, of recipes. They follow from cached simulations of
passes (forward and backward) and update.

`screen` computes *lower bounds* of a recipe's bytes and seconds. It simulates forward and backward passes on
models of few layers, with all sizes of micro-batch in one simulation. It simulates the optimizer update
likewise. `lower_bounds.py` derives the lower bound for all layers. Models whose layers do not repeat are
simulated in full.

`evaluate` computes *exact* bytes and seconds. It simulates passes and update with all layers and joins their
traces. The timer and the allocator replay the joined trace. Every number of a plan comes from this function.
Simulations take most of the time, and GPUs that run the same kernels share them. Each GPU has a separate CUDA
context and separate seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from snugfit.planning.cost.figures import Bound, Figures
from snugfit.planning.cost.lower_bounds import LowerBounds, StepBounds
from snugfit.planning.cost.periodic import (
    MIN_PERIODIC,
    AllocatorPeaks,
    Requests,
    micro_batch_works,
    replay_periodic,
)
from snugfit.planning.cost.same_trace import trace_under, with_sizes
from snugfit.planning.cost.shallow import ShallowJobs
from snugfit.planning.cost.short_passes import (
    MICRO_BATCHES,
    second_step_is_redundant,
    short_passes,
    write_out,
)
from snugfit.planning.cost.startup_share import ENDLESS_RUN, PlannedRun, StartupShare, StartupShares
from snugfit.planning.cost.timer import Timer, seconds_of
from snugfit.planning.step_key import as_rehearsed, as_written, passes_key, step_key, timing_key, update_key
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import ContextNeeds, common_policy, context_for, policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.prediction.seconds import model_peak_seconds
from snugfit.rehearsal.device.policy import ComparedPolicy
from snugfit.rehearsal.few_layers import passes_from_few_layers
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.splice import Part, rehearse_passes
from snugfit.rehearsal.step_parts import UnsupportedStep, parts_of
from snugfit.rehearsal.trace.trace import Mark, Trace

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import CudaPolicy
    from snugfit.rehearsal.trace.repeat import PeriodicRun
    from snugfit.results.prediction import Prediction
    from snugfit.results.step_seconds import StepSeconds
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup

_Result = TypeVar("_Result")

CACHED_PARTS = 48
"""Largest number of cached simulations of parts of a step, each of about ten megabytes. It exceeds the number
of different forward and backward passes in most searches.
"""


class _Replays(NamedTuple):
    trace: Trace
    """Trace (allocations and kernels) of a step after the first ones, possibly with fewer micro-batches."""
    by_segments: dict[bool, AllocatorPeaks]
    """Peaks of the CUDA allocator's bytes with expandable segments (True) and without (False)."""


class _OwnTrace(NamedTuple):
    policy: CudaPolicy
    """GPU properties (`CudaPolicy`) of the simulation."""
    sizes: Mapping[CudaPolicy, Mapping[tuple[str, int], int] | None]
    """Sizes in bytes of workspaces and temporary buffers on other GPUs (`ComparedPolicy`)."""
    trace: Trace


class FullCheck(NamedTuple):
    """Comparison of a recipe's bytes with those of its full simulation. The recipe's own bytes come from
    separately simulated passes and update.
    """

    is_same: bool
    """True if the full simulation gave the same bytes."""
    doubts: tuple[str, ...]
    timing: StepSeconds | None
    """Seconds of the fully simulated step; None if the GPU's rates (speeds of kernels) are unknown."""


class Parts:
    """Simulate recipes of one job for GPUs that run the same kernels. Passes (forward and backward) and
    updates are cached separately.
    """

    def __init__(
        self,
        job: Job,
        gpus: Sequence[Gpu | None],
        timer: Timer,
        *,
        shallow: bool = True,
        run: PlannedRun = ENDLESS_RUN,
    ) -> None:
        self.job, self.gpus, self.timer = job, gpus, timer
        self.startup = StartupShares(job, run)
        self.policy: CudaPolicy = common_policy(gpus, Software())
        self.shallow_jobs = ShallowJobs(job, few=shallow)
        self.lower_bounds = LowerBounds(self.shallow_jobs, self.policy, timer, self.startup)
        self._redundant: dict[Hashable, bool] = {}
        self._whole: OrderedDict[Hashable, Any] = OrderedDict()
        self._steady: set[Hashable] = set()
        """Keys of the traces whose third step equals the second, so that two steps suffice."""

    # ---- lower bounds ------------------------------------------------------------------------------------

    def screen(self, setups: Sequence[Setup]) -> list[tuple[Bound, ...] | UnsupportedStep]:
        """Return lower bounds of bytes and seconds for these Setups on each GPU, or the reason why a step
        cannot run.

        The Setups may differ only in micro-batches, optimizer, fp32 precision, data loading, allocator and
        CUDA graphs. Raises `SnugfitError` if one of them cannot be simulated.
        """
        # A job without an update is simulated as a whole, so its bytes and seconds are exact.
        if not self.job.trains:
            return self._exact_bounds(setups)
        bounds = self.lower_bounds.of(setups)
        self.startup.forget()
        # The size of the context depends on the loaded libraries, for which a trace with one mark and the
        # attention suffices.
        trace = Trace((), (), (Mark(0, 0, "backward"),), (), (), bounds.attention)
        contexts, least = self._contexts(trace), self._contexts(replace(trace, attention=()))
        return [
            step if isinstance(step, UnsupportedStep) else _bounds_on_gpus(step, contexts, least)
            for step in bounds.per_setup
        ]

    def _contexts(self, trace: Trace) -> list[int]:
        software, needs = Software(), ContextNeeds.of(trace)
        return [context_for(gpu, software, needs)[0] for gpu in self.gpus]

    def _exact_bounds(self, setups: Sequence[Setup]) -> list[tuple[Bound, ...] | UnsupportedStep]:
        """Return the bytes and seconds of these Setups on each GPU, from full simulations. Setups share a
        simulation if they have the same trace.
        """
        traces = {step_key(as_rehearsed(setup)): self._whole_trace(setup) for setup in setups}
        needed = {
            key: [trace.peak().nbytes + context for context in self._contexts(trace)]
            for key, trace in traces.items()
        }
        seconds: dict[Hashable, list[float]] = {}
        bounds: list[tuple[Bound, ...] | UnsupportedStep] = []
        for setup in setups:
            key = step_key(as_rehearsed(setup))
            timing = key, timing_key(setup)
            if timing not in seconds:
                timed = trace_under(setup, traces[key])
                share = self.startup.of(setup, timed).share
                seconds[timing] = [kernel_seconds + share for kernel_seconds in self.timer(timed)]
            bounds.append(tuple(map(Bound, needed[key], seconds[timing])))
        return bounds

    # ---- exact figures -----------------------------------------------------------------------------------

    def evaluate(self, setups: Sequence[Setup]) -> list[tuple[Figures, ...]]:
        """Return the exact bytes and seconds of these Setups on each GPU.

        They have the same trace, and differ only in allocator, fp32 precision and data loading.
        """
        replays = self._replays(setups[0], {setup.expandable_segments for setup in setups})
        launched = parts_of(setups[0]).launched_kernels(setups[0], replays.trace.kernels)
        contexts = self._contexts(replace(replays.trace, kernels=launched))
        by_timing = {timing_key(setup): setup for setup in setups}
        traces = {key: trace_under(setup, replays.trace) for key, setup in by_timing.items()}
        by_kernels = {id(trace.kernels): trace for trace in traces.values()}  # most traces share them
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
        """Return the step's trace with the peaks of memory in the caching allocator. `kinds` selects replays
        with expandable segments (True) or without (False).
        """
        run = self.run(setup) if self.job.trains else None
        if run is not None:
            requests = Requests(run)
            peaks = {kind: replay_periodic(requests, expandable=kind) for kind in kinds}
            few = 1 if setup.micro_batches >= MIN_PERIODIC else setup.micro_batches
            return _Replays(run.steady_step(few), peaks)
        trace = self._whole_trace(setup)
        return _Replays(trace, {kind: _peaks_of(trace, expandable=kind) for kind in kinds})

    def _seconds(self, setup: Setup, trace: Trace) -> Sequence[float]:
        """Return the seconds of the step on each GPU; its trace may have fewer micro-batches."""
        if setup.micro_batches >= MIN_PERIODIC and self.job.trains:
            return seconds_of(self.timer, micro_batch_works(trace, setup.micro_batches))
        return self.timer(trace)

    def whole(self, setups_by_gpus: Sequence[tuple[Setup, Sequence[int]]]) -> list[list[Figures]]:
        """Return the exact bytes and seconds of these Setups on the given GPUs, each by a full simulation for
        that GPU. The Setups have the same trace. GPUs that run the same kernels may differ in the sizes of
        workspaces and temporary buffers. One simulation serves all GPUs with the same number of buffers.
        """
        policies = {gpu: policy_for(self.gpus[gpu], Software()) for _, gpus in setups_by_gpus for gpu in gpus}
        first, *further = dict.fromkeys(policies.values())
        traces = self._own_traces(setups_by_gpus[0][0], [first, *further])
        peaks: dict[tuple[int, bool], AllocatorPeaks] = {}
        contexts = self._contexts(traces[first])
        answers = []
        for setup, gpus in setups_by_gpus:
            trace, expandable = trace_under(setup, traces[first]), setup.expandable_segments
            startup, seconds = self.startup.of(setup, trace), self.timer(trace)
            figures = []
            for gpu in gpus:
                own = traces[policies[gpu]]
                if (id(own), expandable) not in peaks:
                    peaks[id(own), expandable] = _peaks_of(own, expandable=expandable)
                replays = _Replays(own, {expandable: peaks[id(own), expandable]})
                result = _figures(replays, setup, contexts[gpu], seconds[gpu], startup)
                figures.append(result._replace(peak_seconds=self._peak_seconds(gpu, trace)))
            answers.append(figures)
        return answers

    def _own_traces(self, setup: Setup, policies: Sequence[CudaPolicy]) -> dict[CudaPolicy, Trace]:
        """Return the fully simulated trace for each of these GPU policies. It is the same object if all
        buffers have the same sizes.
        """
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
        """Simulate the full step for one GPU policy. Return its trace, and the sizes of its buffers on the
        other GPUs.
        """
        policies = dict.fromkeys(policy_for(gpu, Software()) for gpu in self.gpus)
        module = self.job.model.module is not None  # the module's code may read the GPU's compute capability
        further = [] if module else [other for other in policies if other != policy]
        compared = ComparedPolicy.of(policy, further)
        return _OwnTrace(policy, compared.sizes, rehearse(self.job, setup, compared, steady=steady))

    def _peak_seconds(self, gpu: int, trace: Trace) -> float:
        device = self.gpus[gpu]
        return model_peak_seconds(trace.kernels, device) if device else 0.0

    def predict(self, recipe: Recipe, options: Mapping[str, Any], gpu: int = 0) -> Prediction:
        """Simulate this recipe in full for one GPU, and return the prediction. `options` are further
        arguments of `predict`."""
        return predict(self.job, recipe, gpu=self.gpus[gpu], **options)

    def verify(self, recipe: Recipe, figures: Figures, gpu: int = 0) -> FullCheck:
        """Simulate this recipe in full for one GPU, and compare the bytes with `figures`. Return the
        comparison with warnings and seconds."""
        prediction = self.predict(recipe, {}, gpu)
        footprint = prediction.footprint
        # The first four fields of the figures are bytes.
        same = (
            footprint.requested_bytes,
            footprint.allocated_bytes,
            footprint.reserved_bytes,
            footprint.context_bytes,
        ) == figures[:4]
        return FullCheck(same, prediction.doubts, prediction.timing)

    def run(self, setup: Setup) -> PeriodicRun | None:
        """Return the step's trace with these settings, joined from its simulated passes and update. Return
        None if they cannot be joined. Raises `UnsupportedStep` if the step cannot run.
        """
        parts = parts_of(setup)
        if not parts.can_be_spliced:
            return None
        setup = as_rehearsed(setup)
        passes = self._whole_passes(as_written(setup, padded=bool(self.job.padding)))
        parts.refuse(setup, passes.waits)
        gradients = passes.gradients, passes.shared
        key = ("update", update_key(setup), *gradients, tuple(passes.split.build))
        update = self._remember(key, lambda: parts.rehearse_update(self.job, setup, self.policy, *gradients))
        run = parts.splice(passes, update, micro_batches=setup.micro_batches)
        if run is not None:
            self._steady.add(step_key(setup))
        return run

    def _whole_passes(self, setup: Setup) -> Part:
        def make() -> Part:
            # the first step of compiled layers times their kernels, and a second step does not
            is_short = setup.lowering is None and self._second_step_is_redundant(setup)
            record = short_passes if is_short else rehearse_passes
            arguments = self.job, setup, self.policy
            few = passes_from_few_layers(*arguments, record) if self.shallow_jobs.few else None
            part = record(*arguments) if few is None else few
            return write_out(part) if is_short else part

        samples = setup.per_piece(self.job.batch_size)
        return self._remember(("passes", passes_key(setup), samples, setup.micro_batches > 1), make)

    def _second_step_is_redundant(self, setup: Setup) -> bool:
        """Return True if one simulated step of such forward and backward passes is enough. This is tested on
        few layers with one sample per micro-batch. The result is cached for any number of recomputed layers.
        """
        count = min(setup.micro_batches, MICRO_BATCHES)
        kind = setup.with_equal_layers()
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
        """Return the cached result of `make` for this key; the least recently used entry is dropped."""
        if key not in self._whole:
            self._whole[key] = make()
        self._whole.move_to_end(key)
        if len(self._whole) > CACHED_PARTS:
            self._whole.popitem(last=False)
        result: _Result = self._whole[key]
        return result


def _bounds_on_gpus(step: StepBounds, contexts: Sequence[int], least: Sequence[int]) -> tuple[Bound, ...]:
    """Return a step's lower bounds on each GPU, with the CUDA context's bytes added. `least` are the smallest
    contexts, without cuDNN's libraries, since recomputation may choose another attention kernel.
    """
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

"""Lower bounds of the bytes and seconds of recipes, from simulations of models with few layers.

Forward and backward are simulated for two numbers of layers, with all sizes of micro-batch in one simulation.
Each optimizer update is simulated likewise. The straight line through the allocated bytes and seconds of both
gives those of the whole model. At each moment of a step, the bytes grow linearly with the layers. Their peak
is a maximum of linear functions and so convex, and the line never exceeds it.

Passes (forward and backward) and updates are simulated with separate numbers of layers. Checkpointing of
several layers at once needs deeper models, updates never do. A `ComposableTimer` joins the seconds of passes
and updates for all layers, for many optimizers at once. Any other timer times whole steps with few layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.planning.cost.batch_sizes import (
    PassProfile,
    PassProfiles,
    UpdateProfile,
    rehearse_sizes,
    update_of,
)
from snugfit.planning.cost.lowered import lowered_kinds, uncompiled_work
from snugfit.planning.cost.queue import QueueSegment, extrapolate_depth, join, stack
from snugfit.planning.cost.same_trace import kernels_under
from snugfit.planning.cost.shallow import ShallowJob, ShallowJobs, linear_extrapolate
from snugfit.planning.cost.short_passes import MICRO_BATCHES
from snugfit.planning.cost.timer import ComposableTimer, Timer, seconds_of
from snugfit.planning.step_key import (
    adapters_key,
    as_written,
    launches_otherwise,
    timing_key,
    update_key,
    with_update_of,
)
from snugfit.rehearsal.step_parts import UnsupportedStep, parts_of
from snugfit.rehearsal.trace.trace import Work

if TYPE_CHECKING:
    from snugfit.planning.cost.startup_share import StartupShares
    from snugfit.rehearsal.device.policy import CudaPolicy
    from snugfit.techniques.setup import Setup


def in_layers(module: str) -> bool:
    """Return True if a module's name is that of a repeated layer (`layers.*`), or of a module in one."""
    return "*" in module


def outside_layers(module: str) -> bool:
    """Return True if a module is outside the repeated layers, such as the model's head."""
    return not in_layers(module)


@dataclass(frozen=True)
class DepthFit:
    """Linear extrapolation of bytes or seconds from simulations with few layers to the model's full number of
    layers.
    """

    depths: Sequence[ShallowJob]
    layers: int
    """Number of layers of the whole model."""

    def extrapolate(self, values: Sequence[Any]) -> Any:
        """Return the value for all layers of the model, on the line through `values` for few layers."""
        return self.value_at(self.layers, values)

    def value_at(self, layers: int, values: Sequence[Any]) -> Any:
        """Return the value for this number of layers, on the line through `values` for few layers."""
        return linear_extrapolate([shallow.layers for shallow in self.depths], values, layers)


class StepBounds(NamedTuple):
    """Lower bounds of a step's bytes and seconds. The bytes do not include the CUDA context."""

    live_bytes: int
    """Peak of allocated bytes."""
    seconds: Sequence[float]
    """Seconds of the step on each GPU."""
    resting_bytes: int
    """Peak of allocated bytes during the optimizer update."""
    layers_bytes: int
    """Peak of allocated bytes during the optimizer update or while a layer runs."""
    unkept_bytes: int
    """Peak of allocated bytes in forward and backward, without the activations that layers keep for backward.
    """
    device_seconds: Sequence[float]
    """Seconds in which each GPU runs kernels."""
    gradient_bytes: int
    """Bytes of gradients at the end of the backward pass."""
    outside_bytes: int
    """Peak of allocated bytes while no layer runs, without the activations of layers that are not recomputed.
    """
    compiled_bytes: int
    """Peak of allocated bytes if the layers are compiled."""
    compiled_seconds: Sequence[float]
    """Seconds, on each GPU, of the kernels that remain in a step with compiled layers."""


class Bounds(NamedTuple):
    """Lower bounds of bytes and seconds of recipes that have the same forward and backward passes."""

    per_setup: Sequence[StepBounds | UnsupportedStep]
    """Lower bounds for each Setup (a recipe's settings), or the reason why its step cannot run."""
    attention: tuple[str, ...]
    """Names of the attention kernels that the step uses."""


class LowerBounds:
    """Compute lower bounds of bytes and seconds for a job's recipes, from simulated models with few
    layers."""

    def __init__(
        self, shallow_jobs: ShallowJobs, policy: CudaPolicy, timer: Timer, startup: StartupShares
    ) -> None:
        self.shallow_jobs, self.policy, self.timer, self.startup = shallow_jobs, policy, timer, startup
        self._updates: dict[Hashable, UpdateProfile] = {}
        self._gradients: dict[Hashable, tuple[int, ...]] = {}
        self._segments: dict[Hashable, list[QueueSegment] | None] = {}

    def of(self, setups: Sequence[Setup]) -> Bounds:
        """Return the lower bounds of bytes and seconds for these Setups (settings of recipes). They have the
        same forward and backward passes, except for the micro-batch size.

        Raises `SnugfitError` if one of them cannot be simulated.
        """
        passes = _PassesBounds(self, setups)
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, setup in enumerate(setups):
            groups[setup.micro_batches, timing_key(setup)].append(number)
        bounds: dict[int, StepBounds | UnsupportedStep] = {}
        for numbers in groups.values():
            # Many Setups of a group have equal updates, so each update is simulated once.
            by_update = {update_key(setups[number]): setups[number] for number in numbers}
            refused = {
                key: reason
                for key, candidate in by_update.items()
                if (reason := passes.why_unsupported(candidate))
            }
            by_update = {key: candidate for key, candidate in by_update.items() if key not in refused}
            seconds = passes.seconds(list(by_update.values())) if by_update else ()
            by_key: dict[Hashable, StepBounds | UnsupportedStep] = {
                key: passes.bounds_of(setup, candidate)
                for (key, setup), candidate in zip(by_update.items(), seconds, strict=True)
            }
            bounds |= {number: (by_key | refused)[update_key(setups[number])] for number in numbers}
        return Bounds([bounds[number] for number in range(len(setups))], passes.by_depth[0].attention)

    def depth_fit(self, setup: Setup) -> DepthFit:
        """Return the models with few layers to simulate for this Setup, as points of a linear
        extrapolation."""
        return DepthFit(self.shallow_jobs.of(setup), self.shallow_jobs.layers(setup))

    def update(self, setup: Setup, shallow: ShallowJob, passes: PassProfiles | None = None) -> UpdateProfile:
        """Return the cached bytes and kernels of the optimizer update of a model with few layers. The
        parameters with gradients are those in `passes`, if given.
        """
        # Weights without a gradient have no optimizer state, so the update depends on the passes.
        gradients = passes.gradients if passes else self._with_gradients(setup, shallow)
        key = (update_key(setup), shallow.layers, gradients)
        if key not in self._updates:
            shallow_setup = with_update_of(shallow.setup, setup)
            update = parts_of(shallow_setup).rehearse_update(
                shallow.job, shallow_setup, self.policy, gradients
            )
            self._updates[key] = update_of(update)
        return self._updates[key]

    def update_segments(
        self, setup: Setup, fit: DepthFit, timer: ComposableTimer
    ) -> list[QueueSegment] | None:
        """Return the queue segments (seconds between two waits of the host) of this Setup's optimizer update
        for all layers.

        Return None if its waits differ between numbers of layers. The cached result serves recipes with any
        forward and backward passes.
        """
        key = update_key(setup), timing_key(setup), tuple(shallow.layers for shallow in fit.depths)
        if key not in self._segments:
            works = [self.update(setup, shallow).work for shallow in fit.depths]
            changed = [work._replace(kernels=kernels_under(setup, work.kernels)) for work in works]
            self._segments[key] = extrapolate_depth([timer.segments(w) for w in changed], fit.extrapolate)
        return self._segments[key]

    def _with_gradients(self, setup: Setup, shallow: ShallowJob) -> tuple[int, ...]:
        """Return the indices of parameters with gradients. They depend only on the model and its adapters, so
        one sample is simulated."""
        key = (adapters_key(setup), shallow.layers)
        if key not in self._gradients:
            single = replace(shallow.job, batch_size=1)
            passes = rehearse_sizes(single, shallow.setup, self.policy, (), whole=True)
            self._gradients[key] = passes.gradients
        return self._gradients[key]


class _PassesBounds:
    """Lower bounds of bytes and seconds of steps with the same forward and backward passes, from models with
    few layers.
    """

    def __init__(self, bounds: LowerBounds, setups: Sequence[Setup]) -> None:
        job, first = bounds.shallow_jobs.job, setups[0]
        # A step with a single micro-batch has other tensors than one with several, which add to existing
        # gradients.
        sizes = {job.batch_size // setup.micro_batches for setup in setups if setup.micro_batches > 1}
        whole = any(setup.micro_batches == 1 for setup in setups)
        self.bounds, self.batch_size = bounds, job.batch_size
        written = as_written(first, padded=bool(job.padding))
        self.fit = bounds.depth_fit(written)
        # Recomputation of spans needs deeper models. Updates never do, so their depths are as small as
        # possible.
        self.update_fit = bounds.depth_fit(replace(written, checkpoint=None))
        self.by_depth = [
            rehearse_sizes(shallow.job, shallow.setup, bounds.policy, sizes, whole=whole)
            for shallow in self.fit.depths
        ]
        self._rises: dict[Hashable, float] = {}
        self._works: dict[Hashable, tuple[Work, Work]] = {}
        self._device_s: dict[Hashable, Any] = {}
        self._left: dict[int, tuple[Work, Work]] = {}

    def bounds_of(self, setup: Setup, seconds: Sequence[float]) -> StepBounds:
        """Return all lower bounds of a step with these settings: the given seconds, and the computed
        bytes."""
        resting = self.resting(setup)
        return StepBounds(
            live_bytes=max(self.peak_bytes(setup), resting),
            seconds=seconds,
            resting_bytes=resting,
            layers_bytes=max(self.in_layers(setup), resting),
            unkept_bytes=self.unkept(setup),
            device_seconds=self.device_seconds(setup),
            gradient_bytes=int(self._gradient_bytes(setup)),
            outside_bytes=max(self.outside(setup), resting),
            compiled_bytes=max(self.outside(setup), self.in_programs(setup), resting),
            compiled_seconds=self.compiled_seconds(setup),
        )

    def why_unsupported(self, setup: Setup) -> UnsupportedStep | None:
        """Return the error with the reason why a step with these settings cannot run; None if it can."""
        parts = parts_of(setup)
        try:
            for profile in self._profiles(setup):
                parts.refuse(setup, len(profile.first.waits) + len(profile.further.waits))
            for shallow in self.update_fit.depths:
                self.bounds.update(setup, shallow)
        except UnsupportedStep as reason:
            return reason
        return None

    # ---- bytes -------------------------------------------------------------------------------------------

    def peak_bytes(self, setup: Setup) -> int:
        """Return a lower bound of the peak of allocated bytes in forward and backward, including weights and
        optimizer states.
        """
        return int(self._resting_bytes(setup) + self._rise(setup))

    def in_layers(self, setup: Setup) -> int:
        """Return a lower bound of the peak of allocated bytes while a repeated layer runs."""
        return int(self._resting_bytes(setup) + self._rise(setup, in_layers))

    def unkept(self, setup: Setup) -> int:
        """Return a lower bound of the peak bytes in forward and backward, without the activations that each
        layer keeps for backward.
        """
        # One depth allows no extrapolation, and 0 is a valid lower bound.
        return (
            int(self._resting_bytes(setup) + self._rise(setup, layers=0)) if len(self.fit.depths) > 1 else 0
        )

    def outside(self, setup: Setup) -> int:
        """Return a lower bound of the peak bytes while no layer runs, without the activations that each layer
        keeps. If every layer is recomputed, the inputs of the layers count.
        """
        if len(self.fit.depths) < 2:
            return 0
        layers = None if setup.keeps_only_inputs else 0
        return int(self._resting_bytes(setup) + self._rise(setup, outside_layers, layers=layers))

    def in_programs(self, setup: Setup) -> int:
        """Return a lower bound of the allocated bytes at the start of the backward pass if the layers are
        compiled.
        """
        left_bytes = [
            sum(n for name, n in profile.kept_bytes.items() if lowered_kinds().is_left(name))
            for profile in self._profiles(setup)
        ]
        return int(self._resting_bytes(setup) + self.fit.extrapolate(left_bytes))

    def resting(self, setup: Setup) -> int:
        """Return a lower bound of the peak of allocated bytes during the optimizer update."""
        updates = [self.bounds.update(setup, shallow) for shallow in self.update_fit.depths]
        in_update = self.update_fit.extrapolate([update.peak_increase for update in updates])
        return int(self._resting_bytes(setup) + self._gradient_bytes(setup) + in_update)

    def _gradient_bytes(self, setup: Setup) -> float:
        """Return the bytes of all gradients at the end of the backward pass."""
        return float(self.fit.extrapolate([profile.residual_bytes for profile in self._profiles(setup)]))

    def _resting_bytes(self, setup: Setup) -> float:
        """Return the allocated bytes between steps: weights, optimizer states and permanent allocations."""
        updates = [self.bounds.update(setup, shallow) for shallow in self.update_fit.depths]
        # Passes and update are simulated at different depths, so each is extrapolated separately.
        standing = self.fit.extrapolate([passes.baseline_bytes for passes in self.by_depth])
        return float(standing + self.update_fit.extrapolate([update.state_bytes for update in updates]))

    def _profiles(self, setup: Setup) -> list[PassProfile]:
        """Return the profiles (bytes and kernels) of forward and backward with these settings, one for each
        number of simulated layers."""
        samples, count = self.batch_size // setup.micro_batches, setup.micro_batches
        profiles = [passes.by_samples[samples] if count > 1 else passes.whole for passes in self.by_depth]
        return [profile for profile in profiles if profile is not None]

    def _rise(
        self, setup: Setup, among: Callable[[str], bool] | None = None, *, layers: int | None = None
    ) -> float:
        """Return a lower bound of the peak increase of allocated bytes in forward and backward.

        It is the maximum over modules, each extrapolated to all layers, or to `layers` layers. `among`
        selects modules by name.
        """
        key, at = (setup.micro_batches, among, layers), self.fit.layers if layers is None else layers
        if key not in self._rises:
            rises = [profile.peak_increase for profile in self._profiles(setup)]
            # Modules that exist at one depth only cannot be extrapolated.
            common = set(rises[0]).intersection(*rises)
            common = {name for name in common if among is None or among(name)}
            lines = (self.fit.value_at(at, [by_module[name] for by_module in rises]) for name in common)
            # The maximum of the extrapolated lines is at most the true peak, which is convex in the depth.
            self._rises[key] = max(lines, default=0)
        return self._rises[key]

    # ---- seconds -----------------------------------------------------------------------------------------

    def seconds(self, setups: Sequence[Setup]) -> Iterator[Sequence[float]]:
        """Yield, for each Setup, a lower bound of the step's seconds on each GPU, with a share of the run's
        start-up. The Setups differ only in the optimizer update.
        """
        timer = self.bounds.timer
        known: Mapping[int, Sequence[float]] = {}
        if isinstance(timer, ComposableTimer):
            known = self._by_segments(setups, timer)
        for number, setup in enumerate(setups):
            # The shallowest step suffices for the start-up, of which this is a lower bound.
            works = self._works_of(setup, self._profiles(setup)[0], self.update_fit.depths[0])
            share = self.bounds.startup.least_share(setup, works)
            yield [seconds + share for seconds in known.get(number) or self._by_depth(setup)]

    def device_seconds(self, setup: Setup) -> Sequence[float]:
        """Return the seconds of a step in which each GPU runs kernels; empty if the timer cannot compute
        them.
        """
        return self._device_seconds(setup, _whole_work)

    def compiled_seconds(self, setup: Setup) -> Sequence[float]:
        """Return, by GPU, the seconds of those kernels of a step that remain with torch.compile. Empty if the
        timer cannot compute them, and for a step that is itself compiled or recorded.
        """
        if setup.lowering is not None or launches_otherwise(setup):
            return ()
        return self._device_seconds(setup, self._library_kernels)

    def _device_seconds(self, setup: Setup, part: Callable[[Work], Work]) -> Sequence[float]:
        """Return the seconds in which each GPU runs the kernels that `part` selects, plus those of the
        update.
        """
        timer = self.bounds.timer
        if not isinstance(timer, ComposableTimer):
            return ()

        def line(fit: DepthFit, works: Sequence[Work]) -> Any:
            return fit.extrapolate([timer.device_seconds(work) for work in works])

        key = setup.micro_batches, timing_key(setup), part
        if key not in self._device_s:
            profiles = self._profiles(setup)
            first, further = (
                line(self.fit, [part(self._under(setup, getattr(profile, name))) for profile in profiles])
                for name in ("first", "further")
            )
            # Each further micro-batch takes equal seconds, since the gradients exist by then.
            self._device_s[key] = first + (setup.micro_batches - 1) * further
        updates = [self.bounds.update(setup, shallow).work for shallow in self.update_fit.depths]
        updates = [self._under(setup, work) for work in updates]
        seconds: list[float] = (self._device_s[key] + line(self.update_fit, updates)).tolist()
        return seconds

    def _library_kernels(self, work: Work) -> Work:
        """Return the kernels that compiled layers launch too, such as matrix products. The result is cached,
        since timers identify work by its id.
        """
        if id(work) not in self._left:
            # The entry holds the original too, so that its id is not reused by another object.
            self._left[id(work)] = work, uncompiled_work(work)
        return self._left[id(work)][1]

    def _works_of(
        self, setup: Setup, profile: PassProfile, shallow: ShallowJob, passes: PassProfiles | None = None
    ) -> list[Work]:
        """Return the kernels of a step with few layers: those of the first micro-batch, of each further one,
        and of the update.
        """
        update = self.bounds.update(setup, shallow, passes)
        return [self._under(setup, work) for work in (profile.first, profile.further, update.work)]

    def _by_segments(self, setups: Sequence[Setup], timer: ComposableTimer) -> Mapping[int, Sequence[float]]:
        """Return the seconds of a step on each GPU, by index of the Setup. They follow from the queue
        segments of passes and updates for all layers. Setups whose host waits differ between numbers of
        layers are omitted.
        """
        setup = setups[0]

        def at_depth(works: Sequence[Work]) -> list[QueueSegment] | None:
            by_depth = [timer.segments(self._under(setup, work)) for work in works]
            return extrapolate_depth(by_depth, self.fit.extrapolate)

        profiles = self._profiles(setup)
        first = at_depth([profile.first for profile in profiles])
        further = at_depth([profile.further for profile in profiles])
        updates = [self.bounds.update_segments(candidate, self.update_fit, timer) for candidate in setups]
        seconds: dict[int, Sequence[float]] = {}
        if first is None or further is None:
            return seconds
        counts = few(setup.micro_batches)
        # Updates with equal numbers of segments are simulated together as arrays.
        for same in _by_length(updates):
            lasts = stack(list(same.values()))
            by_count = [timer.simulate(join([first, *[further] * (n - 1), lasts])) for n in counts]
            # From some number on, each further micro-batch takes equal seconds, so two counts determine a
            # line.
            by_setup = linear_extrapolate(counts, by_count, setup.micro_batches)
            seconds |= zip(same, by_setup.tolist(), strict=True)
        return seconds

    def _by_depth(self, setup: Setup) -> Sequence[float]:
        """Return the seconds of a step on each GPU, extrapolated from simulations of whole steps with few
        layers.
        """
        counts, depths = few(setup.micro_batches), []
        for shallow, profile, passes in zip(
            self.fit.depths, self._profiles(setup), self.by_depth, strict=True
        ):
            first, further, last = self._works_of(setup, profile, shallow, passes)
            by_count = [seconds_of(self.bounds.timer, [first, *[further] * (n - 1), last]) for n in counts]
            by_gpu = zip(*by_count, strict=True)
            depths.append([linear_extrapolate(counts, seconds, setup.micro_batches) for seconds in by_gpu])
        return [self.fit.extrapolate(seconds) for seconds in zip(*depths, strict=True)]

    def _under(self, setup: Setup, work: Work) -> Work:
        key = timing_key(setup), id(work)
        if key not in self._works:
            changed = kernels_under(setup, work.kernels)
            changed_work = work if changed is work.kernels else work._replace(kernels=changed)
            self._works[key] = (
                work,
                changed_work,
            )  # by id; the entry keeps the work alive, so its id stays unique
        return self._works[key][1]


def _whole_work(work: Work) -> Work:
    return work


def few(micro_batches: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches to simulate: the given one, or two small ones for an
    extrapolation."""
    few_are_enough = micro_batches > MICRO_BATCHES + 1
    return (MICRO_BATCHES, MICRO_BATCHES + 1) if few_are_enough else (micro_batches,)


def _by_length(
    updates: Sequence[Sequence[QueueSegment] | None],
) -> list[dict[int, Sequence[QueueSegment]]]:
    """Group the queue segments of several optimizer updates by their number. In each group, they have the
    index of their update as key.
    """
    groups: dict[int, dict[int, Sequence[QueueSegment]]] = defaultdict(dict)
    for number, segments in enumerate(updates):
        if segments is not None:
            groups[len(segments)][number] = segments
    return list(groups.values())

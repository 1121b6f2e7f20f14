"""Lower bounds of what Setups take, from models of few layers.

Passes are rehearsed on two of them, all sizes of micro-batch in one rehearsal, and so is each update; live
bytes and seconds of two depths give those of the whole depth, by the straight line through them. Every moment
of a step grows evenly with the layers, and the worst moment is the largest of them: a convex figure, of which
that line is never more than the truth.

Passes and updates have depths of their own: passes that are recomputed in spans need deeper models, updates
never do. Where a timer composes pieces of steps, their segments are joined at the whole depth, those of all
optimizers at once; any other timer is asked about whole steps of few layers.
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
from snugfit.planning.cost.compiled_work import is_left, left_by_compilers
from snugfit.planning.cost.queue import QueueSegment, extrapolate_depth, join, stack
from snugfit.planning.cost.same_trace import kernels_under
from snugfit.planning.cost.shallow import ShallowJob, ShallowJobs, linear_extrapolate
from snugfit.planning.cost.short_passes import MICRO_BATCHES
from snugfit.planning.cost.timer import ComposableTimer, Timer, seconds_of
from snugfit.planning.step_key import adapters_key, as_written, timing_key, update_key
from snugfit.rehearsal.captured_parts import CannotBeRecorded, refuse_waits, rehearse_any_update
from snugfit.rehearsal.trace.trace import Work
from snugfit.techniques.setup import EVERY_LAYER

if TYPE_CHECKING:
    from snugfit.planning.cost.startup_share import StartupShares
    from snugfit.rehearsal.device.policy import CudaPolicy
    from snugfit.techniques.setup import Setup


def in_layers(module: str) -> bool:
    """Whether a name of `PassProfile.peak_increase` is of a module that is repeated."""
    return "*" in module


def outside_layers(module: str) -> bool:
    """Whether such a name is of a module that is not repeated."""
    return not in_layers(module)


@dataclass(frozen=True)
class DepthFit:
    """What rehearsals of some depths say of the whole one."""

    depths: Sequence[ShallowJob]
    layers: int
    """Of the whole depth."""

    def extrapolate(self, values: Sequence[Any]) -> Any:
        """The value at the whole depth, on the line through the values at these depths."""
        return self.value_at(self.layers, values)

    def value_at(self, layers: int, values: Sequence[Any]) -> Any:
        """The value with so many layers, on the line through the values at these depths."""
        return linear_extrapolate([shallow.layers for shallow in self.depths], values, layers)


class StepBounds(NamedTuple):
    """The least that a step takes."""

    live_bytes: int
    """At the worst moment."""
    seconds: Sequence[float]
    """Of the step, on each GPU."""
    resting_bytes: int
    """Live at the worst moment of the update."""
    layers_bytes: int
    """Live at the worst moment of the update or of a layer."""
    unkept_bytes: int
    """Live at the worst moment of the passes but for what layers keep."""
    device_seconds: Sequence[float]
    """That each GPU works."""
    gradient_bytes: int
    """That the passes leave to the update."""
    depth: int
    """Layers of each stack; 0 where they do not repeat."""
    outside_bytes: int
    """Live at the worst moment outside layers but for what layers keep that are not recomputed."""
    compiled_bytes: int
    """Live at the worst moment if its layers were compiled."""
    compiled_seconds: Sequence[float]
    """That each GPU works for what is left where layers are compiled."""


class Bounds(NamedTuple):
    """The least that some Setups take."""

    per_setup: Sequence[StepBounds | CannotBeRecorded]
    """Why there are none, of steps that are to be recorded and cannot be."""
    attention: tuple[str, ...]
    """Which attention kernels were chosen."""


class LowerBounds:
    """The least that Setups of one job take."""

    def __init__(
        self, shallow_jobs: ShallowJobs, policy: CudaPolicy, timer: Timer, startup: StartupShares
    ) -> None:
        self.shallow_jobs, self.policy, self.timer, self.startup = shallow_jobs, policy, timer, startup
        self._updates: dict[Hashable, UpdateProfile] = {}
        self._gradients: dict[Hashable, tuple[int, ...]] = {}
        self._segments: dict[Hashable, list[QueueSegment] | None] = {}

    def of(self, setups: Sequence[Setup]) -> Bounds:
        """The least that each of these takes, which share their passes but for the size of a micro-batch.
        Raises `SnugfitError` where one of them cannot be rehearsed."""
        passes = _PassesBounds(self, setups)
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, setup in enumerate(setups):
            groups[setup.micro_batches, timing_key(setup)].append(number)
        bounds: dict[int, StepBounds | CannotBeRecorded] = {}
        for numbers in groups.values():
            by_update = {update_key(setups[number]): setups[number] for number in numbers}
            refused = {key: why for key, one in by_update.items() if (why := passes.why_not_recorded(one))}
            by_update = {key: one for key, one in by_update.items() if key not in refused}
            seconds = passes.seconds(list(by_update.values())) if by_update else ()
            by_key: dict[Hashable, StepBounds | CannotBeRecorded] = {
                key: passes.bounds_of(setup, one)
                for (key, setup), one in zip(by_update.items(), seconds, strict=True)
            }
            bounds |= {number: (by_key | refused)[update_key(setups[number])] for number in numbers}
        return Bounds([bounds[number] for number in range(len(setups))], passes.by_depth[0].attention)

    def depth_fit(self, setup: Setup) -> DepthFit:
        """The depths on which such a step is rehearsed."""
        return DepthFit(self.shallow_jobs.of(setup), self.shallow_jobs.layers(setup))

    def update(self, setup: Setup, shallow: ShallowJob, passes: PassProfiles | None = None) -> UpdateProfile:
        """This Setup's update at this depth, at which these passes were rehearsed, if any were."""
        gradients = passes.gradients if passes else self._with_gradients(setup, shallow)
        key = (update_key(setup), shallow.layers, gradients)
        if key not in self._updates:
            asked = replace(shallow.setup, optimizer=setup.optimizer, capture=setup.capture)
            self._updates[key] = update_of(rehearse_any_update(shallow.job, asked, self.policy, gradients))
        return self._updates[key]

    def update_segments(
        self, setup: Setup, fit: DepthFit, timer: ComposableTimer
    ) -> list[QueueSegment] | None:
        """Those of this Setup's update at the whole depth; None where it does not wait alike at every depth.
        Updates have depths of their own, so one answer serves all passes."""
        key = update_key(setup), timing_key(setup), tuple(shallow.layers for shallow in fit.depths)
        if key not in self._segments:
            works = [self.update(setup, shallow).work for shallow in fit.depths]
            changed = [work._replace(kernels=kernels_under(setup, work.kernels)) for work in works]
            self._segments[key] = extrapolate_depth([timer.segments(w) for w in changed], fit.extrapolate)
        return self._segments[key]

    def _with_gradients(self, setup: Setup, shallow: ShallowJob) -> tuple[int, ...]:
        """Which parameters have gradients: the model and its adapters decide, so one sample tells."""
        key = (adapters_key(setup), shallow.layers)
        if key not in self._gradients:
            one = replace(shallow.job, batch_size=1)
            passes = rehearse_sizes(one, shallow.setup, self.policy, (), whole=True)
            self._gradients[key] = passes.gradients
        return self._gradients[key]


class _PassesBounds:
    """The passes of some Setups on few layers, and the steps that they are a part of."""

    def __init__(self, bounds: LowerBounds, setups: Sequence[Setup]) -> None:
        job, first = bounds.shallow_jobs.job, setups[0]
        sizes = {job.batch_size // setup.micro_batches for setup in setups if setup.micro_batches > 1}
        whole = any(setup.micro_batches == 1 for setup in setups)
        self.bounds, self.batch_size = bounds, job.batch_size
        written = as_written(first, padded=bool(job.padding))
        self.fit = bounds.depth_fit(written)
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
        """The least that such a step takes, which takes so long by the line through its depths."""
        resting = self.resting(setup)
        return StepBounds(
            live_bytes=max(self.rise(setup), resting),
            seconds=seconds,
            resting_bytes=resting,
            layers_bytes=max(self.in_layers(setup), resting),
            unkept_bytes=self.unkept(setup),
            device_seconds=self.device_seconds(setup),
            gradient_bytes=int(self._gradient_bytes(setup)),
            depth=self.fit.layers if self.bounds.shallow_jobs.depth(setup) else 0,
            outside_bytes=max(self.outside(setup), resting),
            compiled_bytes=max(self.outside(setup), self.in_programs(setup), resting),
            compiled_seconds=self.compiled_seconds(setup),
        )

    def why_not_recorded(self, setup: Setup) -> CannotBeRecorded | None:
        """Why such a step cannot be recorded as it is to be; None where it can, or is not to be."""
        if setup.capture is None:
            return None
        try:
            for profile in self._profiles(setup):
                refuse_waits(len(profile.first.waits) + len(profile.further.waits))
            for shallow in self.update_fit.depths:
                self.bounds.update(setup, shallow)
        except CannotBeRecorded as why:
            return why
        return None

    # ---- bytes -------------------------------------------------------------------------------------------

    def rise(self, setup: Setup) -> int:
        """Live bytes at the worst moment of the passes."""
        return int(self._standing(setup) + self._rise(setup))

    def in_layers(self, setup: Setup) -> int:
        """Live bytes at the worst moment within layers."""
        return int(self._standing(setup) + self._rise(setup, in_layers))

    def unkept(self, setup: Setup) -> int:
        """Live bytes at the worst moment of the passes but for what each layer adds to it."""
        return int(self._standing(setup) + self._rise(setup, layers=0)) if len(self.fit.depths) > 1 else 0

    def outside(self, setup: Setup) -> int:
        """Live bytes at the worst moment outside layers but for what each layer adds to it, unless each is
        recomputed and so keeps its input alone."""
        if len(self.fit.depths) < 2:
            return 0
        # autocast keeps copies of the layers' weights until the forward pass ends, compiled layers keep none
        keeps_inputs = setup.checkpoint == EVERY_LAYER and setup.autocast is None
        layers = None if keeps_inputs else 0
        return int(self._standing(setup) + self._rise(setup, outside_layers, layers=layers))

    def in_programs(self, setup: Setup) -> int:
        """Live bytes when the backward pass of the layers begins, if these were compiled."""
        left_bytes = [
            sum(n for name, n in one.kept_bytes.items() if is_left(name)) for one in self._profiles(setup)
        ]
        return int(self._standing(setup) + self.fit.extrapolate(left_bytes))

    def resting(self, setup: Setup) -> int:
        """Live bytes at the worst moment of the update."""
        updates = [self.bounds.update(setup, shallow) for shallow in self.update_fit.depths]
        in_update = self.update_fit.extrapolate([update.peak_increase for update in updates])
        return int(self._standing(setup) + self._gradient_bytes(setup) + in_update)

    def _gradient_bytes(self, setup: Setup) -> float:
        """Live bytes that the passes leave to the update."""
        return float(self.fit.extrapolate([profile.residual_bytes for profile in self._profiles(setup)]))

    def _standing(self, setup: Setup) -> float:
        """Live bytes between steps."""
        updates = [self.bounds.update(setup, shallow) for shallow in self.update_fit.depths]
        standing = self.fit.extrapolate([passes.baseline_bytes for passes in self.by_depth])
        return float(standing + self.update_fit.extrapolate([update.state_bytes for update in updates]))

    def _profiles(self, setup: Setup) -> list[PassProfile]:
        """Of each depth, the passes of such a step."""
        samples, count = self.batch_size // setup.micro_batches, setup.micro_batches
        profiles = [passes.by_samples[samples] if count > 1 else passes.whole for passes in self.by_depth]
        return [profile for profile in profiles if profile is not None]

    def _rise(
        self, setup: Setup, among: Callable[[str], bool] | None = None, *, layers: int | None = None
    ) -> float:
        """How far the live bytes rise at least in such passes: the largest line of all modules, or of those
        whose names are `among` some; at the whole depth, or with so many `layers`."""
        key, at = (setup.micro_batches, among, layers), self.fit.layers if layers is None else layers
        if key not in self._rises:
            rises = [profile.peak_increase for profile in self._profiles(setup)]
            common = set(rises[0]).intersection(*rises)
            common = {name for name in common if among is None or among(name)}
            lines = (self.fit.value_at(at, [by_module[name] for by_module in rises]) for name in common)
            self._rises[key] = max(lines, default=0)
        return self._rises[key]

    # ---- seconds -----------------------------------------------------------------------------------------

    def seconds(self, setups: Sequence[Setup]) -> Iterator[Sequence[float]]:
        """Of steps that differ in their updates only, on each GPU, a step's share of the start-up among
        them."""
        timer = self.bounds.timer
        known: Mapping[int, Sequence[float]] = {}
        if isinstance(timer, ComposableTimer):
            known = self._by_segments(setups, timer)
        for number, setup in enumerate(setups):
            works = self._works_of(setup, self._profiles(setup)[0], self.update_fit.depths[0])
            share = self.bounds.startup.least_share(setup, works)
            yield [seconds + share for seconds in known.get(number) or self._by_depth(setup)]

    def device_seconds(self, setup: Setup) -> Sequence[float]:
        """That each GPU works in such a step; none where the timer does not say."""
        return self._device_seconds(setup, _whole_work)

    def compiled_seconds(self, setup: Setup) -> Sequence[float]:
        """That each GPU works in it for what is left where its layers are compiled; none where the timer does
        not say, and of a step that is compiled or played back itself."""
        if setup.compile is not None or setup.capture is not None:
            return ()
        return self._device_seconds(setup, self._left_by_compilers)

    def _device_seconds(self, setup: Setup, part: Callable[[Work], Work]) -> Sequence[float]:
        """That each GPU works for a `part` of the passes, and for the update."""
        timer = self.bounds.timer
        if not isinstance(timer, ComposableTimer):
            return ()

        def line(fit: DepthFit, works: Sequence[Work]) -> Any:
            return fit.extrapolate([timer.device_seconds(work) for work in works])

        key = setup.micro_batches, timing_key(setup), part
        if key not in self._device_s:
            profiles = self._profiles(setup)
            first, further = (
                line(self.fit, [part(self._under(setup, getattr(one, name))) for one in profiles])
                for name in ("first", "further")
            )
            self._device_s[key] = first + (setup.micro_batches - 1) * further
        updates = [self.bounds.update(setup, shallow).work for shallow in self.update_fit.depths]
        updates = [self._under(setup, work) for work in updates]
        seconds: list[float] = (self._device_s[key] + line(self.update_fit, updates)).tolist()
        return seconds

    def _left_by_compilers(self, work: Work) -> Work:
        """Of this work, what a compiler of layers leaves, remembered: timers know works by their identity."""
        if id(work) not in self._left:
            self._left[id(work)] = work, left_by_compilers(work)
        return self._left[id(work)][1]

    def _works_of(
        self, setup: Setup, profile: PassProfile, shallow: ShallowJob, passes: PassProfiles | None = None
    ) -> list[Work]:
        """What a step of one depth does: its first micro-batch, each further one, and its update."""
        update = self.bounds.update(setup, shallow, passes)
        return [self._under(setup, work) for work in (profile.first, profile.further, update.work)]

    def _by_segments(self, setups: Sequence[Setup], timer: ComposableTimer) -> Mapping[int, Sequence[float]]:
        """By the segments of passes and updates at the whole depth; nothing of those that do not wait alike
        at every depth."""
        setup = setups[0]

        def at_depth(works: Sequence[Work]) -> list[QueueSegment] | None:
            by_depth = [timer.segments(self._under(setup, work)) for work in works]
            return extrapolate_depth(by_depth, self.fit.extrapolate)

        profiles = self._profiles(setup)
        first = at_depth([profile.first for profile in profiles])
        further = at_depth([profile.further for profile in profiles])
        updates = [self.bounds.update_segments(one, self.update_fit, timer) for one in setups]
        seconds: dict[int, Sequence[float]] = {}
        if first is None or further is None:
            return seconds
        counts = few(setup.micro_batches)
        for same in _by_length(updates):
            lasts = stack(list(same.values()))
            by_count = [timer.simulate(join([first, *[further] * (n - 1), lasts])) for n in counts]
            by_setup = linear_extrapolate(counts, by_count, setup.micro_batches)
            seconds |= zip(same, by_setup.tolist(), strict=True)
        return seconds

    def _by_depth(self, setup: Setup) -> Sequence[float]:
        """By the steps of each depth."""
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
            asked = work if changed is work.kernels else work._replace(kernels=changed)
            self._works[key] = work, asked  # by id, with the work that it is the id of
        return self._works[key][1]


def _whole_work(work: Work) -> Work:
    return work


def few(micro_batches: int) -> tuple[int, ...]:
    """Numbers of micro-batches from which the seconds of this one follow."""
    few_are_enough = micro_batches > MICRO_BATCHES + 1
    return (MICRO_BATCHES, MICRO_BATCHES + 1) if few_are_enough else (micro_batches,)


def _by_length(
    updates: Sequence[Sequence[QueueSegment] | None],
) -> list[dict[int, Sequence[QueueSegment]]]:
    """Those of one number of segments, together, by their indices."""
    groups: dict[int, dict[int, Sequence[QueueSegment]]] = defaultdict(dict)
    for number, segments in enumerate(updates):
        if segments is not None:
            groups[len(segments)][number] = segments
    return list(groups.values())

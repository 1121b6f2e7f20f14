"""The least that Setups can take, from models of few layers.

Passes are rehearsed on two of them, all sizes of micro-batch in one rehearsal, and so is each update; live
bytes and seconds of two depths tell those of the whole depth, by the straight line through them. Every moment
of a step grows evenly with the layers, and the worst moment is the largest of them: a convex figure, of which
that line is never more than the truth.

Passes and updates have depths of their own: passes that are recomputed in spans need deeper models, updates
never do. Where a clock joins pieces of steps, their stretches meet at the whole depth, those of all
optimizers at once; any other clock is asked about whole steps of few layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.planning.cost.batch_sizes import (
    PassProfile,
    PassProfiles,
    UpdateProfile,
    rehearse_sizes,
    update_of,
)
from snugfit.planning.cost.queue import Stretch, joined, lined, side_by_side
from snugfit.planning.cost.same_trace import kernels_under
from snugfit.planning.cost.shallow import Shallow, Shallows, along
from snugfit.planning.cost.short_passes import MICRO_BATCHES
from snugfit.planning.cost.timer import Clock, Joining, seconds_of
from snugfit.planning.step_key import adapters_key, as_rehearsed, timing_key, update_key
from snugfit.rehearsal.splice import rehearse_update
from snugfit.rehearsal.trace.trace import Work

if TYPE_CHECKING:
    from snugfit.planning.cost.run import Opening
    from snugfit.rehearsal.device.policy import CudaPolicy
    from snugfit.techniques.setup import Setup


@dataclass(frozen=True)
class Lines:
    """What rehearsals of some depths tell of the whole one."""

    depths: Sequence[Shallow]
    layers: int
    """Of the whole depth."""

    def along(self, values: Sequence[Any]) -> Any:
        """Of the whole depth, by the line through the values of these depths."""
        return along([each.layers for each in self.depths], values, self.layers)


class Needs(NamedTuple):
    """What some Setups take at least."""

    needs: Sequence[tuple[int, Sequence[float]]]
    """Of each, live bytes at the worst moment, and the seconds of a step on each GPU."""
    attention: tuple[str, ...]
    """Which attention kernels were chosen."""


class Least:
    """The least that Setups of one job take."""

    def __init__(self, shallows: Shallows, policy: CudaPolicy, clock: Clock, opening: Opening) -> None:
        self.shallows, self.policy, self.clock, self.opening = shallows, policy, clock, opening
        self._updates: dict[Hashable, UpdateProfile] = {}
        self._gradients: dict[Hashable, tuple[int, ...]] = {}
        self._lined: dict[Hashable, list[Stretch] | None] = {}

    def of(self, setups: Sequence[Setup]) -> Needs:
        """The least that each of these takes, which share their passes but for the size of a micro-batch.
        Raises `SnugfitError` where one of them cannot be rehearsed."""
        passes = _Passes(self, setups)
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, setup in enumerate(setups):
            groups[setup.micro_batches, timing_key(setup)].append(number)
        found: dict[int, tuple[int, Sequence[float]]] = {}
        for numbers in groups.values():
            different = {update_key(setups[number]): setups[number] for number in numbers}
            told = dict(zip(different, passes.seconds(list(different.values())), strict=True))
            live = {key: passes.live(setup) for key, setup in different.items()}
            for number in numbers:
                key = update_key(setups[number])
                found[number] = live[key], told[key]
        return Needs([found[number] for number in range(len(setups))], passes.seen[0].attention)

    def lines(self, setup: Setup) -> Lines:
        """The depths on which such a step is rehearsed."""
        return Lines(self.shallows.of(setup), self.shallows.layers(setup))

    def update(self, setup: Setup, shallow: Shallow, passes: PassProfiles | None = None) -> UpdateProfile:
        """This Setup's update at this depth, at which these passes were rehearsed, if any were."""
        gradients = passes.gradients if passes else self._with_gradients(setup, shallow)
        key = (update_key(setup), shallow.layers, gradients)
        if key not in self._updates:
            asked = replace(shallow.setup, optimizer=setup.optimizer)
            self._updates[key] = update_of(rehearse_update(shallow.job, asked, self.policy, gradients))
        return self._updates[key]

    def update_stretches(self, setup: Setup, lines: Lines, clock: Joining) -> list[Stretch] | None:
        """Those of this Setup's update at the whole depth; None where it does not wait alike at every depth.
        Updates have depths of their own, so one answer serves all passes."""
        key = update_key(setup), timing_key(setup), tuple(each.layers for each in lines.depths)
        if key not in self._lined:
            works = [self.update(setup, each).work for each in lines.depths]
            changed = [work._replace(kernels=kernels_under(setup, work.kernels)) for work in works]
            self._lined[key] = lined([clock.stretches(work) for work in changed], lines.along)
        return self._lined[key]

    def _with_gradients(self, setup: Setup, shallow: Shallow) -> tuple[int, ...]:
        """Which parameters have gradients: the model and its adapters decide, so one sample tells."""
        key = (adapters_key(setup), shallow.layers)
        if key not in self._gradients:
            one = replace(shallow.job, batch_size=1)
            passes = rehearse_sizes(one, shallow.setup, self.policy, (), whole=True)
            self._gradients[key] = passes.gradients
        return self._gradients[key]


class _Passes:
    """The passes of some Setups on few layers, and the steps that they are a part of."""

    def __init__(self, least: Least, setups: Sequence[Setup]) -> None:
        job, first = least.shallows.job, setups[0]
        sizes = {job.batch_size // setup.micro_batches for setup in setups if setup.micro_batches > 1}
        whole = any(setup.micro_batches == 1 for setup in setups)
        self.least, self.batch_size = least, job.batch_size
        self.lines = least.lines(as_rehearsed(first))
        self.updates = least.lines(replace(as_rehearsed(first), checkpoint=None))
        self.seen = [
            rehearse_sizes(each.job, each.setup, least.policy, sizes, whole=whole)
            for each in self.lines.depths
        ]
        self._rises: dict[int, float] = {}
        self._works: dict[Hashable, tuple[Work, Work]] = {}

    # ---- bytes -------------------------------------------------------------------------------------------

    def live(self, setup: Setup) -> int:
        """Live bytes at the worst moment of a step."""
        updates = [self.least.update(setup, each) for each in self.updates.depths]
        after = self.lines.along([once.residual_bytes for once in self._rounds(setup)])
        after += self.updates.along([update.peak_increase for update in updates])
        standing = self.lines.along([passes.baseline_bytes for passes in self.seen])
        states = self.updates.along([update.state_bytes for update in updates])
        return int(standing + states + max(self._rise(setup), after))

    def _rounds(self, setup: Setup) -> list[PassProfile]:
        """Of each depth, the passes of such a step."""
        samples, pieces = self.batch_size // setup.micro_batches, setup.micro_batches
        found = [passes.by_samples[samples] if pieces > 1 else passes.whole for passes in self.seen]
        return [once for once in found if once is not None]

    def _rise(self, setup: Setup) -> float:
        """How far the live bytes rise at least in such passes: the largest of all modules' lines."""
        if setup.micro_batches not in self._rises:
            rises = [once.peak_increase for once in self._rounds(setup)]
            common = set(rises[0]).intersection(*rises)
            largest = max(self.lines.along([each[where] for each in rises]) for where in common)
            self._rises[setup.micro_batches] = largest
        return self._rises[setup.micro_batches]

    # ---- seconds -----------------------------------------------------------------------------------------

    def seconds(self, setups: Sequence[Setup]) -> Iterator[Sequence[float]]:
        """Of steps that differ in their updates only, a step's share of what is paid once among them."""
        clock = self.least.clock
        told: Mapping[int, Sequence[float]] = {}
        if isinstance(clock, Joining):
            told = self._met(setups, clock)
        for number, setup in enumerate(setups):
            share = self.least.opening.least_share(setup, self._works_of(setup))
            each = told.get(number) or self._by_depth(setup)
            yield [seconds + share for seconds in each]

    def _works_of(self, setup: Setup) -> list[Work]:
        """What the shallowest model's step does."""
        once = self._rounds(setup)[0]
        update = self.least.update(setup, self.updates.depths[0])
        return [self._under(setup, work) for work in (once.first, once.further, update.work)]

    def _met(self, setups: Sequence[Setup], clock: Joining) -> Mapping[int, Sequence[float]]:
        """By the stretches of passes and updates at the whole depth; nothing of those that do not wait alike
        at every depth."""
        setup = setups[0]

        def at_depth(works: Sequence[Work]) -> list[Stretch] | None:
            return lined([clock.stretches(self._under(setup, work)) for work in works], self.lines.along)

        rounds = self._rounds(setup)
        first = at_depth([once.first for once in rounds])
        further = at_depth([once.further for once in rounds])
        updates = [self.least.update_stretches(one, self.updates, clock) for one in setups]
        told: dict[int, Sequence[float]] = {}
        if first is None or further is None:
            return told
        pieces = few(setup.micro_batches)
        for same in _by_length(updates):
            lasts = side_by_side(list(same.values()))
            found = [clock.played(joined([first, *[further] * (n - 1), lasts])) for n in pieces]
            told |= zip(same, along(pieces, found, setup.micro_batches).tolist(), strict=True)
        return told

    def _by_depth(self, setup: Setup) -> Sequence[float]:
        """By the steps of each depth."""
        pieces, depths = few(setup.micro_batches), []
        for shallow, once, passes in zip(self.lines.depths, self._rounds(setup), self.seen, strict=True):
            update = self.least.update(setup, shallow, passes)
            works = [self._under(setup, work) for work in (once.first, once.further, update.work)]
            first, further, last = works
            found = [seconds_of(self.least.clock, [first, *[further] * (n - 1), last]) for n in pieces]
            depths.append([along(pieces, each, setup.micro_batches) for each in zip(*found, strict=True)])
        return [self.lines.along(each) for each in zip(*depths, strict=True)]

    def _under(self, setup: Setup, work: Work) -> Work:
        key = timing_key(setup), id(work)
        if key not in self._works:
            changed = kernels_under(setup, work.kernels)
            asked = work if changed is work.kernels else work._replace(kernels=changed)
            self._works[key] = work, asked  # by id, with the work that it is the id of
        return self._works[key][1]


def few(pieces: int) -> tuple[int, ...]:
    """Numbers of micro-batches that tell the seconds of this one."""
    return (pieces,) if pieces <= MICRO_BATCHES + 1 else (MICRO_BATCHES, MICRO_BATCHES + 1)


def _by_length(updates: Sequence[Sequence[Stretch] | None]) -> list[dict[int, Sequence[Stretch]]]:
    """Those of one number of stretches, together, by their numbers."""
    groups: dict[int, dict[int, Sequence[Stretch]]] = defaultdict(dict)
    for number, stretches in enumerate(updates):
        if stretches is not None:
            groups[len(stretches)][number] = stretches
    return list(groups.values())

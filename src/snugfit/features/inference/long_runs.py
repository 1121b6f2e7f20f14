"""Simulated trace of generating many tokens, interpolated from a few decode steps (forward passes for one new
token).

Decode steps differ in sizes alone, and a size is linear in the number of tokens so far. So a call is
simulated in windows of a few steps: at its beginning, in its middle and at its end. Sizes between windows are
interpolated if they grow linearly over the three windows. Otherwise both halves are divided again. Growth
changes, for example, at the step at which a sliding attention window is full.

Some kernels pad a mask to a multiple of 8 tokens. Then every eighth step has the same structure, and windows
have 8 steps.

A window is a shorter call: its prompt has the tokens that the long call would have by then, and its total
length is the same. Its first decode step follows a prefill. Therefore a window contributes only later steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from snugfit.features.inference.settings import GenerationSettings
from snugfit.features.inference.stretches import (
    CallWriter,
    DifferentSteps,
    RecordedCall,
    StepWindow,
    interpolate,
    is_line,
    with_tables,
    with_tables_of,
)

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.trace.trace import Recording, Trace

HEAD = 2
"""Number of decode steps after the prefill whose simulation is used without interpolation."""

PERIODS = (1, 8)
"""Periods, in decode steps, with which simulated steps may repeat. They are tried in this order."""

MOST_WINDOWS = 16
"""Largest number of simulated windows (a few successive decode steps) in one call. Further bends are
interpolated.
"""

MOST_WRITTEN = 256
"""Largest number of decode steps of a trace that each have allocations of their own. In a longer call, one
step represents several.
"""

CALLS = 2
"""Number of calls of `generate` in a trace. The second one reuses the memory that the allocator cached in the
first.
"""

Record = Callable[[Any, int], "Recording"]


def rehearse_generation(job: Job, open_step: Callable[[Job], Any], record: Record, steps: int) -> Trace:
    """Return the simulated trace of `CALLS` calls of `generate`, with the kernels of the last one.

    All decode steps are simulated if they are few, or if the windows do not fit together. Replays of a CUDA
    graph take no time to simulate, so then all are simulated too, with one call more.
    """
    if open_step(job).setup.records_graphs:
        return record(open_step(job), CALLS + 1).trace
    for period in PERIODS:
        windows = CallWindows(job, open_step, record, period)
        with contextlib.suppress(DifferentSteps):
            return windows.trace()
    return record(open_step(job), min(steps, CALLS)).trace


class CallWindows:
    """The simulated windows (a few decode steps each) of one long call of `generate`."""

    def __init__(self, job: Job, open_step: Callable[[Job], Any], record: Record, period: int) -> None:
        self.job, self.open_step, self.record, self.period = job, open_step, record, period
        self.decode_steps = GenerationSettings.of(job).new_tokens - 1
        self.size = max(period, 2)
        """Number of decode steps in a window. Two steps show which tables have a fixed size."""
        self.count = 0

    def trace(self) -> Trace:
        """Return the simulated trace of the long call of `generate`, interpolated between windows of decode
        steps. Raises `DifferentSteps` for few decode steps, and if windows have different structures.
        """
        distance = (self.decode_steps - 1 - HEAD - self.size) // self.period * self.period
        if distance < 3 * self.size:
            raise DifferentSteps
        start = self._record(1, HEAD + self.size)
        self.start = left = StepWindow(HEAD + 1, start.decode[HEAD:])
        end_step = left.step + distance
        end = self._record(end_step - 1, self.decode_steps - end_step + 2, ends=True)
        steady = StepWindow(end_step, with_tables(end.decode[1:-1], left.steps))
        writer = CallWriter(start, end)
        known = [*self._between(left, steady), steady]
        together = -(-self.decode_steps // MOST_WRITTEN)
        for call in range(CALLS):
            writer.begin(call)
            for stretch in start.decode[:HEAD]:
                writer.write(stretch)
            for low, other in pairwise(known):
                for stretch, times in interpolate(low, other, self.period, together):
                    writer.write(stretch, times)
            for stretch in steady.steps:
                writer.write(stretch)
            writer.write(with_tables_of(end.decode[-1], end.decode[-2], left.steps[-1]))
            writer.end()
        return writer.trace()

    def _between(self, left: StepWindow, right: StepWindow) -> list[StepWindow]:
        """Return window `left` and the further windows of decode steps before `right` that are needed because
        sizes do not grow linearly between them. Raise `DifferentSteps` if the sizes may repeat in a longer
        cycle than the windows show.
        """
        distance = (right.step - left.step) // self.period
        if distance < 2 or self.count >= MOST_WINDOWS:
            return [left]
        step = left.step + distance // 2 * self.period
        if self.period < PERIODS[-1] and (step - left.step) % PERIODS[-1] == 0:
            # If sizes grow in steps, those at a distance of the longer period are on a line too.
            step -= 1
        window = self._record(step - 1, 1 + self.size)
        middle = StepWindow(step, with_tables(window.decode[1:], self.start.steps))
        if is_line(left, middle, right, self.period):
            return [left]
        if self.period < PERIODS[-1]:
            raise DifferentSteps
        return [*self._between(left, middle), *self._between(middle, right)]

    def _record(self, step: int, count: int, *, ends: bool = False) -> RecordedCall:
        """Simulate and return a call of `generate` that begins with decode step `step` after its prefill, and
        has `count` of them.
        """
        self.count += 1
        job, shift = self.job, step - 1
        settings = {**job.phase_settings, "new_tokens": GenerationSettings.of(job).new_tokens - shift}
        has_encoder = job.task != "causal-lm"
        length = job.sequence_length + (0 if has_encoder else shift)
        run = self.open_step(replace(job, sequence_length=length, phase_settings=settings))
        run.decode_steps = None if ends else count
        run.decoder_prompt = 1 + shift if has_encoder else 1
        run.prompt = job.sequence_length
        return RecordedCall.of(self.record(run, 1), count)

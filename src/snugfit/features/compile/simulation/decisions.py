"""Inductor's decisions that depend on the memory of a whole program, recorded for models of few layers and
extrapolated to more.

There are two such decisions. Inductor compares several orders of its kernels, and chooses the one with the
lowest estimated peak (`torch._inductor.memory.reorder_for_peak_memory`). It also reuses a buffer that was
freed much earlier, but only if this does not raise the estimated peak (`AllocateLine.should_reuse_buffer`).
Both are recorded while Inductor compiles a program. The estimates for a deep model follow from those of two
shallow models (`trace/grow.py`), and so do its decisions.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from snugfit.rehearsal.trace.grow import Entry, grow

ORDER_CHOICES = 2
"""Number of possible kernel orders from which Inductor has to choose one."""


@dataclass
class Reuse:
    """Inductor's estimate for a buffer that may reuse the memory of an older one."""

    nbytes: int
    taken: bool
    between: int | None
    """Peak of the estimated bytes alive between the older buffer's last use and the new buffer. None if no
    kernel runs between."""


@dataclass
class Decisions:
    """Inductor's memory estimates and decisions while it compiled one program (graph)."""

    orders: list[list[int]] = field(default_factory=list)
    """Estimated live bytes after each kernel, for each order of the kernels that Inductor compared."""
    timeline: list[int] = field(default_factory=list)
    """Estimated live bytes after each kernel of the final program."""
    reuses: list[Reuse] = field(default_factory=list)

    def are_alike(self, deeper: Decisions, periods: int) -> bool:
        """Return True if Inductor would decide the same for a model with `periods` more repetitions of its
        layers. They are extrapolated from this object and `deeper`, the decisions for a model with one
        repetition more.
        """
        return _same_order(self, deeper, periods) and _same_reuses(self, deeper, periods)


@contextlib.contextmanager
def noted_decisions() -> Iterator[Decisions]:
    """Context that yields Inductor's decisions for the program that it compiles inside."""
    from torch._inductor import memory
    from torch._inductor.codegen import wrapper

    decisions, ordering = Decisions(), [False]
    estimate, reorder = memory.estimate_peak_memory, memory.reorder_for_peak_memory

    def note_estimate(*arguments: Any, **keywords: Any) -> Any:
        peak, timeline = estimate(*arguments, **keywords)
        # Inductor also calls this for the final order. Only calls within the reordering compare several
        # orders.
        if ordering[-1]:
            decisions.orders.append([*timeline])
        else:
            decisions.timeline = [*timeline]
        return peak, timeline

    def note_orders(*arguments: Any, **keywords: Any) -> Any:
        ordering.append(True)
        try:
            return reorder(*arguments, **keywords)
        finally:
            ordering.pop()

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(memory, "estimate_peak_memory", note_estimate))
        stack.enter_context(patch.object(memory, "reorder_for_peak_memory", note_orders))
        if hasattr(wrapper.AllocateLine, "should_reuse_buffer"):  # torch 2.11 and later
            decide = wrapper.AllocateLine.should_reuse_buffer
            recorded = _noting(decide, decisions)
            stack.enter_context(patch.object(wrapper.AllocateLine, "should_reuse_buffer", recorded))
        yield decisions


def _noting(decide: Any, decisions: Decisions) -> Any:
    def should_reuse_buffer(line: Any, free_line: Any, size: int) -> bool:
        taken = bool(decide(line, free_line, size))
        # Without a kernel between free and allocation, the reuse does not change any peak.
        adjacent = free_line.scheduler_node_index + 1 == line.scheduler_node_index
        between = None if adjacent else int(line.wrapper.estimate_peak.peak_between(free_line, line))
        decisions.reuses.append(Reuse(size, taken, between))
        return taken

    return should_reuse_buffer


def _same_order(shallow: Decisions, deeper: Decisions, periods: int) -> bool:
    few, more = shallow.orders, deeper.orders
    if len(few) != len(more):
        return False
    # If there is only one order, the number of layers cannot change the choice.
    if len(more) < ORDER_CHOICES:
        return True
    chosen = _lowest([max(order, default=0) for order in more])
    if chosen != _lowest([max(order, default=0) for order in few]):
        return False
    peak = _deep_peak(few[chosen], more[chosen], periods)
    if peak is None:
        return False
    for number, (one, other) in enumerate(zip(few, more, strict=True)):
        # A lower bound for the other orders: their peak grows at least as much with each repetition of the
        # layers.
        deep_peak = _deep_peak(one, other, periods)
        if deep_peak is None:
            deep_peak = max(other) + (max(other) - max(one)) * periods
        # Among orders with equal peaks, Inductor takes the first.
        if deep_peak < peak or (deep_peak == peak and number < chosen):
            return False
    return True


def _lowest(peaks: Sequence[int]) -> int:
    """Return the index of the lowest peak, the first of equal ones, as Inductor chooses."""
    return peaks.index(min(peaks))


def _deep_peak(shallow: Sequence[int], deeper: Sequence[int], periods: int) -> int | None:
    """Extrapolate Inductor's estimated memory peaks from two models of few layers to one of many. Return None
    if the two do not determine the peaks.
    """
    few, more = _changes(shallow), _changes(deeper)
    # A size with one entry per layer (such as the seeds of all dropouts) depends on the number of layers.
    vary = {*few} ^ {*more}
    before, after = (
        [Entry("begins", tuple(timeline[:1])), *(_change(change, vary) for change in changes)]
        for timeline, changes in ((shallow, few), (deeper, more))
    )
    grown = grow(before, after, periods)
    if grown is None:
        return None
    changed = [*deeper[:1], *more]
    return max(
        itertools.accumulate(
            change.numbers[0] if change.numbers else changed[change.like] for change in grown
        )
    )


def _changes(timeline: Sequence[int]) -> list[int]:
    """Return the bytes that each kernel adds to the live memory, except the first."""
    return [after - before for before, after in itertools.pairwise(timeline)]


def _change(nbytes: int, vary: set[int]) -> Entry:
    return Entry("varies", (nbytes,)) if nbytes in vary else Entry(nbytes)


def _same_reuses(shallow: Decisions, deeper: Decisions, periods: int) -> bool:
    if not deeper.reuses:
        return not shallow.reuses
    peak = _deep_peak(shallow.timeline, deeper.timeline, periods)
    few, more = ([*map(_reuse_entry, decisions.reuses)] for decisions in (shallow, deeper))
    grown = grow(few, more, periods)
    if peak is None or grown is None:
        return False
    for entry in grown:
        reuse = deeper.reuses[entry.like]
        # Inductor reuses a buffer only if that leaves the estimated peak unchanged.
        if entry.numbers and reuse.taken != (entry.numbers[0] + reuse.nbytes <= peak):
            return False
    return True


def _reuse_entry(reuse: Reuse) -> Entry:
    between = () if reuse.between is None else (reuse.between,)
    return Entry((reuse.nbytes, reuse.taken, not between), between)

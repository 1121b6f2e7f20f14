"""The chart of memory by category (such as activations) during a step, with its phases and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from snugfit.features.page.chart import Chart, Layer, MemoryCurve
from snugfit.features.page.colours import KINDS
from snugfit.report.text.passages import micro_batch_passages, phase_passages
from snugfit.results.footprint import Kind, Moment
from snugfit.results.prediction import CurvePoint
from snugfit.units import show_bytes, show_mib

FURTHEST_LIMIT = 3.0
"""Largest ratio of the GPU's memory to the highest bytes at which the memory limit is drawn."""

NARROWEST_BATCH = 0.032
"""Smallest share of the step of a micro-batch at which each gets its number."""


def memory_over_step(
    curve: Sequence[CurvePoint],
    *,
    context_bytes: int = 0,
    memory_bytes: int | None = None,
    micro_batches: int = 1,
    moment: Moment | None = None,
    turn: str = "step",
) -> Chart:
    """Return the chart of memory by category (such as activations) during a step, reserved memory, and the
    memory limit.

    `moment` is that of the whole run's peak. It names the curve's peak if both are in the same phase.
    `turn` is the noun for a step.
    """
    stacks = [{str(Kind.CONTEXT): context_bytes, **point.kinds} for point in curve]
    present = [str(kind) for kind in KINDS if any(stack.get(kind) for stack in stacks)]
    reserved = [context_bytes + point.reserved_bytes for point in curve]
    totals = [sum(stack.values()) for stack in stacks]
    peak = totals.index(max(totals))
    highest = max(*reserved, totals[peak])
    limit = memory_bytes if memory_bytes and memory_bytes <= FURTHEST_LIMIT * highest else None
    passage = curve[peak].phase
    inside = moment.module if moment and moment.step and moment.phase == passage else ""
    where = f"{passage}, {inside}" if inside else passage
    drawing = MemoryCurve(
        positions=[0.0, *(round(point.position, 5) for point in curve[1:])],
        layers=[Layer(kind=kind, bytes=[stack.get(kind, 0) for stack in stacks]) for kind in present],
        reserved=reserved,
        limit=limit,
        phases=phase_passages(curve),
        micro_batches=micro_batch_passages(curve, micro_batches, NARROWEST_BATCH),
        peak=peak,
        peak_label=f"Peak: {show_bytes(totals[peak])}, {where}",
    )
    batches = "Grey bands are backward passes; the numbers below are micro-batches."
    far = f"The memory limit, {show_bytes(memory_bytes or 0)}, is far above the top of this picture."
    return Chart(
        title=f"Memory through one {turn}",
        about=(
            f"Bytes by kind through one steady {turn}. The highest is {show_bytes(totals[peak])}, in {where}."
        ),
        drawing=drawing,
        heads=("Phase", "Highest MiB>", *(f"{kind}>" for kind in present), "Reserved>"),
        rows=[*_phase_rows(curve, stacks, present, context_bytes)],
        note=" ".join(
            [*([batches] if drawing.micro_batches else []), *([far] if memory_bytes and not limit else [])]
        ),
    )


def _phase_rows(
    curve: Sequence[CurvePoint], stacks: Sequence[Mapping[str, int]], present: Sequence[str], context: int
) -> Iterable[list[str]]:
    indexed = list(zip(curve, stacks, strict=True))
    for phase, members in groupby(indexed, key=lambda pair: pair[0].phase):
        at, stack = max(members, key=lambda pair: sum(pair[1].values()))
        kinds = (show_mib(stack.get(kind, 0)) for kind in present)
        yield [phase, show_mib(sum(stack.values())), *kinds, show_mib(context + at.reserved_bytes)]

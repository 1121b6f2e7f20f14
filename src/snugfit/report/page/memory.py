"""Bytes by kind through the steady step, with its phases and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise

from markupsafe import Markup

from snugfit.report.page.picture import LegendEntry, Picture
from snugfit.report.page.svg import LETTER, WIDTH, byte_axis, picture, point, tag, text
from snugfit.report.text.passages import Passage, micro_batch_passages, phase_passages
from snugfit.results.footprint import Kind
from snugfit.results.prediction import CurvePoint
from snugfit.units import show_bytes, show_mib

LEFT, RIGHT, HIGH, BASE = 58.0, WIDTH - 8.0, 34.0, 320.0
"""Edges of the drawing area."""

FURTHEST_BOUND = 3.0
"""Largest ratio of the GPU's memory to the highest bytes at which the memory limit is drawn."""

NARROWEST_STRIP = 6.0
"""Smallest width in units of a strip that a pointer can reach. It shows the highest moment in it."""

NARROWEST_BRACKET = 24.0
"""Width in units of a micro-batch from which each gets its number."""

KIND_ORDER = (
    Kind.CONTEXT,
    Kind.WEIGHTS,
    Kind.GATHERED,
    Kind.OPTIMIZER_STATES,
    Kind.GRADIENTS,
    Kind.ACTIVATIONS,
    Kind.TEMPORARIES,
    Kind.CACHES,
    Kind.COMMUNICATION,
    Kind.WORKSPACES,
    Kind.INPUTS,
)
_NOTE = "The brackets are micro-batches: each a forward pass and, shaded, a backward pass."

_COLOURS = dict(zip(KIND_ORDER, (8, 0, 9, 2, 1, 3, 4, 5, 10, 7, 6), strict=True))


def colour_of(kind: str) -> str:
    """Return the CSS class with the colour of a kind of bytes."""
    return f"c{_COLOURS[Kind(kind)]}"


def memory_over_step(
    curve: Sequence[CurvePoint],
    *,
    context_bytes: int = 0,
    memory_bytes: int | None = None,
    micro_batches: int = 1,
) -> Picture:
    """Return a picture of bytes by kind through the steady step, reserved bytes, and the GPU's memory."""
    stacks = [{str(Kind.CONTEXT): context_bytes, **point.kinds} for point in curve]
    present = [str(kind) for kind in KIND_ORDER if any(stack.get(kind) for stack in stacks)]
    reserved = [context_bytes + point.reserved_bytes for point in curve]
    peak = max(range(len(curve)), key=lambda index: sum(stacks[index].values()))
    highest = max(*reserved, sum(stacks[peak].values()))
    bound = memory_bytes if memory_bytes and memory_bytes <= FURTHEST_BOUND * highest else None
    top = 1.04 * max(highest, bound or 0)
    edges = [LEFT, *(_x(point.position) for point in curve[1:]), RIGHT]
    parts = [*_phases(curve), *byte_axis(top, LEFT, RIGHT, BASE, HIGH), *_layers(stacks, present, edges, top)]
    parts.append(tag("polyline", points=_points(edges, [*reserved, reserved[-1]], top), class_="reserved"))
    legend = [LegendEntry(colour_of(kind), kind) for kind in present]
    legend.append(LegendEntry("reserved", "reserved by the allocator, with the context"))
    if bound:
        y = _y(bound, top)
        parts.append(tag("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="bound"))
        legend.append(LegendEntry("bound", f"the memory limit, {show_bytes(bound)}"))
    for begin, end in pairwise(_strips(edges)):
        at = max(range(begin, end), key=lambda index: sum(stacks[index].values()))
        width = edges[end] - edges[begin]
        strip = tag("rect", x=edges[begin], y=HIGH, width=width, height=BASE - HIGH, class_="strip")
        parts.append(point(_about(curve[at], stacks[at], present), strip, start=at == peak))
    brackets = micro_batch_passages(curve, micro_batches, NARROWEST_BRACKET / (RIGHT - LEFT))
    parts += _micro_batches(brackets)
    about = (
        f"Bytes by kind through one steady step. The highest is {show_bytes(sum(stacks[peak].values()))}, "
        f"in {curve[peak].phase}."
    )
    far = (
        f"The memory that may be used, {show_bytes(memory_bytes or 0)}, is far above the top of this picture."
        if memory_bytes
        else ""
    )
    return Picture(
        title="Bytes by kind through one steady step",
        svg=picture(about, BASE + (52 if brackets else 28), *parts),
        heads=("Phase", "Highest MiB>", *(f"{kind}>" for kind in present), "Reserved>"),
        rows=[*_phase_rows(curve, stacks, present, context_bytes)],
        legend=tuple(legend),
        note=" ".join(filter(None, (_NOTE if brackets else "", "" if bound else far))),
    )


def _x(position: float) -> float:
    return LEFT + (RIGHT - LEFT) * position


def _y(size: float, top: float) -> float:
    return BASE - (BASE - HIGH) * size / top


def _strips(edges: Sequence[float]) -> list[int]:
    """Return the indices of the edges at which a strip begins, and that of the last edge."""
    begins = [0]
    for index, x in enumerate(edges[:-1]):
        if x - edges[begins[-1]] >= NARROWEST_STRIP:
            begins.append(index)
    return [*begins, len(edges) - 1]


def _points(edges: Sequence[float], sizes: Sequence[float], top: float) -> str:
    """Return a line through the sizes at these edges, without the points inside a level stretch."""
    heights = [f"{_y(size, top):.1f}" for size in sizes]
    inside = [
        set(heights[max(0, index - 1) : index + 2]) == {heights[index]} for index in range(len(heights))
    ]
    inside[0] = inside[-1] = False
    return " ".join(
        f"{x:.1f},{height}" for x, height, level in zip(edges, heights, inside, strict=True) if not level
    )


def _layers(
    stacks: Sequence[Mapping[str, int]], present: Sequence[str], edges: Sequence[float], top: float
) -> Iterable[Markup]:
    """Yield each kind's bytes on top of the kinds before it, where they are high enough to be visible. The
    last values extend to the last edge."""
    lower = [0.0] * len(edges)
    for kind in present:
        upper = [
            below + stack.get(kind, 0) for below, stack in zip(lower, [*stacks, stacks[-1]], strict=True)
        ]
        visible = [_y(low, top) - _y(high, top) >= 0.1 for low, high in zip(lower, upper, strict=True)]
        segments = groupby(range(len(edges) - 1), key=lambda index: visible[index] or visible[index + 1])
        for is_drawn, members in segments:
            run = list(members)
            part = slice(run[0], run[-1] + 2)
            back = _points(edges[part], lower[part], top).split(" ")[::-1]
            if is_drawn:
                outline = " ".join([_points(edges[part], upper[part], top), *back])
                yield tag("polygon", points=outline, class_=colour_of(kind))
        lower = upper


def _phases(curve: Sequence[CurvePoint]) -> Iterable[Markup]:
    """Yield shaded backward passes, and the names of passages below those wide enough for them. The last name
    may extend to the left, where there is room."""
    named_until = LEFT
    passages = phase_passages(curve)
    for number, passage in enumerate(passages):
        start, end = _x(passage.start), _x(passage.end)
        if passage.name == "backward":
            yield tag("rect", x=start, y=HIGH, width=end - start, height=BASE - HIGH + 24, class_="band")
        needed = LETTER * len(passage.name) + 6
        if needed <= end - start:
            yield text(passage.name, start + 3, BASE + 17, class_="faint")
            named_until = start + needed
        elif number == len(passages) - 1 and named_until <= end - needed:
            yield text(passage.name, end, BASE + 17, anchor="end", class_="faint")


def _micro_batches(passages: Sequence[Passage]) -> Iterable[Markup]:
    """Yield a bracket under each passage, with its name."""
    y = BASE + 30
    for passage in passages:
        start, end = _x(passage.start) + 2, _x(passage.end) - 2
        bracket = f"{start:.1f},{y - 4:.1f} {start:.1f},{y:.1f} {end:.1f},{y:.1f} {end:.1f},{y - 4:.1f}"
        yield tag("polyline", points=bracket, class_="bracket")
        whole = f"micro-batch {passage.name}" if passage.name.isdigit() else passage.name
        words = whole if LETTER * len(whole) <= end - start else passage.name
        yield text(words, (start + end) / 2, y + 15, anchor="middle", class_="faint")


def _about(at: CurvePoint, stack: Mapping[str, int], present: Sequence[str]) -> str:
    kinds = ", ".join(f"{kind} {show_bytes(stack[kind])}" for kind in present if stack.get(kind))
    return f"{at.phase}, {100 * at.position:.0f} % of the step: {show_bytes(sum(stack.values()))} ({kinds})"


def _phase_rows(
    curve: Sequence[CurvePoint], stacks: Sequence[Mapping[str, int]], present: Sequence[str], context: int
) -> Iterable[list[str]]:
    indexed = list(zip(curve, stacks, strict=True))
    for phase, members in groupby(indexed, key=lambda pair: pair[0].phase):
        at, stack = max(members, key=lambda pair: sum(pair[1].values()))
        kinds = (show_mib(stack.get(kind, 0)) for kind in present)
        yield [phase, show_mib(sum(stack.values())), *kinds, show_mib(context + at.reserved_bytes)]

"""Memory in pictures: bytes by kind through the step, and by module at the peak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from markupsafe import Markup

from snugfit.report.page.picture import LegendEntry, Picture
from snugfit.report.page.svg import WIDTH, byte_axis, picture, point, shorten, tag, text
from snugfit.results.footprint import Kind
from snugfit.results.prediction import CurvePoint, ModuleLine
from snugfit.units import show_bytes, show_mib

LEFT, RIGHT, HIGH, BASE = 58.0, WIDTH - 8.0, 34.0, 320.0
"""Edges of the area that is drawn."""

FURTHEST_BOUND = 3.0
"""How many times the highest bytes the GPU's memory may be to be drawn to scale."""

LEAST_SHARE = 0.004
"""Share of the peak below which modules are drawn together."""

_ORDER = (
    Kind.CONTEXT,
    Kind.WEIGHTS,
    Kind.OPTIMIZER_STATES,
    Kind.GRADIENTS,
    Kind.ACTIVATIONS,
    Kind.TEMPORARIES,
    Kind.CACHES,
    Kind.WORKSPACES,
    Kind.INPUTS,
)
_COLOURS = {kind: f"c{number}" for kind, number in zip(_ORDER, (8, 0, 2, 1, 3, 4, 5, 7, 6), strict=True)}


def colour_of(kind: str) -> str:
    """The class that gives a kind of bytes its colour."""
    return _COLOURS.get(Kind(kind), "c7")


def memory_over_step(
    curve: Sequence[CurvePoint], *, context_bytes: int = 0, memory_bytes: int | None = None
) -> Picture:
    """Bytes by kind through the steady step, what the allocator reserves, and the GPU's memory."""
    stacks = [{str(Kind.CONTEXT): context_bytes, **point.kinds} for point in curve]
    present = [str(kind) for kind in _ORDER if any(stack.get(kind) for stack in stacks)]
    reserved = [context_bytes + point.reserved_bytes for point in curve]
    peak = max(range(len(curve)), key=lambda index: sum(stacks[index].values()))
    highest = max(*reserved, sum(stacks[peak].values()))
    bound = memory_bytes if memory_bytes and memory_bytes <= FURTHEST_BOUND * highest else None
    top = 1.04 * max(highest, bound or 0)
    edges = [LEFT, *(_x(point.position) for point in curve[1:]), RIGHT]
    parts = [*_phases(curve), *byte_axis(top, LEFT, RIGHT, BASE, HIGH), *_layers(stacks, present, edges, top)]
    parts.append(tag("polyline", points=_points(edges, reserved, top), class_="reserved"))
    legend = [LegendEntry(colour_of(kind), kind) for kind in present]
    legend.append(LegendEntry("reserved", "reserved by the allocator, with the context"))
    if bound:
        y = _y(bound, top)
        parts.append(tag("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="bound"))
        legend.append(LegendEntry("bound", f"the memory that may be used, {show_bytes(bound)}"))
    for index, (at, stack) in enumerate(zip(curve, stacks, strict=True)):
        width = max(1.0, edges[index + 1] - edges[index])
        strip = tag("rect", x=edges[index], y=HIGH, width=width, height=BASE - HIGH, class_="strip")
        parts.append(point(_about(at, stack, present), strip, start=index == peak))
    about = (
        f"Bytes by kind through one steady step. The highest is {show_bytes(sum(stacks[peak].values()))}, "
        f"in {curve[peak].phase}."
    )
    far = (
        f"The memory that may be used, {show_bytes(memory_bytes or 0)}, is far above." if memory_bytes else ""
    )
    return Picture(
        title="Bytes by kind through one steady step",
        svg=picture(about, BASE + 28, *parts),
        heads=("Phase", "Highest MiB>", *(f"{kind}>" for kind in present), "Reserved>"),
        rows=[*_phase_rows(curve, stacks, present, context_bytes)],
        legend=tuple(legend),
        note="" if bound else far,
    )


def _x(position: float) -> float:
    return LEFT + (RIGHT - LEFT) * position


def _y(size: float, top: float) -> float:
    return BASE - (BASE - HIGH) * size / top


def _points(edges: Sequence[float], sizes: Sequence[float], top: float, *, back: bool = False) -> str:
    """A line through the sizes, which goes on level to the last edge; or the same from its end."""
    places = [f"{x:.1f},{_y(size, top):.1f}" for x, size in zip(edges, [*sizes, sizes[-1]], strict=True)]
    return " ".join(reversed(places) if back else places)


def _layers(
    stacks: Sequence[Mapping[str, int]], present: Sequence[str], edges: Sequence[float], top: float
) -> Iterable[Markup]:
    lower = [0.0] * len(stacks)
    for kind in present:
        upper = [below + stack.get(kind, 0) for below, stack in zip(lower, stacks, strict=True)]
        outline = f"{_points(edges, upper, top)} {_points(edges, lower, top, back=True)}"
        yield tag("polygon", points=outline, class_=colour_of(kind))
        lower = upper


def _phases(curve: Sequence[CurvePoint]) -> Iterable[Markup]:
    """Every second passage of a phase shaded, and the names under those wide enough for them."""
    passages = [list(points) for _, points in groupby(curve, key=attrgetter("phase"))]
    starts = [_x(points[0].position) for points in passages]
    for number, (points, start, end) in enumerate(zip(passages, starts, [*starts[1:], RIGHT], strict=True)):
        if number % 2:
            yield tag("rect", x=start, y=HIGH, width=end - start, height=BASE - HIGH + 24, class_="band")
        if words := shorten(points[0].phase, end - start - 6):
            yield text(words, start + 3, BASE + 17, class_="faint")


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


# ---- by module -------------------------------------------------------------------------------------------


class _Box(NamedTuple):
    """A rectangle of the map, in units."""

    x: float
    y: float
    width: float
    height: float


def modules_at_peak(modules: Sequence[ModuleLine]) -> Picture:
    """A map of the bytes at the peak, by the module that allocated them: an area for each, its colour the
    kind."""
    whole = sum(line.bytes for line in modules) or 1
    large = [line for line in modules if line.bytes >= LEAST_SHARE * whole]
    drawn = [(line.module or "(the loop)", str(line.kind), line.bytes) for line in large]
    for kind in _ORDER:
        rest = [line.bytes for line in modules if line.kind == kind and line.bytes < LEAST_SHARE * whole]
        drawn += [(f"{len(rest)} smaller", str(kind), sum(rest))] if rest else []
    drawn.sort(key=lambda entry: -entry[2])
    boxes = tile([size for _, _, size in drawn], _Box(0.0, 0.0, float(WIDTH), 380.0))
    parts = []
    for number, ((module, of_kind, size), box) in enumerate(zip(drawn, boxes, strict=True)):
        about = f"{module}: {of_kind} {show_bytes(size)}, {100 * size / whole:.1f} %"
        parts.append(point(about, *_cell(module, of_kind, size, box), start=number == 0))
    present = {kind for _, kind, _ in drawn}
    return Picture(
        title=f"Bytes by module at the peak, {show_bytes(whole)} in all",
        svg=picture(f"A map of the bytes at the peak by module, {show_bytes(whole)} in all.", 380, *parts),
        heads=("Module", "Kind", "MiB>", "Share>"),
        rows=[
            (
                line.module or "(the loop)",
                str(line.kind),
                show_mib(line.bytes),
                f"{100 * line.bytes / whole:.1f} %",
            )
            for line in modules
        ],
        legend=tuple(LegendEntry(colour_of(kind), kind) for kind in _ORDER if kind in present),
        note="A * stands for all layers of a stack. What the loop allocated has no module.",
    )


def _cell(module: str, kind: str, size: int, box: _Box) -> Iterable[Markup]:
    colour = colour_of(kind)
    yield tag("rect", x=box.x, y=box.y, width=box.width, height=box.height, class_=f"cell shape {colour}")
    ink = "on0" if colour == "c0" else "on"
    room = box.width - 10
    if (words := shorten(_tail(module, room), room)) and box.height >= 20:
        yield text(words, box.x + 5, box.y + 16, class_=ink)
        if shorten(show_bytes(size), room) == show_bytes(size) and box.height >= 36:
            yield text(show_bytes(size), box.x + 5, box.y + 32, class_=ink)


def _tail(module: str, room: float) -> str:
    """The last parts of a dotted name that fit `room` units."""
    parts = module.split(".")
    while len(parts) > 1 and shorten(".".join(parts), room) != ".".join(parts):
        parts = parts[1:]
    return ".".join(parts)


def tile(sizes: Sequence[int], box: _Box) -> list[_Box]:
    """The box cut into one rectangle for each size, in proportion, none much longer than wide (Bruls et al.,
    Squarified Treemaps, 2000). Sizes are positive and descend."""
    left = sum(sizes)
    tiles: list[_Box] = []
    begin = 0
    while begin < len(sizes):
        area = box.width * box.height / left
        side = min(box.width, box.height)
        end = begin + 1
        while end < len(sizes) and _worst(sizes[begin : end + 1], area, side) <= _worst(
            sizes[begin:end], area, side
        ):
            end += 1
        total = sum(sizes[begin:end])
        thick, along = total * area / side, 0.0
        for size in sizes[begin:end]:
            length = side * size / total
            tiles.append(
                _Box(box.x, box.y + along, thick, length)
                if box.width >= box.height
                else _Box(box.x + along, box.y, length, thick)
            )
            along += length
        if box.width >= box.height:
            box = _Box(box.x + thick, box.y, max(box.width - thick, 1e-6), box.height)
        else:
            box = _Box(box.x, box.y + thick, box.width, max(box.height - thick, 1e-6))
        left -= total
        begin = end
    return tiles


def _worst(sizes: Sequence[int], area: float, side: float) -> float:
    """The worst ratio of length to width in a row of rectangles along `side`."""
    thick = sum(sizes) * area / side
    lengths = [size * area / thick for size in sizes]
    return max(max(thick / length, length / thick) for length in lengths)

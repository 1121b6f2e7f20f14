"""Bytes by module at the peak, as a map with areas in proportion to bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from markupsafe import Markup

from snugfit.report.page.memory import KIND_ORDER, colour_of
from snugfit.report.page.picture import LegendEntry, Picture
from snugfit.report.page.svg import LETTER, WIDTH, picture, point, tag, text
from snugfit.results.prediction import ModuleLine
from snugfit.units import show_bytes, show_mib

LEAST_SHARE = 0.004
"""Share of the peak below which modules are drawn together."""

LINE, MOST_LINES = 16.0, 4
"""Units from one line of an area's words to the next, and the largest number of lines."""


class _Box(NamedTuple):
    """A rectangle of the map, in units."""

    x: float
    y: float
    width: float
    height: float


def modules_at_peak(modules: Sequence[ModuleLine]) -> Picture:
    """Return a map of the bytes at the peak by the module that allocated them. Each has an area, coloured by
    its kind."""
    whole = sum(line.bytes for line in modules) or 1
    large = [line for line in modules if line.bytes >= LEAST_SHARE * whole]
    drawn = [(line.module or "(the loop)", str(line.kind), line.bytes) for line in large]
    for kind in KIND_ORDER:
        rest = [line.bytes for line in modules if line.kind == kind and line.bytes < LEAST_SHARE * whole]
        drawn += [(f"{len(rest)} smaller", str(kind), sum(rest))] if rest else []
    drawn.sort(key=lambda entry: -entry[2])
    outer = _outer([module for module, _, _ in drawn])
    boxes = tile([size for _, _, size in drawn], _Box(0.0, 0.0, float(WIDTH), 380.0))
    parts = []
    for number, ((module, of_kind, size), box) in enumerate(zip(drawn, boxes, strict=True)):
        about = f"{module}: {of_kind} {show_bytes(size)}, {100 * size / whole:.1f} %"
        parts.append(point(about, *_cell(module.removeprefix(outer), of_kind, size, box), start=number == 0))
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
        legend=tuple(LegendEntry(colour_of(kind), kind) for kind in KIND_ORDER if kind in present),
        note="A * means all layers of a stack. Tensors of the training loop have no module.",
    )


def _outer(modules: Sequence[str]) -> str:
    """Return the common prefix of the dotted names with more than two parts: `base_model.model.`."""
    parts = [module.split(".")[:-1] for module in modules if module.count(".") > 1]
    shared = takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return "".join(f"{level[0]}." for level in shared)


def _cell(module: str, kind: str, size: int, box: _Box) -> Iterable[Markup]:
    colour = colour_of(kind)
    yield tag("rect", x=box.x, y=box.y, width=box.width, height=box.height, class_=f"cell shape {colour}")
    ink = "on0" if colour == "c0" else "on"
    rows = min(MOST_LINES, int((box.height - 4) / LINE))
    lines = _tail(module, int((box.width - 10) / LETTER), rows - 1) if rows > 1 else []
    lines += [show_bytes(size)] if lines and LETTER * len(show_bytes(size)) <= box.width - 10 else []
    for number, words in enumerate(lines):
        yield text(words, box.x + 5, box.y + LINE * (number + 1), class_=ink)


def _tail(module: str, letters: int, rows: int) -> list[str]:
    """Return the last parts of a dotted name, on at most `rows` rows of `letters` letters. Empty if the last
    part does not fit."""
    lines: list[str] = []
    for part in reversed(module.split(".")):
        joined = f"{part}.{lines[0]}" if lines else part
        if len(joined) <= letters and lines:
            lines[0] = joined
        elif len(part) + bool(lines) <= letters and len(lines) < rows:
            lines.insert(0, f"{part}." if lines else part)
        else:
            break
    return lines


def tile(sizes: Sequence[int], box: _Box) -> list[_Box]:
    """Return one rectangle of the box for each size, in proportion, none much longer than wide (Bruls et al.,
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
    """Return the worst ratio of length to width in a row of rectangles along `side`."""
    thick = sum(sizes) * area / side
    lengths = [size * area / thick for size in sizes]
    return max(max(thick / length, length / thick) for length in lengths)

"""The front of a plan: memory against speed, one point a recipe."""

from __future__ import annotations

from itertools import pairwise

from markupsafe import Markup

from snugfit.planning.plan import Choice, Plan
from snugfit.report.page.picture import LegendEntry, Picture
from snugfit.report.page.svg import WIDTH, byte_axis, picture, point, tag, text, ticks
from snugfit.units import show_bytes, show_mib, show_seconds

LEFT, RIGHT, HIGH, BASE = 58.0, WIDTH - 24.0, 34.0, 360.0
"""Edges of the drawing area."""

APART = 17.0
"""Distance in units between two points from which both get a number."""


def draw_front(plan: Plan) -> Picture:
    """Return a picture of the recipes of the front, the best one, and the memory limit.

    Numbers are those of the table. A point too close to a numbered one has none; the answer always has one.
    """
    front, answer = plan.fitting_first, plan.best_or_nearest
    speeds = [plan.speed(choice) for choice in front]
    sizes = [choice.needed_bytes for choice in front]
    top = 1.08 * max(*sizes, plan.memory_bytes or 0)
    fastest = 1.08 * max(speeds) or 1.0
    places = [
        (LEFT + (RIGHT - LEFT) * speed / fastest, BASE - (BASE - HIGH) * size / top)
        for speed, size in zip(speeds, sizes, strict=True)
    ]
    parts = [*byte_axis(top, LEFT, RIGHT, BASE, HIGH), *_speed_axis(fastest)]
    legend = [LegendEntry("c0", "recipes of the front")]
    if plan.memory_bytes:
        y = BASE - (BASE - HIGH) * plan.memory_bytes / top
        parts.append(tag("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="bound"))
        legend.append(LegendEntry("bound", f"the memory limit, {show_bytes(plan.memory_bytes)}"))
    for (right, upper), (left, lower) in pairwise(sorted(places, reverse=True)):
        stair = f"{left:.1f},{lower:.1f} {left:.1f},{upper:.1f} {right:.1f},{upper:.1f}"
        parts.append(tag("polyline", points=stair, class_="rule"))
    if plan.best:
        legend.append(LegendEntry("best", "the best that fits"))
    numbered = [places[front.index(answer) if answer in front else 0]]
    for number, (choice, (x, y)) in enumerate(zip(front, places, strict=True), 1):
        free = all(abs(x - other) > APART or abs(y - beside) > APART for other, beside in numbered)
        free = free or (x, y) == numbered[0]
        numbered += [(x, y)] if free else []
        parts.append(_recipe_point(plan, choice, number, x, y, numbered_here=free))
    unit = "Samples per second" + (", start-up included" if plan.steps else "")
    return Picture(
        title="Memory and speed of the best recipes (Pareto front)",
        svg=picture(f"{len(front)} recipes, memory against speed.", BASE + 44, *parts),
        heads=("No.>", "Recipe", "MiB>", f"{unit}>", "A step>", "Verdict"),
        rows=[
            (
                str(number),
                choice.recipe,
                show_mib(choice.needed_bytes),
                f"{speed:.2f}",
                show_seconds(choice.step_seconds),
                _verdict(plan, choice),
            )
            for number, (choice, speed) in enumerate(zip(front, speeds, strict=True), 1)
        ],
        legend=tuple(legend),
        numbered=True,
    )


def _recipe_point(
    plan: Plan, choice: Choice, number: int, x: float, y: float, *, numbered_here: bool
) -> Markup:
    about = (
        f"{number}: {choice.recipe}: {show_bytes(choice.needed_bytes)}, {plan.speed(choice):.2f} samples/s"
        f"{', ' if _verdict(plan, choice) else ''}{_verdict(plan, choice)}"
    )
    shapes = [tag("circle", cx=x, cy=y, r=5, class_="shape c0")]
    if plan.best == choice:
        shapes.append(tag("circle", cx=x, cy=y, r=9, class_="best"))
    if numbered_here:
        shapes.append(text(str(number), x - 7, y - 8, anchor="end", class_="halo"))
    return point(about, *shapes, start=choice == plan.best_or_nearest)


def _verdict(plan: Plan, choice: Choice) -> str:
    if plan.best == choice:
        return "the best that fits"
    return "does not fit" if plan.memory_bytes and choice.needed_bytes > plan.memory_bytes else ""


def _speed_axis(fastest: float) -> list[Markup]:
    parts = []
    for tick in ticks(fastest, count=8):
        x = LEFT + (RIGHT - LEFT) * tick / fastest
        parts.append(tag("line", x1=x, x2=x, y1=BASE, y2=BASE + 5, class_="rule"))
        parts.append(text(f"{tick:g}", x, BASE + 20, anchor="middle"))
    parts.append(text("samples per second", RIGHT, BASE + 38, anchor="end", class_="faint"))
    return parts

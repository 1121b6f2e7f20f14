"""The chart of a plan's Pareto front: memory against speed, one point for each recipe (its training
techniques).
"""

from __future__ import annotations

from snugfit.features.page.chart import Chart, Front, RecipePoint
from snugfit.planning.plan import Choice, Plan
from snugfit.units import show_bytes, show_mib, show_seconds


def draw_front(plan: Plan) -> Chart:
    """Return the chart of the recipes on a plan's Pareto front, with the best one and the memory limit. The
    points have the numbers of the table.
    """
    front = plan.fitting_first
    speeds = [plan.speed(choice) for choice in front]
    points = [
        _recipe_point(plan, choice, number, speed)
        for number, (choice, speed) in enumerate(zip(front, speeds, strict=True), 1)
    ]
    words = plan.job.words
    unit = f"{words.item.capitalize()} per second" + (", start-up included" if plan.steps else "")
    return Chart(
        title="Memory and speed of the best recipes (Pareto front)",
        about=f"{len(front)} recipes, memory against speed.",
        drawing=Front(points=points, limit=plan.memory_bytes, item=words.item),
        heads=("No.>", "Recipe", "MiB>", f"{unit}>", f"A {words.turn}>", "Verdict"),
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
        note="Filled points fit, hollow ones do not. No recipe of the front is both slower and larger than "
        "another.",
        numbered=True,
    )


def _recipe_point(plan: Plan, choice: Choice, number: int, speed: float) -> RecipePoint:
    verdict = _verdict(plan, choice)
    return RecipePoint(
        number=number,
        recipe=choice.recipe,
        bytes=choice.needed_bytes,
        speed=speed,
        fits=plan.fitting(choice),
        best=choice == plan.best,
        label=", ".join(
            filter(None, (show_bytes(choice.needed_bytes), f"{speed:.2f} {plan.job.words.item}/s", verdict))
        ),
    )


def _verdict(plan: Plan, choice: Choice) -> str:
    if plan.best == choice:
        return "the best that fits"
    return "does not fit" if plan.memory_bytes and choice.needed_bytes > plan.memory_bytes else ""

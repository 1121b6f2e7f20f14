"""The plot of a plan: memory against speed, one point a recipe of the front, and the available memory."""

from __future__ import annotations

from snugfit.planning.plan import Plan
from snugfit.report.text.figure import BLUE, LIGHT_BLUE, RED, drawing
from snugfit.report.text.terminal import words
from snugfit.units import GIB


def draw(plan: Plan, form: str) -> bytes:
    """The plot as a `png` or an `svg` file's bytes."""
    sizes = [choice.needed_bytes / GIB for choice in plan.front]
    speeds = [plan.speed(choice) for choice in plan.front]
    with drawing(form, width=11, height=5.5) as drawn:
        axes = drawn.figure.subplots()
        axes.step(sizes[::-1], speeds[::-1], where="post", color=LIGHT_BLUE, linewidth=1)
        axes.scatter(sizes, speeds, color=BLUE, zorder=3, label="Pareto front")
        if plan.best:
            best = plan.best.needed_bytes / GIB, plan.speed(plan.best)
            axes.scatter(*best, s=90, facecolors="none", edgecolors=RED, zorder=4, label="best")
        if plan.memory_bytes:
            axes.axvline(
                plan.memory_bytes / GIB, color="0.4", linewidth=0.8, linestyle=":", label="available memory"
            )
        for number, point in enumerate(zip(sizes, speeds, strict=True), 1):
            axes.annotate(str(number), point, xytext=(4, 4), textcoords="offset points", fontsize=7)
        listed = "\n".join(f"{number:2}  {choice.recipe}" for number, choice in enumerate(plan.front, 1))
        axes.text(1.02, 1, listed, transform=axes.transAxes, fontsize=7, va="top", linespacing=1.6)
        axes.set_xlabel("GPU memory, GiB")
        axes.set_ylabel(f"Samples per second{', start-up included' if plan.steps else ''}")
        axes.set_title(f"{words(plan.job.model.name).plain}, batch {plan.job.batch_size}")
        axes.legend(frameon=False, loc="lower right")
    return drawn.content

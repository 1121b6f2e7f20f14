"""The plot of an accuracy result: predicted against measured step time, and a histogram of the relative
errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from snugfit.errors import UsageError
from snugfit.features.accuracy.compared_runs import Accuracy, ComparedRun
from snugfit.report.text.figure import BLUE, LIGHT_BLUE, ORANGE, drawing

DOTTED_LINE_ERROR = 0.2
"""Relative error at the dotted lines of the plot. At least nine in ten runs should have a smaller one."""

MAX_PLOTTED_ERROR = 50
"""Largest error in per cent on the histogram's axis. Larger errors are counted in its last bars."""


def draw(results: Sequence[Accuracy], form: str) -> bytes:
    """Draw predicted against measured step time. Return the bytes of a `png` or an `svg` file. Raises
    `UsageError` when no run has a step time.
    """
    groups: dict[str, list[ComparedRun]] = {}
    for run in (run for result in results for run in result.runs if run.seconds):
        groups.setdefault("host" if run.bound == "host" else "device", []).append(run)
    if not groups:
        raise UsageError("--plot: no run of these results has seconds on both sides. Try --measure.")
    pairs = [run.seconds or (0.0, 0.0) for runs in groups.values() for run in runs]
    ends = [min(map(min, pairs)) / 1.3, max(map(max, pairs)) * 1.3]
    with drawing(form, width=11, height=5) as drawn:
        left, right = drawn.figure.subplots(1, 2)
        for name, color in (("device", BLUE), ("host", ORANGE)):
            seconds = [run.seconds or (0.0, 0.0) for run in groups.get(name, [])]
            left.scatter(
                [after for _, after in seconds], [before for before, _ in seconds], s=18, color=color,
                label=f"{len(seconds)} runs bound by the {name}",
            )  # fmt: skip
        for share, style in ((0.0, "-"), (DOTTED_LINE_ERROR, ":"), (-DOTTED_LINE_ERROR, ":")):
            left.plot(ends, [end * (1 + share) for end in ends], color="0.4", linewidth=0.8, linestyle=style)
        left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        left.set_xlabel("Seconds of a step, measured")
        left.set_ylabel("Seconds of a step, predicted")
        left.legend(frameon=False)
        errors = [100 * (before / after - 1) for before, after in pairs]
        within = [max(-MAX_PLOTTED_ERROR, min(MAX_PLOTTED_ERROR, error)) for error in errors]
        right.hist(
            within,
            bins=list(range(-MAX_PLOTTED_ERROR, MAX_PLOTTED_ERROR + 5, 5)),
            color=LIGHT_BLUE,
            edgecolor="white",
        )
        right.set_xlabel("Error, per cent of the measured seconds")
        right.set_ylabel("Runs")
    return drawn.content

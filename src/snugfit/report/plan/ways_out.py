"""Sentences on the changes with which a step fits, for reports and for errors."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snugfit.job.gpu import find_gpu
from snugfit.report.plan.next_steps import job_words
from snugfit.results.ways_out import LargerGpu, WayOut, WaysOut
from snugfit.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.results.prediction import Prediction

NO_SLOWDOWN = 0.0005
"""Share of a step below which a slowdown is shown as none."""

FIDELITY = {"same": "exact", "rounds": "rounds differently", "learns": "another algorithm"}
"""Words for the fidelity of a change."""


def about_ways_out(ways: WaysOut, job: Job, gpu: Gpu | None, gpus: int = 1) -> Iterator[str]:
    """Yield a heading, one line for each change, and a command for the first one or for a further search."""
    if ways.ways:
        yield "Changes that fit, the cheapest first (predicted; other techniques of the recipe stay):"
        for number, way in enumerate(ways.ways, 1):
            yield f"{number}. {_about(way)}"
        yield f"The first one: --recipe {shlex.quote(ways.ways[0].recipe)}"
    elif ways.larger_gpu:
        yield f"No change of the recipe was found that fits. {_about_larger(ways.larger_gpu)}"
    elif gpus == 1:
        yield "No change of the recipe was found that fits, and no larger GPU."
    if len(ways.ways) < 3 and gpu is not None and job.model.module is None:
        yield f"A plan searches all techniques: {_plan_command(job, gpu, gpus)}"


def of_prediction(prediction: Prediction) -> list[str]:
    """Return the sentences of a prediction with ways out; empty for one without."""
    if prediction.ways_out is None:
        return []
    return list(about_ways_out(prediction.ways_out, prediction.job, prediction.gpu, prediction.gpus))


def _about(way: WayOut) -> str:
    figures = [show_bytes(way.needed_bytes)]
    if way.step_seconds is not None:
        figures += [f"{show_seconds(way.step_seconds)} a step{_slowdown(way.slowdown)}"]
    figures += [FIDELITY[way.fidelity]]
    figures += [f"tight: {show_bytes(way.spare_bytes)} to spare"] if way.tight else []
    return f"{' + '.join(way.changes)}: {', '.join(figures)}."


def _slowdown(share: float | None) -> str:
    if share is None:
        return ""
    return " (no slower)" if abs(share) < NO_SLOWDOWN else f" ({100 * share:+.1f} %)"


def _about_larger(larger: LargerGpu) -> str:
    figures = show_bytes(larger.needed_bytes)
    figures += f", {show_seconds(larger.step_seconds)} a step" if larger.step_seconds is not None else ""
    return (
        f"The smallest GPU that fits is {find_gpu(larger.gpu, exact=True).name}, with "
        f"{show_bytes(larger.memory_bytes)}: {larger.recipe} takes {figures}."
    )


def _plan_command(job: Job, gpu: Gpu, gpus: int) -> str:
    several = f" --gpus {gpus}" if gpus > 1 else ""
    further = " --fidelity learns" if gpus == 1 else ""
    return f"snugfit plan {job_words(job)} --gpu {shlex.quote(gpu.key)}{several}{further}"

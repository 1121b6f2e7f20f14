"""Sentences on the changes with which a step fits, for reports and for errors."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snugfit.job.gpu import find_gpu
from snugfit.report.plan.next_steps import job_words
from snugfit.report.text.answer import show_gib
from snugfit.report.text.facts import LABEL, Facts
from snugfit.report.text.pace import roughly
from snugfit.report.text.page import Sentence
from snugfit.results.ways_out import LargerGpu, WayOut, WaysOut
from snugfit.units import MIB, show_bytes, show_seconds

if TYPE_CHECKING:
    from snugfit.planning.plan import Plan
    from snugfit.results.prediction import Prediction

MANY = 3
"""Number of changes from which no further command is suggested."""

NO_SLOWDOWN = 0.0005
"""Share of a step below which a slowdown is not shown."""

FIDELITY = {"same": "exact", "rounds": "rounds differently", "learns": "another algorithm"}
"""Words for the fidelity of a change."""


def about_ways_out(ways: WaysOut, command: str, of: str = "the recipe") -> Iterator[str]:
    """Yield a heading, a line for each change and the first one as an option.

    With few changes, a further `command` follows. They are changes `of` the recipe of this name.
    """
    if ways.ways:
        yield f"Changes of {of} that fit, the cheapest first (predicted):"
        for number, way in enumerate(ways.ways, 1):
            yield f"{number}. {_about(way)}"
        yield f"The first one: --recipe {shlex.quote(ways.ways[0].recipe)}"
    elif ways.larger_gpu:
        yield f"No change of {of} was found that fits. {_about_larger(ways.larger_gpu)}"
    if len(ways.ways) < MANY and command:
        yield f"A plan searches all techniques: {command}"


def in_short(ways: WaysOut) -> Iterator[Facts | Sentence]:
    """Yield labelled lines: each change, and the first one as an option; else the smallest larger GPU."""
    changes = map(_about, ways.ways) if ways.ways else filter(None, [_about_larger(ways.larger_gpu)])
    rows = tuple(("" if number else "fits with", text) for number, text in enumerate(changes))
    if rows:
        yield Facts(rows)
    if ways.ways:
        option = f"--recipe {shlex.quote(ways.ways[0].recipe)}"
        yield Sentence(f"{'':{LABEL}}  {option}", "recipe")


def of_prediction(prediction: Prediction) -> list[str]:
    """Return the sentences of a prediction with ways out; empty for one without."""
    if prediction.ways_out is None:
        return []
    return list(about_ways_out(prediction.ways_out, plan_command(prediction)))


def of_plan(plan: Plan) -> Iterator[str]:
    """Yield sentences: the least memory that was found, and the ways out of the nearest miss; nothing if a
    recipe fits."""
    # The last recipe of the front has the fewest bytes.
    if not plan.fits and (smallest := plan.front[-1]) != plan.nearest:
        yield (
            f"The least memory that was found is {show_bytes(smallest.needed_bytes)}, with "
            f"{show_seconds(smallest.step_seconds)} a step: {smallest.recipe}."
        )
    if plan.ways_out:
        yield from about_ways_out(plan.ways_out, "", "the nearest miss")


def _about(way: WayOut) -> str:
    figures = [show_gib(way.needed_bytes)]
    if way.step_seconds is not None:
        figures += [f"{roughly(way.step_seconds)} a step{_slowdown(way.slowdown)}"]
    figures += [FIDELITY[way.fidelity]]
    figures += [f"tight: {show_bytes(way.spare_bytes)} to spare"] if way.tight else []
    return f"{' + '.join(way.changes)}: {', '.join(figures)}."


def _slowdown(share: float | None) -> str:
    if share is None:
        return ""
    return " (no slower)" if abs(share) < NO_SLOWDOWN else f" ({100 * share:+.1f} %)"


def _about_larger(larger: LargerGpu | None) -> str:
    if larger is None:
        return ""
    figures = show_bytes(larger.needed_bytes)
    figures += f", {show_seconds(larger.step_seconds)} a step" if larger.step_seconds is not None else ""
    return (
        f"The smallest GPU that fits is {find_gpu(larger.gpu, exact=True).name}, with "
        f"{show_bytes(larger.memory_bytes)}: {larger.recipe} takes {figures}."
    )


def plan_command(prediction: Prediction) -> str:
    """Return the command line of a plan for this job; empty for an evaluation, or a model that only Python
    has."""
    job, gpu = prediction.job, prediction.gpu
    if job.model.module is not None or not job.trains:
        return ""
    words = ["--routing", job.routing] if job.routing != "balanced" else []
    words += ["--gpu", shlex.quote(gpu.key.lower()) if gpu else "NAME"]
    if prediction.memory_bytes is not None and (gpu is None or prediction.memory_bytes != gpu.memory_bytes):
        words += ["--memory", f"{prediction.memory_bytes // MIB}MiB"]
    if prediction.gpus > 1:
        words += ["--gpus", f"{prediction.gpus}"]
    elif prediction.ways_out is not None:  # nothing else fits
        words += ["--fidelity", "learns"]
    return f"snugfit plan {job_words(job)} {' '.join(words)}"

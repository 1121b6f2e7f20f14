"""Sentences on a step that does not fit: the least memory found, changes that make it fit, the command of a
plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snugfit.report.plan.next_steps import job_words
from snugfit.report.text.facts import Facts
from snugfit.report.text.page import Sentence
from snugfit.techniques.registry import hooks
from snugfit.units import MIB, show_bytes, show_seconds

if TYPE_CHECKING:
    from snugfit.planning.plan import Plan
    from snugfit.results.prediction import Prediction
    from snugfit.results.ways_out import WaysOut


def in_short(ways: WaysOut | None, turn: str) -> list[Facts | Sentence]:
    """Return labelled lines of changes with which the step fits, with the first one as command-line option;
    empty without a change. `turn` is the noun for a step.
    """
    if ways is None:
        return []
    return [line for code in hooks("changes_that_fit") for line in code().in_short(ways, turn)]


def of_prediction(prediction: Prediction) -> list[str]:
    """Return sentences on changes with which a predicted step fits; empty if the prediction has none."""
    command = plan_command(prediction)
    return _sentences(prediction.ways_out, command, "the recipe", prediction.job.words.turn)


def of_plan(plan: Plan) -> Iterator[str]:
    """Yield sentences on the least memory that was found, and on changes of the recipe nearest to fitting.
    They are empty if a recipe fits.
    """
    # The last recipe of the Pareto front needs the fewest bytes.
    if not plan.fits and (smallest := plan.front[-1]) != plan.nearest:
        yield (
            f"The least memory that was found is {show_bytes(smallest.needed_bytes)}, with "
            f"{show_seconds(smallest.step_seconds)} a {plan.job.words.turn}: {smallest.recipe}."
        )
    yield from _sentences(plan.ways_out, "", "the nearest miss", plan.job.words.turn)


def _sentences(ways: WaysOut | None, command: str, of: str, turn: str) -> list[str]:
    """Return sentences on the changes with which a step fits. `of` names the changed recipe, `command` is the
    command line of a plan, and `turn` is the noun for a step.
    """
    if ways is None:
        return []
    return [
        sentence
        for code in hooks("changes_that_fit")
        for sentence in code().about_ways_out(ways, command, of, turn)
    ]


def plan_command(prediction: Prediction) -> str:
    """Return the command line of a plan for this job; empty for a model that only Python has."""
    job, gpu = prediction.job, prediction.gpu
    if job.model.module is not None:
        return ""
    words = ["--routing", job.routing] if job.routing != "balanced" else []
    words += ["--gpu", shlex.quote(gpu.key.lower()) if gpu else "NAME"]
    if prediction.memory_bytes is not None and (gpu is None or prediction.memory_bytes != gpu.memory_bytes):
        words += ["--memory", f"{prediction.memory_bytes // MIB}MiB"]
    if prediction.gpus > 1:
        words += ["--gpus", f"{prediction.gpus}"]
    elif prediction.ways_out is not None:  # no other change fits
        words += ["--fidelity", "learns"]
    return f"snugfit plan {job_words(job)} {' '.join(words)}"

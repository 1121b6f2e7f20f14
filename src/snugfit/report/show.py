"""Any result as text or HTML, by its type: what `print` and a notebook show.

The values stand below this room and know nothing of it, so they are given their faces from here: `attach`
sets `__str__` and `_repr_html_` on their classes. Whoever hands out results calls it once; nothing happens at
import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from snugfit.comparison.compare import Comparison
from snugfit.comparison.recipes import RecipeComparison
from snugfit.measurement.doctor import Doctor
from snugfit.planning.fleet.gpu_plans import GpuPlans
from snugfit.planning.lengths.length_plan import LengthPlan
from snugfit.planning.plan import Plan
from snugfit.report import compare, doctor, measurement, prediction
from snugfit.report.pictures import has_pictures, notebook_cell
from snugfit.report.plan import gpu_plans, lengths, plan
from snugfit.report.text.terminal import as_html, as_text
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction

_RENDERERS: dict[type, Callable[[Any], RenderableType]] = {
    Prediction: prediction.render,
    Measurement: measurement.render,
    Comparison: compare.beside,
    RecipeComparison: lambda recipes: compare.render(recipes.predictions),
    Plan: plan.render,
    LengthPlan: lengths.render,
    GpuPlans: gpu_plans.render,
    Doctor: doctor.render,
}


def text(result: object) -> str:
    """A result as plain text."""
    return as_text(_RENDERERS[type(result)](result))


def html(result: object) -> str:
    """A result as an inert HTML fragment: pictures and tables where it has them."""
    if has_pictures(type(result)):
        return notebook_cell(result)
    return as_html(_RENDERERS[type(result)](result))


def _as_plain_text(result: object, printer: Any, _cycle: bool) -> None:
    """The text that IPython keeps beside the HTML: the report, not the fields of the dataclass."""
    printer.text(text(result))


def attach() -> None:
    """Lets every result print itself, in a terminal and in a notebook."""
    for kind in _RENDERERS:
        setattr(kind, "__str__", text)  # noqa: B010 - mypy forbids assigning to a method
        setattr(kind, "_repr_html_", html)  # noqa: B010
        setattr(kind, "_repr_pretty_", _as_plain_text)  # noqa: B010

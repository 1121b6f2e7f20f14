"""Results as text or HTML, by their type, for `print` and notebooks.

Classes of results are in packages that this one imports, so they cannot import it. So `attach` sets `__str__`
and `_repr_html_` on their classes. Each caller that returns results calls it once; an import has no such
effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from snugfit.comparison.compare import Comparison
from snugfit.comparison.recipes import RecipeComparison
from snugfit.planning.fleet.gpu_plans import GpuPlans
from snugfit.planning.plan import Plan
from snugfit.report import compare, measurement, prediction
from snugfit.report.plan import gpu_plans, plan
from snugfit.report.text.terminal import as_html, as_text
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction
from snugfit.techniques.registry import hooks, picture

_RENDERERS: dict[type, Callable[[Any], RenderableType]] = {
    Prediction: prediction.render,
    Measurement: measurement.render,
    Comparison: compare.beside,
    RecipeComparison: lambda recipes: compare.render(recipes.predictions),
    Plan: plan.render,
    GpuPlans: gpu_plans.render,
}


def _renderers() -> dict[type, Callable[[Any], RenderableType]]:
    return _RENDERERS | {kind: render for reports in hooks("reports") for kind, render in reports().items()}


def render(result: object) -> Any:
    """Return the report of a result, such as a prediction or a plan, as a `Page`."""
    return _renderers()[type(result)](result)


def text(result: object) -> str:
    """Return a result as plain text."""
    return as_text(render(result))


def html(result: object) -> str:
    """Return a result as an HTML fragment without scripts, with pictures and tables where it has them."""
    return picture(result, "html").decode() or as_html(render(result))


def _as_plain_text(result: object, printer: Any, _cycle: bool) -> None:
    """Print the report as IPython's plain text next to the HTML, instead of the dataclass's fields."""
    printer.text(text(result))


def attach() -> None:
    """Set `__str__` and the HTML representation of every result's class."""
    for kind in _renderers():
        setattr(kind, "__str__", text)  # noqa: B010 - mypy forbids assigning to a method
        setattr(kind, "_repr_html_", html)  # noqa: B010
        setattr(kind, "_repr_pretty_", _as_plain_text)  # noqa: B010

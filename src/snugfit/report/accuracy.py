"""A draw in a terminal and in Markdown: every run with its errors, the quantiles, and the band."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType

from snugfit.comparison.families import FAMILIES
from snugfit.comparison.runs import BAND, Accuracy, Run, quantiles
from snugfit.report.grid import Grid, markdown, terminal
from snugfit.report.job import sizes
from snugfit.report.terminal import words
from snugfit.units import show_mib

FIGURES = {
    "requested_bytes": "requested",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "nvml_bytes": "NVML",
    "step_seconds": "step",
}
SHOWN = (*BAND, "step_seconds")


def render(result: Accuracy) -> RenderableType:
    """The draw for a terminal."""
    complaints = [words(f"Run {run.number}: {run.complaint}", "red") for run in result.outside]
    return Group(terminal(runs_grid(result)), terminal(summary_grid(result)), *complaints)


def runs_grid(result: Accuracy) -> Grid:
    """One row a run."""
    heads = ("", "Job", "Recipe", "NVML MiB>", "seen MiB>")
    return Grid(
        title=title(result),
        heads=(*heads, *(f"{FIGURES[figure]} %>" for figure in SHOWN), "bound by"),
        rows=tuple(_row(run) for run in result.runs),
    )


def title(result: Accuracy) -> str:
    """What was drawn, and where it ran."""
    families = len({run.family for run in result.runs})
    where = f"measured on {result.device}" if result.device else f"predicted for {result.gpu}, not measured"
    return f"Seed {result.seed}: {len(result.runs)} runs of {families} families, {where}"


def _row(run: Run) -> tuple[str, ...]:
    job = run.job
    what = f"{job.model.name}: {job.task}, {sizes(job)}"
    extras = [f"built on the {job.build_on}"] if job.build_on != "device" else []
    extras += [f"padding {job.padding:g}"] if job.padding else []
    extras += ["evaluate"] if not job.trains else []
    return (
        str(run.number),
        ", ".join([what, *extras]),
        str(run.recipe),
        _mib(run.predicted.nvml_bytes if run.predicted else None),
        _seen(run),
        *(_per_cent(run.error(figure)) for figure in SHOWN),
        run.bound or "",
    )


def _seen(run: Run) -> str:
    """What was measured, or how the run died."""
    if run.outcome not in (None, "ok"):
        return str(run.outcome)
    return _mib(run.measured.nvml_bytes if run.measured else None)


def summary_grid(result: Accuracy) -> Grid:
    """The quantiles of each figure beside its band."""
    rows = []
    for figure, name in FIGURES.items():
        errors = result.errors(figure)
        shown = [_per_cent(error, signed=False) for error in quantiles(errors)]
        band = BAND.get(figure)
        inside = sum(error <= band for error in errors) if band else None
        rows.append(
            (
                name,
                *shown,
                _per_cent(band, signed=False),
                f"{inside} of {len(errors)}" if inside is not None else "",
            )
        )
    heads = ("Error", "Half of the runs below %>", "Nine in ten below %>", "Largest %>", "Band %>", "Inside>")
    return Grid(title="Errors", heads=heads, rows=tuple(rows), note=_verdict(result))


def _verdict(result: Accuracy) -> str:
    if not any(run.outcome for run in result.runs):
        failed = len(result.outside)
        return f"Nothing was measured; {failed} of {len(result.runs)} draws could not be predicted."
    outside = len(result.outside)
    if outside:
        return f"{outside} of {len(result.runs)} runs are outside the band."
    return f"All {len(result.runs)} runs are inside the band."


def document(results: Sequence[Accuracy]) -> str:
    """`docs/accuracy.md`: what is claimed, how it was found, and every drawn run."""
    band = ", ".join(f"{FIGURES[figure]} {100 * share:g} %" for figure, share in BAND.items())
    parts = [_HEAD.format(band=band, families=len(FAMILIES))]
    for result in results:
        parts += [markdown(runs_grid(result)), _outside(result), markdown(summary_grid(result))]
        versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        parts.append(f"Predicted with {versions}.\n")
    return "\n".join(part for part in parts if part)


def _outside(result: Accuracy) -> str:
    lines = (f"- Run {run.number}: {' '.join((run.complaint or '').split())}\n" for run in result.outside)
    return "".join(lines)


_HEAD = """# Accuracy

Written by `snugfit accuracy --show FOLDER --format markdown` from the files in that folder.

A seed draws models, jobs and recipes over {families} families; each is predicted, then measured in a process
of its own, and none is left out. The largest errors that are allowed: {band}. Errors are
`predicted / measured - 1`, of the peak over the whole run. How a run is measured stands in
[measuring.md](measuring.md).
"""


def _mib(amount: int | None) -> str:
    return "" if amount is None else show_mib(amount)


def _per_cent(share: float | None, *, signed: bool = True) -> str:
    if share is None:
        return ""
    return f"{100 * share:+.2f}" if signed else f"{100 * share:.2f}"


def file_name(seed: int) -> str:
    """The file of a seed's draw."""
    return f"accuracy-seed{seed}.json"

"""Tables of `snugfit accuracy` for a terminal: runs with their prediction errors, their order, and error
quantiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from snugfit.features.accuracy.compared_runs import BAND, Accuracy, ComparedRun, error_quantiles
from snugfit.features.accuracy.order import (
    bytes_cells,
    gap_line,
    order_line,
    per_cent,
    recipes_grid,
    seconds_cells,
)
from snugfit.features.accuracy.ranking import gap, group_by_job
from snugfit.report.text.grid import Grid
from snugfit.report.text.job import sizes
from snugfit.report.text.page import Page, Sentence

FIGURES = {
    "requested_bytes": "requested",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "nvml_bytes": "NVML",
    "step_seconds": "step",
}
GAP = 0.05
"""Largest accepted slowdown of a plan's first recipe against the fastest measured recipe, as a share of its
seconds."""


def render(result: Accuracy) -> Page:
    """Return the terminal report of `snugfit accuracy`: runs, prediction errors and their quantiles."""
    complaints = (Sentence(f"Run {run.number}: {run.complaint}", "fault") for run in result.outside)
    return Page(
        [Sentence(title(result), "heading"), *grids(result)],
        about_order(result),
        [summary_grid(result)],
        complaints,
    )


def grids(result: Accuracy) -> Iterator[Grid]:
    """Yield tables of predicted and measured runs. There is one table for each job with several runs, or one
    for all.
    """
    if result.kind == "drawn":
        yield runs_grid(result)
        return
    for runs in group_by_job(result.runs):
        lines = [order_line(runs), gap_line(runs) if result.kind == "top" else ""]
        yield recipes_grid(runs, job_words(runs[0]), " ".join(filter(None, lines)))


def runs_grid(result: Accuracy) -> Grid:
    """Return a table with one row for each predicted and measured run."""
    bytes_heads = ("NVML MiB>", "measured>", "allocated %>", "reserved %>", "NVML %>")
    heads = ("No.", *bytes_heads, "ms a step>", "measured>", "%>", "bound by", "Job", "Recipe<")
    rows = tuple(
        (
            str(run.number),
            *bytes_cells(run),
            *seconds_cells(run),
            run.bound or "",
            job_words(run),
            str(run.recipe),
        )
        for run in result.runs
    )
    return Grid(title=f"Runs of seed {result.seed}", heads=heads, rows=rows)


def title(result: Accuracy) -> str:
    """Return the title of the accuracy tables: the jobs and the device."""
    families = len({run.family for run in result.runs})
    jobs = len(group_by_job(result.runs))
    count = f"{jobs} job{'s' if jobs > 1 else ''}"
    source = f"Seed {result.seed}" if result.seed is not None else "Named jobs"
    runs = {
        "drawn": f"{len(result.runs)} runs of {families} families",
        "within-job": f"{len(result.runs)} runs of {count}, each in drawn recipes",
        "top": f"{len(result.runs)} runs of {count}, each in its plan's best recipes",
    }
    origin = f"measured on {result.device}" if result.device else f"predicted for {result.gpu}, not measured"
    again = f", predicted again {result.rescored}" if result.rescored else ""
    return f"{source}: {runs.get(result.kind, runs['drawn'])}, {origin}{again}"


def job_words(run: ComparedRun) -> str:
    """Return a training job (model, task and batch size) as text for one table cell."""
    job = run.job
    summary = f"{job.model.name}: {job.task}, {sizes(job)}"
    extras = [f"built on the {job.build_on}"] if job.build_on != "device" else []
    extras += [f"padding {job.padding:g}"] if job.padding else []
    extras += ["evaluate"] if not job.trains else []
    return ", ".join([summary, *extras])


def about_order(result: Accuracy) -> Iterator[str]:
    """Yield sentences on the agreement of predicted and measured order over all jobs, and on slow first
    choices.
    """
    if result.kind == "drawn":
        return
    if line := order_line(result.runs):
        yield f"All jobs together. {line}"
    if result.kind == "top":
        yield from gaps_line(group_by_job(result.runs))


def gaps_line(jobs: Sequence[Sequence[ComparedRun]]) -> Iterator[str]:
    """Yield a sentence on the jobs whose predicted fastest recipe is nearly the measured fastest, and on the
    worst job.
    """
    gaps = [gap(runs) for runs in jobs if any(run.outcome for run in runs)]
    known = [share for share in gaps if share is not None]
    if gaps:
        inside = sum(share <= GAP for share in known)
        worst = f"; the worst is {100 * max(known):.1f} % behind" if known else ""
        yield (
            f"The plan's first choice is within {100 * GAP:g} % of the best of its measured recipes on "
            f"{inside} of {len(gaps)} jobs{worst}."
        )


def summary_grid(result: Accuracy) -> Grid:
    """Return a table with quantiles of the relative errors of memory and step time, next to the allowed
    errors.
    """
    rows = []
    for figure, name in FIGURES.items():
        errors = result.errors(figure)
        shown = [per_cent(error, signed=False) for error in error_quantiles(errors)]
        band = BAND.get(figure)
        inside = sum(error <= band for error in errors) if band else None
        rows.append(
            (
                name,
                *shown,
                per_cent(band, signed=False),
                f"{inside} of {len(errors)}" if inside is not None else "",
            )
        )
    heads = ("Error", "Half of the runs below %>", "Nine in ten below %>", "Largest %>", "Band %>", "Inside>")
    return Grid(title="Errors", heads=heads, rows=tuple(rows), note=_verdict(result))


def _verdict(result: Accuracy) -> str:
    if not any(run.outcome for run in result.runs):
        failed = len(result.outside)
        return f"Nothing was measured. {failed} of {len(result.runs)} draws could not be predicted."
    outside = len(result.outside)
    if outside:
        return f"{outside} of {len(result.runs)} runs have larger errors than allowed."
    return f"All {len(result.runs)} runs have allowed errors."


def file_name(result: str, kind: str = "drawn", count: int = 0) -> str:
    """Return the file name for a result of `snugfit accuracy`, from its kind and its seed or job files."""
    ending = {"drawn": "", "within-job": "-within-job", "top": f"-top{count}"}[kind]
    return f"accuracy-{result}{ending}.json"

"""Tables of the guide's `torch.compile` backends and memory categories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from snugfit.features.guide.inference import KINDS, EngineRatio, InferenceGuide, MeasuredEngines
from snugfit.features.guide.methods import show_rate, show_size
from snugfit.report.text.grid import Grid, escape
from snugfit.report.text.page import Page, Sentence


def render(result: InferenceGuide) -> Page:
    """Return the tables and the first uncertainty for a terminal."""
    doubts = result.doubts[:1]
    return Page(_grids(result), (Sentence(f"Uncertain: {doubt}", "uncertain") for doubt in doubts))


def markdown(result: InferenceGuide, *, plot: str = "") -> str:
    """Return the tables as Markdown; `plot` is the picture's file name in the same folder."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    title = f"## The guide's backends for inference on {escape(result.gpu)}"
    picture = f"![Kinds of memory and speed of backends]({plot})\n" if plot else ""
    return "\n".join(
        [
            f"{title}\n\nPredicted with {escape(versions)}.\n",
            picture,
            *(grid.markdown() for grid in _grids(result)),
        ]
    )


def _grids(result: InferenceGuide) -> Iterator[Grid]:
    rows = tuple(
        (
            row.name,
            row.state,
            row.today,
            show_size(row.needed_bytes),
            show_rate(row.speed.samples_per_second if row.speed else None),
            show_ratios(result.measured.of(row.measured_engine)),
        )
        for row in result.backends
    )
    refused = [row for row in result.backends if row.refused]
    reasons = dict.fromkeys(row.refused for row in refused)
    names = {reason: ", ".join(row.name for row in refused if row.refused == reason) for reason in reasons}
    yield Grid(
        title=f"Backends of the guide for inference, {result.gpu}",
        heads=("Named", "In torch", "Today", "MiB>", "Samples/s>", "On a CPU>"),
        rows=rows,
        note=" ".join(
            [f"MiB and samples/s: {result.job}."]
            + [f"Not predicted: {names[reason]} ({reason})" for reason in reasons]
            + ["On a CPU: measured speed as a multiple of eager torch; the next table has each job."]
        ),
    )
    yield _engines_grid(result.measured)
    known = [memory_row for memory_row in result.memory if memory_row.kinds]
    yield Grid(
        title=f"The guide's six kinds of memory at the peak, in MiB on {result.gpu}",
        heads=("Kind", *(f"{memory_row.name}>" for memory_row in known)),
        rows=tuple((name, *(show_size(memory_row.kinds[name]) for memory_row in known)) for name in KINDS),
        note=" ".join(
            dict.fromkeys(
                memory_row.refused or f"{memory_row.name}: {memory_row.job}." for memory_row in result.memory
            )
        ),
    )


def _engines_grid(measured: MeasuredEngines) -> Grid:
    """Return the table of measured engines, a row for each job and engine except eager torch."""
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    return Grid(
        title="Speed of engines on a CPU, as a multiple of eager torch",
        heads=("Job", "Engine", "CPU seconds>", "Wall seconds>", "Largest error>"),
        rows=tuple(
            (
                row.job,
                row.engine,
                f"{row.times_faster_cpu:.2f}",
                f"{row.times_faster_wall:.2f}",
                f"{row.largest_error:.0e}",
            )
            for row in measured.rows
            if row.largest_error is not None
        ),
        note=(
            f"Measured on {measured.machine}, on {measured.date}, with {versions} ({measured.source}). Other "
            "work shared the machine, so compare CPU seconds. They were not measured on a GPU."
        ),
    )


def show_ratios(rows: Sequence[EngineRatio]) -> str:
    """Return the ratios of CPU seconds of one engine, from least to largest, or `not measured`."""
    if not rows:
        return "not measured"
    ratios = [f"{ratio:.2f}" for ratio in sorted(row.times_faster_cpu for row in rows)]
    return " to ".join(dict.fromkeys((ratios[0], ratios[-1])))

"""Tables of the guide's `torch.compile` backends and memory categories."""

from __future__ import annotations

from collections.abc import Iterator

from snugfit.features.guide.inference import KINDS, InferenceGuide
from snugfit.features.guide.methods import show_rate, show_size
from snugfit.report.text.grid import Grid, escape
from snugfit.report.text.page import Page, Sentence


def render(result: InferenceGuide) -> Page:
    """Return the tables of backends and memory categories for a terminal, with the first warning."""
    doubts = result.doubts[:1]
    return Page(_grids(result), (Sentence(f"Uncertain: {doubt}", "uncertain") for doubt in doubts))


def markdown(result: InferenceGuide, *, plot: str = "") -> str:
    """Return the tables of backends and memory categories as Markdown. `plot` is the picture's file name in
    the same folder.
    """
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
        )
        for row in result.backends
    )
    refused = [row for row in result.backends if row.refused]
    reasons = dict.fromkeys(row.refused for row in refused)
    names = {why: ", ".join(row.name for row in refused if row.refused == why) for why in reasons}
    yield Grid(
        title=f"Backends of the guide for inference, {result.gpu}",
        heads=("Named", "In torch", "Today", "MiB>", "Samples/s>"),
        rows=rows,
        note=" ".join([f"{result.job}."] + [f"Not predicted: {names[why]} ({why})" for why in reasons]),
    )
    known = [one for one in result.memory if one.kinds]
    yield Grid(
        title=f"The guide's six kinds of memory at the peak, in MiB on {result.gpu}",
        heads=("Kind", *(f"{one.name}>" for one in known)),
        rows=tuple((name, *(show_size(one.kinds[name]) for one in known)) for name in KINDS),
        note=" ".join(dict.fromkeys(one.refused or f"{one.name}: {one.job}." for one in result.memory)),
    )

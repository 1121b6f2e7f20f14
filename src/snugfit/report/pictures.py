"""The pictures of each kind of result, and the page that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from snugfit.errors import UsageError
from snugfit.report import compare, prediction
from snugfit.report.page.bars import BarGroup, bars, timeline
from snugfit.report.page.memory import memory_over_step, modules_at_peak
from snugfit.report.page.picture import Picture, document
from snugfit.report.text.files import writable_folder, write_atomically
from snugfit.report.text.job import job_line
from snugfit.report.text.terminal import as_text
from snugfit.results.prediction import Prediction
from snugfit.units import show_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

REPORT_WIDTH = 120
"""Columns of the text report on a page."""


def check_page_file(path: Path | None) -> None:
    """Raises `UsageError` when `path` is given and is no `.html` file that could be written."""
    if path is None:
        return
    if path.suffix not in (".html", ".htm"):
        raise UsageError(f"--html {path}: a page is a .html file.")
    writable_folder(path.parent)


def write_page(
    path: Path, title: str, lines: Sequence[str], pictures: Sequence[Picture], report: RenderableType
) -> None:
    """Writes the pictures of a result, with its whole report as text, as one self-contained page."""
    page = document(title, lines, pictures, report=as_text(report, width=REPORT_WIDTH))
    write_atomically(path, page.encode("utf-8"))


def of_prediction(one: Prediction) -> list[Picture]:
    """Bytes through the step, bytes by module, and the step's timeline, as far as they are known."""
    anatomy, pictures = one.anatomy, []
    if anatomy.curve and anatomy.curve[0].kinds:
        context = one.footprint.context_bytes or 0
        pictures.append(memory_over_step(anatomy.curve, context_bytes=context, memory_bytes=one.memory_bytes))
    if anatomy.modules:
        pictures.append(modules_at_peak(anatomy.modules))
    if one.timing and one.timeline:
        pictures.append(timeline(one.timeline, one.timing.step_seconds))
    return pictures


def of_predictions(several: Sequence[Prediction]) -> list[Picture]:
    """What each recipe needs, side by side, and the bytes through the step of each."""
    groups = [BarGroup(str(one.recipe), [float(one.needed_bytes)]) for one in several]
    memory = several[0].memory_bytes
    pictures = [
        bars(
            "What must be free on the GPU, by recipe",
            groups,
            ["needed"],
            lambda size: show_bytes(int(size)),
            bound=float(memory) if memory else None,
            bound_words="the memory that may be used",
        )
    ]
    for one in several:
        named = of_prediction(one)[:1]
        pictures += [replace(picture, title=f"{picture.title}: {one.recipe}") for picture in named]
    return pictures


def write_predictions(path: Path, several: Sequence[Prediction]) -> None:
    """The page of one prediction, or of several recipes for one job."""
    first = several[0]
    if len(several) == 1:
        lines = [prediction.heading(first).plain.splitlines()[-1], prediction.verdict(first).plain]
        pictures, report = of_prediction(first), prediction.render(first, operators=True)
    else:
        lines, pictures, report = [], of_predictions(several), compare.render(several)
    write_page(path, job_line(first.job), lines, pictures, report)

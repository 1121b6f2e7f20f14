"""A measurement in a terminal: how the run ended, what it took, and how far it can be trusted."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from snugfit.measurement.measurement import Measurement
from snugfit.report.job import job_line
from snugfit.report.prediction import footprint_table
from snugfit.report.terminal import table, words
from snugfit.step.footprint import Timing
from snugfit.units import MIB, show_bytes, show_seconds


def render(measurement: Measurement) -> RenderableType:
    """The whole report of one measurement."""
    parts: list[RenderableType] = [_heading(measurement)]
    if measurement.footprint:
        parts.append(footprint_table(measurement.footprint))
    if measurement.timing:
        parts.append(timing_table(measurement.timing))
    parts += [words(note, style) for note, style in _notes(measurement)]
    return Group(*parts)


def _heading(measurement: Measurement) -> Text:
    job, device = measurement.job, measurement.device
    text = words(job_line(job), "bold")
    text.append("\n").append(words(f"recipe {measurement.recipe} · {measurement.loop} loop · {device.name}"))
    if device.type == "cpu":
        text.append("\nMeasured on the CPU: there is no GPU here, so the GPU's figures are missing.")
    return text


def timing_table(timing: Timing) -> Table:
    """Seconds of a step, and what follows from them."""
    rows = [
        ("step (median)", show_seconds(timing.step_seconds), f"of {timing.steps} steady steps"),
        ("spread", f"{100 * timing.spread:.1f} %", "90th less 10th percentile, of the median"),
        ("samples/s", f"{timing.samples_per_second:.2f}", ""),
    ]
    return table(("Time", ">", ""), rows)


def _notes(measurement: Measurement) -> list[tuple[str, str]]:
    notes = []
    if not measurement.ok:
        notes.append((f"The run ended with {measurement.outcome}.", "bold red"))
    if measurement.message:
        notes.append((measurement.message, ""))
    if measurement.timing and measurement.timing.unstable:
        notes.append(
            ("Unstable: the steps differ too much for the median to be trusted. Measure again.", "yellow")
        )
    if measurement.footprint and measurement.footprint.retries:
        times = measurement.footprint.retries
        notes.append((f"It fits but thrashes: the allocator gave its cache back {times} times.", "yellow"))
    if measurement.contaminated:
        notes.append((f"The GPU was not this run's alone: {measurement.contaminated}", "yellow"))
    if measurement.smi_bytes is not None and measurement.smi_nvml_bytes is not None:
        apart = measurement.smi_bytes - measurement.smi_nvml_bytes
        same = "agree" if abs(apart) <= 2 * MIB else f"differ by {show_bytes(abs(apart))}"
        notes.append((f"nvidia-smi and NVML {same}.", ""))
    return notes
